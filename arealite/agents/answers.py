"""Sampled tokens as answers of the gateway."""

from typing import Any

from arealite.api.io_struct import ModelResponse
from arealite.protocol.answer import Answer, TokenLogprob, token_text
from arealite.protocol.chat import ChatRequest
from arealite.protocol.completions import CompletionRequest
from arealite.protocol.detokenizer import token_before
from arealite.protocol.tool_calls import decode_answer, opens_thinking, style_of


def make_answers(
    tokenizer: Any, samples: list[ModelResponse], request: ChatRequest | CompletionRequest, prefix: str, stop: list[str]
) -> list[Answer]:
    """Return samples as answers: text up to a stop string, tool calls, log-probs if they are wanted."""
    answers = []
    for sample in samples:
        # A conversation has turns; a completion goes on where its prompt ends.
        before = None if isinstance(request, ChatRequest) else token_before(tokenizer, sample.input_tokens)
        # Not in the prefix, which the engine has not sampled.
        text, found = _cut(decode_answer(tokenizer, sample.output_tokens, before), stop)
        answer = Answer(prefix + text, sample.stop_reason, stop_sequence=found)
        if isinstance(request, ChatRequest):
            thinks = opens_thinking(tokenizer, sample.input_tokens)
            answer.text, answer.calls = request.split(answer.text, style_of(tokenizer), thinks)
        # For /v1/completions 0 means the sampled tokens only.
        if request.logprobs is not None and request.logprobs is not False:
            answer.logprobs = token_logprobs(tokenizer, sample.output_tokens, sample.output_logprobs)
        if request.return_token_ids:
            answer.extra = {"token_ids": sample.output_tokens, "prompt_token_ids": sample.input_tokens}
        answers.append(answer)
    return answers


def token_logprobs(tokenizer: Any, tokens: list[int], logprobs: list[float]) -> list[TokenLogprob]:
    """Return sampled tokens with their log-probs, as the APIs show them."""
    pairs = zip(tokens, logprobs, strict=True)
    return [TokenLogprob(token_text(tokenizer, token), token, value) for token, value in pairs]


def _cut(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Return the text before the first stop string, and that string."""
    found = [(text.index(word), word) for word in stop if word and word in text]
    if not found:
        return text, None
    at, word = min(found)
    return text[:at], word
