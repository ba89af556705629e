"""GSM8K rows for supervised training and for RL.

Reads any file with the columns `question` and `answer`, which ends in `#### number`, and those of MAWPS.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from arealite.api.cli_args import DatasetConfig
from arealite.dataset.rows import load_dataset, require_columns
from arealite.dataset.sft import tokenize_sft, within_length

Row = dict[str, Any]
INSTRUCTION = "\nPlease put your final answer within \\boxed{}."


def get_gsm8k_sft(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Load rows with `input_ids` and a `loss_mask` of 1 on the worked answer."""
    pairs = [(f"{row['question']}\n", row["answer"]) for row in _load(config)]
    rows = [tokenize_sft(question, answer, tokenizer) for question, answer in pairs]
    return within_length(rows, config.max_length, config.path)


def get_gsm8k_rl(config: DatasetConfig, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Load rows with a question of at most `max_length` tokens and the `answer` for the reward.

    A question is a chat (`messages`), or plain text (`prompt`) if the tokenizer has no chat template.
    """
    rows = []
    for row in _load(config):
        question = row["question"] + INSTRUCTION
        prompt: Row = {"messages": [{"role": "user", "content": question}]}
        if not tokenizer.chat_template:
            prompt = {"prompt": f"Question: {question}\nAnswer:"}
        ids = tokenizer.encode(question) if config.max_length else []
        rows.append({**prompt, "answer": row["answer"], "input_ids": ids})
    kept = within_length(rows, config.max_length, config.path)
    return [{key: row[key] for key in row if key != "input_ids"} for row in kept]


def _rename(row: Row) -> Row:
    """Return a row with `question` and `answer`; MAWPS has `input`, and a number as `target`."""
    if "question" not in row and {"input", "target"} <= row.keys():
        return {"question": row["input"], "answer": str(row["target"])}
    return row


def _load(config: DatasetConfig) -> list[Row]:
    rows = [_rename(row) for row in load_dataset(config)]
    require_columns(rows, ["question", "answer"], config.path, must_be_text=True)
    return rows
