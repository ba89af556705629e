"""What a session accepts of a request: fields that it can serve, sampling parameters, rewards.

What cannot be trained on correctly is refused with the reason. Sampling follows the trainer's `gconfig`, because the
trainer computes log-probs for that distribution.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arealite.agents.session import Session
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import RequestError
from arealite.protocol.chat import ChatRequest
from arealite.protocol.completions import CompletionRequest

_NO_CONSTRAINTS = (
    "response_format is not supported in a session: the trainer computes log-probs without the constraint, so answers "
    "sampled under one would be trained with wrong probabilities. Ask for JSON in the prompt, or use a tool"
)
_NO_ALTERNATIVES = (
    "top_logprobs are not supported in a session: inference engines return the log-probs of the sampled tokens only. "
    "Use logprobs without alternatives"
)
# Fields of a request that do not change the distribution that is sampled from.
_KEPT_SAMPLING = ("n", "max_new_tokens", "stop")
# Prefixes of response ids in OpenAI's and Anthropic's APIs.
_ID_PREFIXES = ("resp_", "msg_")


def check_chat(request: ChatRequest) -> None:
    """Raise `RequestError` for a conversation that a session cannot serve."""
    if request.json_schema is not None:
        raise RequestError(_NO_CONSTRAINTS)
    if request.top_logprobs:
        raise RequestError(_NO_ALTERNATIVES)


def check_completion(request: CompletionRequest) -> str | list[int]:
    """Return the prompt of a text completion; raises `RequestError` for one that a session cannot serve."""
    if request.json_schema is not None:
        raise RequestError(_NO_CONSTRAINTS)
    if request.logprobs:
        raise RequestError(_NO_ALTERNATIVES)
    if request.echo:
        raise RequestError("echo is not supported in a session: the client has the prompt")
    prompt: Any = request.prompt
    # Engines hold ids in 32 bits.
    is_ids = isinstance(prompt, list) and prompt and all(type(i) is int and abs(i) < 1 << 31 for i in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise RequestError("prompt must be one text or one list of token ids")
    return prompt


def merge_sampling(
    own: GenerationHyperparameters, sampling: Mapping[str, Any], max_choices: int
) -> tuple[GenerationHyperparameters, bool]:
    """Return the parameters of a call, and whether something that the request asks for is ignored.

    `n`, `stop` and a smaller number of tokens are taken from the request, all else from the session's `own` parameters.
    """
    count, stop = sampling.get("n", 1), sampling.get("stop") or []
    if not 1 <= count <= max_choices:
        raise RequestError(f"n must be between 1 and {max_choices}, got {count}")
    max_new_tokens = min(own.max_new_tokens, sampling.get("max_new_tokens", own.max_new_tokens))
    if max_new_tokens < 1:
        raise RequestError(f"the largest number of tokens must be at least 1, got {max_new_tokens}")
    others = {name: value for name, value in sampling.items() if name not in _KEPT_SAMPLING}
    is_ignored = any(getattr(own, name, None) != value for name, value in others.items())
    return replace(own, n_samples=count, max_new_tokens=max_new_tokens, stop=[*own.stop, *stop]), is_ignored


def set_reward(session: Session, body: Mapping[str, Any]) -> None:
    """Set the reward in `{"reward": number, "id": response}`; without an id, that of the session."""
    value, reply_id = body.get("reward"), body.get("id")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"reward must be a number, got {value!r:.100}")
    if not isinstance(reply_id, str | None):
        raise RequestError(f"id must be that of a response, got {reply_id!r:.100}")
    for prefix in _ID_PREFIXES:
        reply_id = reply_id and reply_id.removeprefix(prefix)
    # The first of several choices has the id of the response alone.
    reply_id = reply_id and reply_id.removesuffix("-0")
    try:
        session.reward(float(value), reply_id)
    except OverflowError:
        raise RequestError("reward is too large a number") from None
