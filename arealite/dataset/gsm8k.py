"""GSM8K rows for supervised training and for RL.

Reads any file with the columns `question` and `answer`, which ends in `#### number`, and those of MAWPS.
"""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from arealite.api.dataset_args import DataSourceConfig
from arealite.dataset.columns import Row, require_text
from arealite.dataset.prompts import QUESTION, PromptFormat, load_prompts
from arealite.dataset.sft import get_sft

INSTRUCTION = "\nPlease put your final answer within \\boxed{}."


def get_gsm8k_sft(
    config: DataSourceConfig, tokenizer: PreTrainedTokenizerBase, cache: Path | None = None
) -> Sequence[Row]:
    """Load rows with `input_ids` and a `loss_mask` of 1 on the worked answer."""
    return get_sft(config, tokenizer, WORKED_ANSWERS, cache)


def get_gsm8k_rl(
    config: DataSourceConfig, tokenizer: PreTrainedTokenizerBase, cache: Path | None = None
) -> Sequence[Row]:
    """Load rows with a question of at most `max_length` tokens and the `answer` for the reward.

    A question is a chat (`messages`), or plain text (`prompt`) if the tokenizer has no chat template.
    """
    return load_prompts(config, WORD_PROBLEMS, tokenizer, cache=cache)


def adapt_word_problem(row: Row) -> Row:
    """Return a row with `question` and `answer`; MAWPS has `input`, and a number as `target`."""
    if "question" not in row and {"input", "target"} <= row.keys():
        return {"question": row["input"], "answer": str(row["target"])}
    return require_text(row, "question", "answer")


WORD_PROBLEMS = PromptFormat(
    {"prompt": "question", "answer": "answer"}, adapt_word_problem, instruction=INSTRUCTION, plain=QUESTION
)
WORKED_ANSWERS = PromptFormat({"prompt": "question", "response": "answer"}, adapt_word_problem, plain="{prompt}\n")
