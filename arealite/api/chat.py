"""Chat messages as tokens: the first prompt, and what follows a sampled turn; tokens as texts.

Workflows and endpoints with several turns use it. Sampled tokens are never decoded and encoded again, which may give
other tokens: `encode_next` returns only what stands behind them. It renders a fixed conversation with one reply in
front of the new messages, and takes the text behind that reply.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from arealite.api.errors import DatasetError, RequestError

Message = Mapping[str, Any]
# Plain letters, which every template leaves as they are.
_REPLY, _ARGUMENT = "OneReplyOfTheAssistant", "OneArgumentOfACall"
_BASE_PROMPT = {"role": "user", "content": "A"}
# Some templates demand ids of nine letters and digits.
_CALL_ID = "call00000"
# Up to so many tokens are decoded, and characters encoded, without the thread pool of the tokenizer.
_FEW_TOKENS, _FEW_CHARACTERS = 256, 1024


def decode_all(tokenizer: Any, sequences: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
    """Return the text of each sequence of tokens, as `tokenizer.decode` does.

    A tokenizer in Rust decodes many of them in one call that does not hold the interpreter's lock. `tokenizer.decode`
    also checks each token in Python, which takes as long as decoding.
    """
    if _is_plain(tokenizer, "decode", "_decode") and not tokenizer.clean_up_tokenization_spaces:
        backend = tokenizer.backend_tokenizer
        # A batch wakes the threads of the pool, which takes longer than decoding a few tokens.
        if sum(map(len, sequences)) <= _FEW_TOKENS:
            return [backend.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]
        return backend.decode_batch(sequences, skip_special_tokens=skip_special_tokens)
    # Tokenizers of others may not know the option.
    options = {"skip_special_tokens": True} if skip_special_tokens else {}
    return [tokenizer.decode(ids, **options) for ids in sequences]


def encode_text(tokenizer: Any, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the tokens of a text, as `tokenizer.encode` does.

    For a short text that takes several times as long.
    """
    if len(text) <= _FEW_CHARACTERS and _is_plain(tokenizer, "encode", "_encode_plus"):
        backend = tokenizer.backend_tokenizer
        if backend.truncation is backend.padding is None and not tokenizer.split_special_tokens:
            return backend.encode(text, add_special_tokens=add_special_tokens).ids
    # Tokenizers of others may not know the option.
    return tokenizer.encode(text) if add_special_tokens else tokenizer.encode(text, add_special_tokens=False)


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Any] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> list[int]:
    """Return the tokens of a whole conversation, by default up to where the model answers."""
    text = _render(tokenizer, messages, tools, add_generation_prompt, template_kwargs)
    return encode_text(tokenizer, text, add_special_tokens=False)


def encode_next(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Any] | None = None,
    *,
    sampled: Sequence[int],
    **template_kwargs: Any,
) -> list[int]:
    """Return the tokens that `messages` and the beginning of the next turn add to the turn `sampled`.

    If the turn was cut off before its end token, that comes first. With a template that renders a turn in the same way
    at every position, all tokens equal those of the whole conversation.
    """
    text = _text_behind_reply(tokenizer, messages, tools, template_kwargs)
    ids = encode_behind(tokenizer, text)
    _, last = _end_of_turn(tokenizer, _template(tokenizer))
    # Some templates end the last turn of a conversation in another way.
    num_end = next((i for i, (a, b) in enumerate(zip(ids, last, strict=False)) if a != b), min(len(ids), len(last)))
    for count in range(num_end, 0, -1):
        if list(sampled[-count:]) == ids[:count]:
            return ids[count:]
    has_other_end = num_end and sampled and sampled[-1] in _end_tokens(tokenizer)
    return ids[1:] if has_other_end and ids[0] in tokenizer.all_special_ids else ids


def _render(
    tokenizer: Any, messages: Sequence[Message], tools: list[Any] | None, prompt: bool, kwargs: dict[str, Any]
) -> str:
    _template(tokenizer)
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tools=tools, add_generation_prompt=prompt, tokenize=False, **kwargs
        )
    # A template is code that came with a model, and messages are data: both may raise anything.
    except Exception as error:
        roles = [m.get("role") if isinstance(m, Mapping) else m for m in messages]
        raise RequestError(
            f"the chat template cannot render messages with the roles {str(roles)[:200]}: {error}"
        ) from error
    return text


def _template(tokenizer: Any) -> Any:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise DatasetError(
            "there are `messages`, but the tokenizer has no chat template: use an instruct model, or rows with `prompt`"
        )
    return template


def _text_behind_reply(
    tokenizer: Any, messages: Sequence[Message], tools: list[Any] | None, kwargs: dict[str, Any]
) -> str:
    """Return the text behind a reply: its end, the messages, and what starts the next reply."""
    first_error: RequestError | None = None
    for calls in _possible_calls(messages):
        reply = {"role": "assistant", "content": _REPLY} | ({"tool_calls": calls} if calls else {})
        try:
            text = _render(tokenizer, [_BASE_PROMPT, reply, *messages], tools, True, kwargs)
            if not calls:
                return _behind(text, _REPLY)
            alone = _behind(_render(tokenizer, [_BASE_PROMPT, reply], tools, False, kwargs), _ARGUMENT)
            (end, _), text = _end_of_turn(tokenizer, _template(tokenizer)), _behind(text, _ARGUMENT)
            if text.startswith(alone) and alone.endswith(end):
                return end + text.removeprefix(alone)
        except RequestError as error:
            first_error = first_error or error
    raise first_error or RequestError("the chat template cannot render the result of a tool behind a call")


def _possible_calls(messages: Sequence[Message]) -> list[list[dict[str, Any]]]:
    """Return the calls that the reply before `messages` may need: one for each result, one only, none."""
    results = [m for m in messages if isinstance(m, Mapping) and m.get("role") == "tool"]
    chosen = {len(results), min(1, len(results)), 0}
    return [_calls(results[:count]) for count in sorted(chosen, reverse=True)]


def _calls(results: list[Message]) -> list[dict[str, Any]]:
    """Return the calls that have these results. The marker is in the last one."""
    names = [(m.get("name") or "tool", m.get("tool_call_id") or _CALL_ID) for m in results]
    arguments = [{}] * (len(results) - 1) + [{"a": _ARGUMENT}]
    return [
        {"type": "function", "id": own_id, "function": {"name": name, "arguments": own}}
        for (name, own_id), own in zip(names, arguments, strict=bool(names))
    ]


def _behind(text: str, marker: str) -> str:
    # The first one: new messages, which stand behind it, are data of others and may contain it too.
    _, found, behind = text.partition(marker)
    if not found:
        raise RequestError("the chat template leaves out the reply of the assistant before the new messages")
    return behind


@functools.lru_cache(maxsize=16)
def _end_of_turn(tokenizer: Any, template: Any) -> tuple[str, list[int]]:
    """Return what the template writes behind the last reply of a conversation: text and tokens."""
    reply = {"role": "assistant", "content": _REPLY}
    text = _behind(_render(tokenizer, [_BASE_PROMPT, reply], None, False, {}), _REPLY)
    return text, encode_behind(tokenizer, text)


@functools.lru_cache(maxsize=32)
def _marker_ids(tokenizer: Any, marker: str) -> list[int]:
    return encode_text(tokenizer, marker, add_special_tokens=False)


def encode_behind(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text that follows other tokens.

    Tokenizers of SentencePiece (Llama 2, Mistral, Phi 3) add a space to the beginning of whatever they are given.
    """
    # Letters may form a token with those of a reply; nothing does so with a line break in such a vocabulary.
    for marker in (_REPLY, "\n"):
        before = _marker_ids(tokenizer, marker)
        ids = encode_text(tokenizer, marker + text, add_special_tokens=False)
        if ids[: len(before)] == before:
            return ids[len(before) :]
    return encode_text(tokenizer, text, add_special_tokens=False)


def _end_tokens(tokenizer: Any) -> set[int | None]:
    """Tokens that end a turn, whatever the template writes: Llama ends one with calls by `<|eom_id|>`."""
    other = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    return {tokenizer.eos_token_id, None if other == tokenizer.unk_token_id else other}


def _is_plain(tokenizer: Any, *methods: str) -> bool:
    """Whether this is a fast tokenizer of transformers without code of its own for these methods."""
    return _has_plain(type(tokenizer), methods) and vars(tokenizer).keys().isdisjoint(methods)


@functools.cache
def _has_plain(kind: Any, methods: tuple[str, ...]) -> bool:
    # The base class of all fast tokenizers, without an import of transformers: that takes long.
    fast = next((base for base in kind.__mro__ if "backend_tokenizer" in vars(base)), None)
    if fast is None or not fast.__module__.startswith("transformers."):
        return False
    return all(getattr(kind, name) is getattr(fast, name, None) for name in methods)
