"""Questions whose answers are in a corpus: the model searches before it answers.

    python -m arealite.launcher.local examples/arealite/search_agent.py \
        --config examples/arealite/configs/search_agent.yaml \
        actor.path=/path/to/model train_dataset.path=/path/to/squad.jsonl

Rows have `question`, `answer` (or `answers`) and `context`, as SQuAD does. All contexts together are the corpus, with
BM25 as the search engine. The reward asks for the answer in the last line.
"""

from typing import Any

from arealite.api.cli_args import GRPOConfig
from arealite.dataset import load_dataset, load_tokenizer, map_rows, require_columns
from arealite.env.search import BM25Index
from arealite.reward.qa import qa_reward
from arealite.trainer.ppo import PPOTrainer
from arealite.utils.config import load_config, run_main
from arealite.workflow.tools import ToolWorkflow

PROMPT = "Answer the question. Search before you answer. End with a line that has the answer alone.\n\n{question}"


def make_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for the workflow: messages, and the accepted answers."""
    require_columns(row, "question", "context", "answer" if "answer" in row else "answers")
    answers = row.get("answer") or row["answers"]
    # SQuAD: {"text": [...], "answer_start": [...]}
    accepted = answers["text"] if isinstance(answers, dict) else answers
    return {"messages": [{"role": "user", "content": PROMPT.format(**row)}], "answer": accepted}


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path, for_chat=True)
    rows = load_dataset(config.train_dataset)
    prepared = map_rows(rows, make_row, config.train_dataset.path)
    contexts = dict.fromkeys(str(row["context"]) for row in rows)
    corpus = BM25Index.from_texts({f"Passage {i}": text for i, text in enumerate(contexts)})
    workflow = ToolWorkflow(qa_reward, config.gconfig, tokenizer, tools=[corpus.search], max_turns=3)
    PPOTrainer(config, prepared, tokenizer).train(workflow)


if __name__ == "__main__":
    run_main(main)
