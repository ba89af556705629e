"""Requests in one of the three chat APIs: chat completions, responses, Anthropic's messages.

Used by the embedded server and the gateway. `echo_of` reads an answer as the next request will be read, so that both
can be compared as data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from arealite.protocol import chat, messages, responses
from arealite.protocol.answer import Answer, Head, Stream, Usage
from arealite.protocol.chat import ChatRequest


@dataclass
class ApiRequest:
    """A request, and the functions that write its answer as a body or as a stream."""

    request: ChatRequest
    write: Callable[[Head, list[Answer], Usage], dict[str, Any]]
    # The second argument is the number of tokens of the prompt.
    stream: Callable[[Head, int], Stream]
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
