"""Token ids of prompts: texts, lists of token ids, and conversations in the chat template."""

import asyncio
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import TemplateError

from arealite.api.errors import RequestError
from arealite.inference.engine import Engine
from arealite.inference.http import common
from arealite.inference.http.generate_api import SHORT_TEXT, encode, tokenize
from arealite.inference.http.images import split_images
from arealite.inference.sequence import MAX_SAMPLES
from arealite.inference.vision import PromptImages
from arealite.protocol.chat import ChatRequest
from arealite.protocol.fields import FieldError
from arealite.protocol.tool_calls import forced_prefix, style_of


async def read_prompts(engine: Engine, prompt: Any, num_samples: int) -> list[list[int]]:
    """Return the token ids of each prompt: a text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [await encode(engine, prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a text, a list of token ids, or a list of those")
    if all(type(token) is int for token in prompt):
        return [common.check_token_ids(prompt, "prompt")]
    if len(prompt) * num_samples > MAX_SAMPLES:
        raise RequestError(f"{len(prompt)} prompts with n={num_samples}: a request may have {MAX_SAMPLES} answers")
    for part in prompt:
        if not isinstance(part, str):
            common.check_token_ids(part, "prompt")

    def tokenize_all() -> list[list[int]]:
        return [tokenize(engine, part) if isinstance(part, str) else part for part in prompt]

    # Many short texts take as long as a long one.
    is_short = sum(len(part) for part in prompt if isinstance(part, str)) <= SHORT_TEXT
    return tokenize_all() if is_short else await common.run_beside(tokenize_all)


@dataclass
class ChatPrompt:
    """The tokens of a conversation, and the text `prefix` with which its answer starts.

    A `tool_choice` that demands a call ends the prompt with the beginning of a call. That is part of the answer's text,
    but the model has not sampled it.
    """

    ids: list[int]
    prefix: str = ""
    images: PromptImages | None = None


async def chat_prompt(engine: Engine, request: ChatRequest, is_short: bool) -> ChatPrompt:
    """Render and tokenize a conversation, unless it is short beside the event loop."""
    variables = request.template_variables
    has_template = request.has_images or getattr(engine.tokenizer, "chat_template", None)
    if engine.tokenizer is None or not has_template:
        raise RequestError("the model's tokenizer has no chat template: use /v1/completions")
    if variables.keys() & inspect.signature(engine.tokenizer.apply_chat_template).parameters.keys():
        raise RequestError(f"chat_template_kwargs must map variables of the template to values, got {variables!r}")
    if not request.has_images:
        make = partial(_text_prompt, engine, request)
        return make() if is_short else await common.run_beside(make)
    if request.tool_choice in ("required", "named"):
        raise FieldError("tool_choice", "tool_choice cannot demand a call in a conversation with images: use auto")
    folder = engine.config.image_folder
    messages, images = await common.run_beside(lambda: split_images(request.messages, folder))
    if request.tools:
        variables = {**variables, "tools": request.tools}
    ids, placed = await asyncio.wrap_future(engine.read_prompt(messages, images, **variables))
    return ChatPrompt(ids, images=placed)


def _text_prompt(engine: Engine, request: ChatRequest) -> ChatPrompt:
    tokenizer: Any = engine.tokenizer
    num_characters = sum(len(message["content"] or "") for message in request.messages)
    if num_characters > SHORT_TEXT and num_characters > engine.max_characters:
        raise RequestError(f"the messages have more characters than {engine.max_len} tokens can hold: shorten them")
    settings = {"tools": request.tools or None, "add_generation_prompt": True, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template(request.messages, **settings, **request.template_variables)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError, TemplateError) as error:
        raise RequestError(f"the chat template rejects these messages: {error}") from error
    is_forced = request.tool_choice in ("required", "named")
    prefix = forced_prefix(style_of(tokenizer), request.tool_name) if is_forced else ""
    return ChatPrompt(tokenize(engine, text + prefix, add_special_tokens=False), prefix)
