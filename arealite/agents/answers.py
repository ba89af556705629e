"""What the gateway says in each API: sampled tokens as answers, and how a client will send them back.

An `ApiRequest` is a request in one of the three chat APIs. `echo_of` reads the gateway's own answer in the way in which
the next request will be read, so that both can be compared as data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from arealite.api.io_struct import ModelResponse
from arealite.protocol import chat, messages, responses
from arealite.protocol.answer import Answer, Head, TokenLogprob, Usage
from arealite.protocol.chat import ChatRequest
from arealite.protocol.completions import CompletionRequest
from arealite.protocol.tool_calls import decode_answer, style_of


@dataclass
class ApiRequest:
    """A request, and the functions that write its answer as a body or as a stream."""

    request: ChatRequest
    write: Callable[[Head, list[Answer], Usage], dict[str, Any]]
    stream: Callable[[Head, int], Any]
    # The messages that one choice of a body becomes when the client sends it back.
    read_back: Callable[[dict[str, Any]], list[dict[str, Any]]]


def chat_request(body: dict[str, Any]) -> ApiRequest:
    """Read a body of `/v1/chat/completions`."""
    request = chat.parse(body)

    def read_back(choice: dict[str, Any]) -> list[dict[str, Any]]:
        return [chat.read_message(choice["message"])]

    return ApiRequest(request, chat.result, lambda head, _: chat.ChatStream(head, request), read_back)


def response_request(body: dict[str, Any]) -> ApiRequest:
    """Read a body of `/v1/responses`."""
    request = responses.parse(body)
    return ApiRequest(
        request,
        lambda head, answers, usage: responses.result(head, body, answers[0], usage),
        lambda head, _: responses.ResponseStream(head, body),
        lambda result: responses.parse({"input": result["output"]}).messages,
    )


def message_request(body: dict[str, Any]) -> ApiRequest:
    """Read a body of `/v1/messages`."""
    request = messages.parse(body)

    def read_back(result: dict[str, Any]) -> list[dict[str, Any]]:
        # A conversation that ends with the assistant is refused.
        said = [{"role": "assistant", "content": result["content"]}, {"role": "user", "content": ""}]
        return messages.parse({"max_tokens": 1, "messages": said}).messages[:-1]

    def write(head: Head, answers: list[Answer], usage: Usage) -> dict[str, Any]:
        return messages.result(head, answers[0], usage)

    return ApiRequest(request, write, messages.MessageStream, read_back)


def echo_of(api: ApiRequest, result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the messages that each choice becomes when the client sends it back."""
    return [api.read_back(choice) for choice in result.get("choices", [result])]


def make_answers(
    tokenizer: Any, samples: list[ModelResponse], request: ChatRequest | CompletionRequest, prefix: str, stop: list[str]
) -> list[Answer]:
    """Return samples as answers: text up to a stop string, tool calls, log-probs if they are wanted."""
    answers = []
    for sample in samples:
        text, found = _cut(prefix + decode_answer(tokenizer, sample.output_tokens), stop)
        answer = Answer(text, sample.stop_reason, stop_sequence=found)
        if isinstance(request, ChatRequest):
            answer.text, answer.calls = request.split(text, style_of(tokenizer))
        # For /v1/completions 0 means the sampled tokens only.
        if request.logprobs is not None and request.logprobs is not False:
            pairs = zip(sample.output_tokens, sample.output_logprobs, strict=True)
            answer.logprobs = [TokenLogprob(_token_text(tokenizer, token), token, value) for token, value in pairs]
        if request.return_token_ids:
            answer.extra = {"token_ids": sample.output_tokens, "prompt_token_ids": sample.input_tokens}
        answers.append(answer)
    return answers


def _cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and that string."""
    found = [(text.index(word), word) for word in stop if word and word in text]
    if not found:
        return text, None
    at, word = min(found)
    return text[:at], word


@lru_cache(1 << 16)
def _token_text(tokenizer: Any, token: int) -> str:
    return tokenizer.decode([token])
