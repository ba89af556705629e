"""Conversations as tokens for supervised training, with the loss on turns of the assistant only.

Works with any chat template: a turn is what the template adds to the conversation before it, behind the prompt with
which a server would ask for it. Every turn is tokenized on its own, as a server sees it, so that no token spans the
border of a mask. Some templates write an earlier turn otherwise than the last one (they remove its reasoning); then
every turn of the assistant becomes a row of its own, with the conversation before it as its prompt.
"""

import itertools
from collections.abc import Set
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from arealite.api.errors import DatasetError
from arealite.dataset.columns import Messages, Row, Tools, join_texts


def tokenize_chat(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, start: int = 0, tools: Tools = None
) -> list[Row]:
    """Return rows with `input_ids` and `loss_mask`, 1 on the assistant's turns from message `start` on.

    `tools` are the functions that the template declares to the model.

    It is one row, or one for each turn. A turn that begins the conversation is not trained. Raises `ValueError` for
    messages without any other turn.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "it is made of messages, and the tokenizer has no chat template: give texts, or another tokenizer"
        )
    messages = join_texts(messages)
    if any(isinstance(message.get("content"), list) for message in messages):
        raise ValueError(
            "its messages have parts that are not text: images need a script with collate_vision_sft (docs/vision.md)"
        )
    # A greeting before all other messages answers no prompt: templates cannot ask for it.
    turns = [i for i in range(max(start, 1), len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        raise ValueError(
            "its messages have no turn of the assistant behind another message, so there is nothing to learn"
        )
    # The text before each turn, and the text up to its end.
    spans = [
        (render(messages[:i], tokenizer, True, tools), render(messages[: i + 1], tokenizer, tools=tools)) for i in turns
    ]
    whole = spans[-1][1]
    for before, after in spans:
        if not after.startswith(before):
            raise ValueError("the tokenizer's chat template does not write an answer behind its generation prompt")
    pairs = itertools.pairwise(spans)
    is_stable = all(later.startswith(done) and whole.startswith(done) for (_, done), (later, _) in pairs)
    ends = frozenset(tokenizer.all_special_ids)
    return [_tokenize(part, ends, tokenizer) for part in ([spans] if is_stable else [[span] for span in spans])]


def render(
    messages: Messages, tokenizer: PreTrainedTokenizerBase, add_generation_prompt: bool = False, tools: Tools = None
) -> str:
    """Return a conversation as text; raises `ValueError` if the template rejects it."""
    try:
        how: Any = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "tools": tools}
        return str(tokenizer.apply_chat_template(messages, **how))
    # A template that adds texts raises TypeError for a content that is None.
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the tokenizer's chat template rejects its messages: {error}") from error


def _tokenize(spans: list[tuple[str, str]], ends: Set[int], tokenizer: PreTrainedTokenizerBase) -> Row:
    """Tokenize a conversation whose trained parts are `spans`, each (text before it, text up to its end).

    `ends` are the tokens that may end a turn.
    """
    if tokenizer.eos_token_id is None:
        raise DatasetError("the tokenizer has no end-of-text token, so an answer could never end")
    ids, mask = [], []
    done, num_after = "", 0
    for before, after in spans:
        # The template has written the special tokens.
        prompt = tokenizer.encode(before.removeprefix(done), add_special_tokens=False)
        answer = tokenizer.encode(after.removeprefix(before), add_special_tokens=False)
        # A turn without a special token is trained as a whole.
        length = next((i + 1 for i in reversed(range(len(answer))) if answer[i] in ends), len(answer))
        ids += prompt + answer
        mask += [0] * len(prompt) + [1] * length + [0] * (len(answer) - length)
        done, num_after = after, len(answer) - length
    # Templates often end the last turn with a line break, which no model has to write.
    ids, mask = ids[: len(ids) - num_after], mask[: len(mask) - num_after]
    if not (mask and mask[-1]) or ids[-1] not in ends:
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, 1]
    return {"input_ids": ids, "loss_mask": mask}
