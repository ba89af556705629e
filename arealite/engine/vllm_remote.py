"""`RemotevLLMEngine`: the client of vLLM's native endpoints for reinforcement learning. No patched server is needed.

Tokens in, tokens out over /inference/v1/generate; pause, weights and versions over the endpoints of VLLM_SERVER_DEV_MODE=1. Only the wire format
is here; choice of server, interruption, retries and collecting are inherited. Versions that lack an endpoint are named when connecting.
"""

from __future__ import annotations

from typing import Any

from arealite.api.errors import ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.core.router import Server
from arealite.engine.remote import Piece, Progress, RemoteEngine
from arealite.utils.fingerprint import Fingerprints
from arealite.utils.http import HttpError

_CONTROL_TIMEOUT_S = 60.0
_PAUSE_MODES = {"abort": "abort", "in_place": "keep"}
_NEEDS = (
    "RemotevLLMEngine needs vLLM 0.30 or later, started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1 "
    "(the launcher does so)"
)
_EXTENSION = "arealite.engine.vllm_extension.WeightLoading"


class RemotevLLMEngine(RemoteEngine):
    """Generates with vLLM servers."""

    async def send(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        body = {
            "token_ids": progress.request.input_ids + progress.tokens,
            "sampling_params": _sampling_params(
                progress, num_samples, progress.next_segment(self.config.segment_tokens)
            ),
            "request_id": progress.next_rid(),
            # Updated in place, vLLM keeps its prefix cache: keys and values of old weights must not meet new requests.
            "cache_salt": f"v{server.version}",
        }
        url = f"{server.url}/inference/v1/generate"
        answer = await self.http.post(url, body, self.config.request_timeout_s)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            pieces = [_piece(choice, server, self.get_version()) for choice in choices]
        except (KeyError, TypeError) as error:
            raise ServerError(
                f"{server.address} answered without the expected fields: {error!r}"
            ) from error
        # Aborted before its first token, a sample has no entry.
        pieces += [Piece([], [], [], "abort") for _ in range(num_samples - len(pieces))]
        return pieces

    async def pause_server(self, server: Server) -> None:
        mode = _PAUSE_MODES[self.config.pause_mode]
        await self._control(server, f"pause?mode={mode}")

    async def continue_server(self, server: Server) -> None:
        await self._control(server, "resume")

    def can_swap(self, server: Server) -> bool:
        return False

    async def load_weights(self, server: Server, meta: WeightUpdateMeta) -> None:
        if meta.type not in ("disk", "shm"):
            raise WeightUpdateError(
                f"RemotevLLMEngine cannot update weights by {meta.type!r}: set rollout.weight_update=disk or shm"
            )
        call: dict[str, Any] = {"method": "arealite_load", "args": [meta.type, meta.path]}
        try:
            await self._control(server, "collective_rpc", call, self.config.setup_timeout_s)
            await self._control(server, "update_weight_version", {"new_version": str(meta.version)})
        except HttpError as error:
            raise WeightUpdateError(
                f"{server.address} refused version {meta.version}: {error.text}"
            ) from error

    async def probe(self, server: Server) -> None:
        await self.http.get(f"{server.url}/health", timeout_s=5)
        try:
            info = await self.http.get(f"{server.url}/weight_info", timeout_s=5)
            setup = await self.http.get(f"{server.url}/server_info?config_format=json", timeout_s=5)
            paths = (await self.http.get(f"{server.url}/openapi.json", timeout_s=10))["paths"]
        except HttpError as error:
            if error.status != 404:
                raise
            raise ServerError(f"{server.address} lacks an endpoint ({error}): {_NEEDS}") from error
        if "/inference/v1/generate" not in paths:
            raise ServerError(f"{server.address} lacks /inference/v1/generate: {_NEEDS}")
        if _EXTENSION not in str(setup):
            raise ServerError(
                f"{server.address} was started without --worker-extension-cls {_EXTENSION}: it could not load new weights"
            )
        server.version = _version(info.get("weight_version"), 0)

    async def ping(self, server: Server, timeout_s: float) -> None:
        await self.http.get(f"{server.url}/health", timeout_s)

    async def fingerprints(self, server: Server) -> Fingerprints | None:
        call = {"method": "arealite_fingerprints"}
        answer = await self._control(server, "collective_rpc", call)
        held = answer["results"][0]
        return None if held is None else {name: (d, h) for name, (d, h) in held.items()}

    async def _control(
        self, server: Server, endpoint: str, body: Any = None, timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> Any:
        return await self.http.post(f"{server.url}/{endpoint}", body or {}, timeout_s)


def _sampling_params(progress: Progress, num_samples: int, max_tokens: int) -> dict[str, Any]:
    g = progress.request.gconfig
    params: dict[str, Any] = {
        "n": num_samples,
        "max_tokens": max_tokens,
        "min_tokens": max(0, g.min_new_tokens - len(progress.tokens)),
        "temperature": g.temperature,
        "top_p": g.top_p,
        "top_k": g.top_k,
        "min_p": g.min_p,
        "ignore_eos": g.ignore_eos,
        "frequency_penalty": g.frequency_penalty,
        "presence_penalty": g.presence_penalty,
        "repetition_penalty": g.repetition_penalty,
        "logprobs": 0,  # that of the sampled token alone
        "skip_special_tokens": False,
    }
    if g.stop_token_ids:
        params["stop_token_ids"] = g.stop_token_ids
    if g.stop:
        params["stop"] = g.stop
    if progress.seed is not None:
        params["seed"] = progress.seed
    return params


def _piece(choice: dict[str, Any], server: Server, current_version: int) -> Piece:
    reason = choice["finish_reason"]
    if reason not in ("stop", "length", "abort"):
        raise ServerError(f"{server.address} ended a request for an unknown reason: {reason!r}")
    tokens = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(tokens):
        raise ServerError(
            f"{server.address} gave {len(content)} log-probs for {len(tokens)} tokens"
        )
    versions = [current_version] * len(tokens)
    for span in choice.get("weight_versions") or []:
        start, end = span["start"], span["end"]
        versions[start:end] = [_version(span["version"], current_version)] * (end - start)
    return Piece(tokens, [entry["logprob"] for entry in content], versions, reason)


def _version(text: Any, default: int) -> int:
    """vLLM calls the weights it started with `default`; every update by us is a number."""
    return int(text) if isinstance(text, int | str) and str(text).isdigit() else default
