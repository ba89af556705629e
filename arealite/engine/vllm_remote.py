"""`RemotevLLMEngine`: the client of vLLM's native endpoints for reinforcement learning. No patched server is needed.

Tokens in, tokens out over /inference/v1/generate, or /v1/completions where that is missing; pause, weights and versions over the endpoints of
VLLM_SERVER_DEV_MODE=1. Only the wire format is here; choice of server, interruption, retries and collecting are inherited. What a server can do is
found out when connecting; a version that cannot be used is named.
"""

from __future__ import annotations

from typing import Any

from arealite.api.errors import ConfigError, ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.remote.base import Piece, Progress, RemoteEngine, read_version
from arealite.engine.remote.broadcast import JOIN_TIMEOUT_S
from arealite.engine.remote.router import Server
from arealite.utils.http import HttpError
from arealite.weights.fingerprint import Fingerprints

_PAUSE_MODES = {"abort": "abort", "in_place": "keep"}
_EXTENSION = "arealite.engine.remote.vllm_extension.WeightLoading"
_NEEDED = ("/pause", "/resume", "/collective_rpc")
_TOKENS = "/inference/v1/generate"
# An older vLLM, or one without --enable-scale-out: OpenAI's endpoint with token ids on both sides.
_BY_COMPLETIONS = "vllm by completions"
_SEED_STEP = 0x1E3779B97F4A7C15  # samples of a group have neighbouring seeds


class RemotevLLMEngine(RemoteEngine):
    """Generates with vLLM servers."""

    async def send(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        held = server.version
        max_tokens = progress.next_segment(self.config.segment_tokens)
        params = _sampling_params(progress, num_samples, max_tokens)
        prompt = progress.request.input_ids + progress.tokens
        # Updated in place, vLLM keeps its prefix cache: keys and values of old weights must not meet new requests.
        body = {"request_id": progress.next_rid(), "cache_salt": f"v{held}"}
        if server.adapter:
            body["model"] = server.adapter
        if server.kind == _BY_COMPLETIONS:
            endpoint, read = "/v1/completions", _completion
            body |= {"prompt": prompt, "return_token_ids": True, **params}
        else:
            endpoint, read = _TOKENS, _piece
            body |= {"token_ids": prompt, "sampling_params": params}
        url = f"{server.url}{endpoint}"
        answer = await self.http.post(url, body, self.config.request_timeout_s)
        # Aborted before its first token, a sample has no entry.
        pieces = [Piece([], [], [], "abort") for _ in range(num_samples)]
        with server.answering():
            for choice in answer["choices"]:
                pieces[choice["index"]] = read(choice, server, held)
        return pieces

    async def pause_server(self, server: Server, mode: str) -> None:
        mode = "abort" if server.kind == _BY_COMPLETIONS else mode
        await self.control(server, f"pause?mode={_PAUSE_MODES[mode]}")

    async def continue_server(self, server: Server) -> None:
        await self.control(server, "resume")

    async def release_memory(self, server: Server) -> None:
        await self.control(server, "sleep?level=1", is_json=False)

    async def resume_memory(self, server: Server) -> None:
        await self.control(server, "wake_up", is_json=False)

    # ------------------------------------------------------------------------------------ weight updates

    async def join_group(self, server: Server, settings: dict[str, Any]) -> None:
        if "/init_weight_transfer_engine" not in server.endpoints:
            raise WeightUpdateError(
                f"{server.address} is a vLLM without /init_weight_transfer_engine: set rollout.weight_update=disk or shm"
            )
        body = {"init_info": settings}
        await self.control(server, "init_weight_transfer_engine", body, JOIN_TIMEOUT_S)

    async def load_weights(self, server: Server, meta: WeightUpdateMeta) -> None:
        limit = self.config.setup_timeout_s
        try:
            server.adapter = server.adapter if meta.is_adapter else ""
            if meta.is_adapter:
                await self._load_adapter(server, meta)
            elif meta.type == "broadcast":
                await self._receive(server, meta)
            else:
                call = {"method": "arealite_load", "args": [meta.type, meta.path]}
                await self.control(server, "collective_rpc", call, limit)
            if "/update_weight_version" in server.endpoints:
                version = {"new_version": str(meta.version)}
                await self.control(server, "update_weight_version", version)
        except HttpError as error:
            raise self.not_loaded(server, meta, error) from None

    async def _receive(self, server: Server, meta: WeightUpdateMeta) -> None:
        limit = self.config.setup_timeout_s
        await self.control(server, "start_weight_update", timeout_s=limit)
        for portion in self.sender.portions(meta):
            names, dtypes, shapes = map(list, zip(*portion, strict=True))
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            await self.control(server, "update_weights", {"update_info": info}, limit)
        await self.control(server, "finish_weight_update", timeout_s=limit)

    async def _load_adapter(self, server: Server, meta: WeightUpdateMeta) -> None:
        """The adapter under a name of its own; the one before it goes, as its requests have been interrupted."""
        name, before = f"v{meta.version}", server.adapter
        body = {"lora_name": name, "lora_path": meta.path, "load_inplace": True}
        await self.control(server, "v1/load_lora_adapter", body, is_json=False)
        server.adapter = name
        if before not in ("", name):
            body = {"lora_name": before}
            await self.control(server, "v1/unload_lora_adapter", body, is_json=False)

    # -------------------------------------------------------------------------------------- what it is

    async def probe(self, server: Server) -> None:
        await self.http.get(f"{server.url}/health", timeout_s=5)
        server.endpoints = frozenset((await self.http.get(f"{server.url}/openapi.json", timeout_s=10))["paths"])
        missing = [e for e in _NEEDED if e not in server.endpoints]
        if missing:
            version = (await self.http.get(f"{server.url}/version", timeout_s=5))["version"]
            raise ConfigError(
                f"{server.address} is vLLM {version} without {', '.join(missing)}: 0.24 or later is needed, started with "
                "VLLM_SERVER_DEV_MODE=1 (the launcher does so)"
            )
        try:
            answer = await self.control(server, "collective_rpc", {"method": "arealite_device"})
        except HttpError as error:
            raise ServerError(
                f"{server.address} could not load new weights, start it with --worker-extension-cls {_EXTENSION} "
                f"(the launcher does so): {error.text}"
            ) from error
        server.device = answer["results"][0]
        server.kind = "vllm" if _TOKENS in server.endpoints else _BY_COMPLETIONS
        server.version = 0  # a version that cannot tell is given the current weights again
        if "/weight_info" in server.endpoints:
            info = await self.http.get(f"{server.url}/weight_info", timeout_s=5)
            server.version = read_version(info.get("weight_version"), 0)
        if "/get_world_size" in server.endpoints:
            answer = await self.http.get(f"{server.url}/get_world_size", timeout_s=5)
            server.num_ranks = int(answer["world_size"])
        if server.version == 0:
            server.adapter = ""

    async def fingerprints(self, server: Server) -> Fingerprints | None:
        answer = await self.control(server, "collective_rpc", {"method": "arealite_fingerprints"})
        held = answer["results"][0]
        return None if held is None else {name: (d, h) for name, (d, h) in held.items()}


def _sampling_params(progress: Progress, num_samples: int, max_tokens: int) -> dict[str, Any]:
    g = progress.request.gconfig
    params: dict[str, Any] = {
        "n": num_samples,
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, max(0, g.min_new_tokens - len(progress.tokens))),
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
        # each request draws a seed's noise from its beginning: what goes on with an answer needs other noise
        params["seed"] = (progress.seed + len(progress.tokens) * _SEED_STEP) % 2**63
    return params


def _piece(choice: dict[str, Any], server: Server, held: int) -> Piece:
    reason = choice["finish_reason"]
    if reason not in ("stop", "length", "abort"):
        raise ServerError(f"{server.address} ended a request for an unknown reason: {reason!r}")
    tokens = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(tokens):
        raise ServerError(f"{server.address} gave {len(content)} log-probs for {len(tokens)} tokens")
    versions = [held] * len(tokens)
    for span in choice.get("weight_versions") or []:
        start, end = span["start"], span["end"]
        versions[start:end] = [read_version(span["version"], held)] * (end - start)
    if len(versions) != len(tokens):
        spans = choice["weight_versions"]
        raise ServerError(f"{server.address}: weight_versions {spans} do not fit {len(tokens)} tokens")
    return Piece(tokens, [entry["logprob"] for entry in content], versions, reason)


def _completion(choice: dict[str, Any], server: Server, held: int) -> Piece:
    """As `_piece`, of OpenAI's answer; it tells no versions, and every update interrupts it."""
    content = [{"logprob": p} for p in (choice.get("logprobs") or {}).get("token_logprobs") or []]
    return _piece({**choice, "logprobs": {"content": content}}, server, held)
