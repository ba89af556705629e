"""`RemoteSGLangEngine`: the client of SGLang's native endpoints, which the embedded server speaks too.

Only the wire format is here; choice of server, interruption, retries and collecting are inherited.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ServerError, WeightUpdateError
from arealite.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.core.router import Server
from arealite.engine.broadcast import WeightSender
from arealite.engine.remote import Piece, Progress, RemoteEngine
from arealite.utils.fingerprint import Fingerprints
from arealite.utils.http import HttpError

_CONTROL_TIMEOUT_S = 60.0


class RemoteSGLangEngine(RemoteEngine):
    """Generates with SGLang or embedded servers."""

    def __init__(
        self, config: InferenceEngineConfig, seed: int = 1, ledger_path: str | Path | None = None
    ):
        super().__init__(config, seed, ledger_path)
        self._sender = WeightSender()

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        # SGLang gives all n samples of a request the same seed; the embedded server seed + i
        if request.seed is not None and not all(
            s.is_arealite for s in self.router.servers.values()
        ):
            return await InferenceEngine.agenerate_group(self, request)
        return await super().agenerate_group(request)

    async def send(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        body = {
            "input_ids": progress.request.input_ids + progress.tokens,
            "sampling_params": sampling_params(
                progress, num_samples, progress.next_segment(self.config.segment_tokens)
            ),
            "return_logprob": True,
            "rid": progress.next_rid(),
        }
        if not server.is_arealite:
            # Updated in place, SGLang keeps its prefix cache: keys and values of old weights must not meet new requests.
            body["extra_key"] = f"v{server.version}"
        answer = await self.http.post(f"{server.url}/generate", body, self.config.request_timeout_s)
        answers = answer if isinstance(answer, list) else [answer]
        try:
            pieces = [_piece(a, server, self.get_version()) for a in answers]
        except (KeyError, TypeError, IndexError) as error:
            raise ServerError(
                f"{server.address} answered without the expected fields: {error!r}"
            ) from error
        if len(pieces) != num_samples:
            raise ServerError(
                f"{server.address} gave {len(pieces)} samples, {num_samples} were asked for"
            )
        return pieces

    async def pause_server(self, server: Server) -> None:
        await self._control(server, "pause_generation", {"mode": self.config.pause_mode})

    async def continue_server(self, server: Server) -> None:
        await self._control(server, "continue_generation", {})

    def can_swap(self, server: Server) -> bool:
        return server.is_arealite and self.config.pause_mode == "in_place"

    async def begin_load(self, servers: list[Server], meta: WeightUpdateMeta) -> None:
        if meta.type != "broadcast":
            return
        foreign = [s.address for s in servers if not s.is_arealite]
        if foreign:
            raise WeightUpdateError(
                f"{foreign[0]} is not an embedded server: set rollout.weight_update=disk for SGLang"
            )
        await self._sender.open(self.http, servers, meta)

    async def load_weights(self, server: Server, meta: WeightUpdateMeta) -> None:
        # in place, requests in flight keep their KV cache: there is nothing that could be flushed
        common = {
            "weight_version": str(meta.version),
            "flush_cache": self.config.pause_mode == "abort",
        }
        if meta.type == "disk":
            endpoint, body = "update_weights_from_disk", {"model_path": meta.path, **common}
        elif meta.type == "shm":
            endpoint, body = "update_weights_from_shm", {"path": meta.path, **common}
        else:
            endpoint, body = (
                "update_weights_from_distributed",
                {**self._sender.body(meta), **common},
            )
        try:
            answer = await self._control(server, endpoint, body, self.config.setup_timeout_s)
        except HttpError as error:
            if (
                meta.type == "broadcast"
            ):  # another member may have failed: this one is asked again on its own
                self._sender.give_up()
                raise
            raise WeightUpdateError(
                f"{server.address} refused version {meta.version}: {error.text}"
            ) from error
        if isinstance(answer, dict) and not answer.get("success", True):
            message = answer.get("message", answer)
            raise WeightUpdateError(f"{server.address} refused version {meta.version}: {message}")

    async def probe(self, server: Server) -> None:
        await self.http.get(f"{server.url}/health", timeout_s=5)
        try:
            info = await self.http.get(f"{server.url}/model_info", timeout_s=5)
        except HttpError as error:
            if error.status != 404:
                raise
            info = await self.http.get(f"{server.url}/get_model_info", timeout_s=5)  # older SGLang
        server.is_arealite = info.get("engine") == "arealite"
        server.version = _version(info.get("weight_version"), 0)

    async def fingerprints(self, server: Server) -> Fingerprints | None:
        if not server.is_arealite:
            return None
        answer = await self.http.get(f"{server.url}/weights_checker?tensors=1", _CONTROL_TIMEOUT_S)
        return {name: (dtype, digest) for name, (dtype, digest) in answer["tensors"].items()}

    async def _control(
        self,
        server: Server,
        endpoint: str,
        body: dict[str, Any],
        timeout_s: float = _CONTROL_TIMEOUT_S,
    ) -> Any:
        return await self.http.post(f"{server.url}/{endpoint}", body, timeout_s)


def sampling_params(progress: Progress, num_samples: int, max_new_tokens: int) -> dict[str, Any]:
    g = progress.request.gconfig
    num_done = len(progress.tokens)
    params: dict[str, Any] = {
        "n": num_samples,
        "max_new_tokens": max_new_tokens,
        "temperature": g.temperature,
        "top_p": g.top_p,
        "top_k": g.top_k if g.top_k > 0 else -1,
        "min_p": g.min_p,
        "ignore_eos": g.ignore_eos,
        "skip_special_tokens": False,
    }
    if g.min_new_tokens > num_done:
        params["min_new_tokens"] = g.min_new_tokens - num_done
    if g.stop_token_ids:
        params["stop_token_ids"] = g.stop_token_ids
    if g.stop:
        params["stop"] = g.stop
    for name, off in (
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0.0),
        ("repetition_penalty", 1.0),
    ):
        if getattr(g, name) != off:
            params[name] = getattr(g, name)
    if progress.seed is not None:
        params["sampling_seed"] = progress.seed
    return params


def _piece(answer: dict[str, Any], server: Server, current_version: int) -> Piece:
    meta = answer["meta_info"]
    entries = meta["output_token_logprobs"]
    reason = meta["finish_reason"]["type"]
    if reason == "abort" and meta["finish_reason"].get("status_code"):
        status = int(meta["finish_reason"]["status_code"])
        raise HttpError(f"{server.url}/generate", status, str(meta["finish_reason"].get("message")))
    if reason not in ("stop", "length", "abort"):
        raise ServerError(f"{server.address} ended a request for an unknown reason: {reason!r}")
    tokens = [entry[1] for entry in entries]
    logprobs = [entry[0] for entry in entries]
    spans = meta.get("weight_versions")
    if spans:
        versions: list[int] = []
        for span in spans:
            versions += [_version(span["version"], current_version)] * (span["end"] - span["start"])
        if len(versions) != len(tokens):
            raise ServerError(
                f"{server.address}: weight_versions {spans} do not cover {len(tokens)} tokens"
            )
    else:
        versions = [_version(meta.get("weight_version"), current_version)] * len(tokens)
    return Piece(tokens, logprobs, versions, reason)


def _version(text: Any, default: int) -> int:
    """SGLang calls the weights it started with `default`; every update by us is a number."""
    return int(text) if isinstance(text, int | str) and str(text).isdigit() else default
