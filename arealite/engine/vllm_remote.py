"""`RemotevLLMEngine`: generation with vLLM servers, over vLLM's endpoints for RL.

Tokens in and out over /inference/v1/generate, or /v1/completions where that is missing; pause, weights and versions
over the endpoints of VLLM_SERVER_DEV_MODE=1. Only the wire format is here (`VLLMClient`). Choice of server, retries,
interruption and collection are in `RemoteEngine`. The client probes what a server can do; a version that cannot be
used is named.
"""

from collections.abc import Sequence
from typing import Any

from arealite.api.errors import ConfigError, HttpError, RequestError, ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.engine.remote.base import RemoteEngine
from arealite.engine.remote.client import PROBE_TIMEOUT_S, ServerClient, read_version
from arealite.engine.remote.progress import Piece, Progress
from arealite.engine.remote.server import Server, ServerInfo
from arealite.utils.images.encoded import to_data_url
from arealite.weights.fingerprint import Fingerprints
from arealite.weights.layout import TensorLayout
from arealite.weights.process_group import JOIN_TIMEOUT_S

_PAUSE_MODES = {"abort": "abort", "in_place": "keep"}
_EXTENSION = "arealite.engine.remote.vllm_extension.WeightLoading"
_NEEDED = ("/pause", "/resume", "/collective_rpc")
_TOKENS = "/inference/v1/generate"
# An older vLLM, or one without --enable-scale-out: OpenAI's endpoint with token ids on both sides.
_BY_COMPLETIONS = "vllm by completions"
# Samples of a group have neighbouring seeds: continuations use seeds far away.
_SEED_STEP = 0x1E3779B97F4A7C15


class VLLMClient(ServerClient):
    """Speaks vLLM's native endpoints. Needs no patched server, only AReaLite's extension in its workers."""

    async def generate(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        held = server.version
        params = _sampling_params(progress, num_samples, progress.next_segment(self.config.segment_tokens))
        prompt = progress.request.input_ids + progress.tokens
        # After an update in place, vLLM keeps its prefix cache: new requests must not use keys and values of old
        # weights.
        body: dict[str, Any] = {"request_id": progress.next_rid(), "cache_salt": server.cache_key}
        if server.adapter:
            body["model"] = server.adapter
        images = progress.request.images
        if images:
            if server.info.kind == _BY_COMPLETIONS:
                raise RequestError(
                    f"{server.address} is a vLLM without {_TOKENS}, which requests with images need: use a newer one, "
                    "started with --enable-scale-out"
                )
            # vLLM expands placeholders itself.
            prompt = progress.collapsed_ids()
            body["content_parts"] = [{"type": "image_url", "url": to_data_url(image)} for image in images]
            body["return_token_ids"] = True
        if server.info.kind == _BY_COMPLETIONS:
            endpoint, read = "/v1/completions", _completion
            body |= {"prompt": prompt, "return_token_ids": True, **params}
        else:
            endpoint, read = _TOKENS, _piece
            body |= {"token_ids": prompt, "sampling_params": params}
        answer = await self.http.generate(f"{server.url}{endpoint}", body, self.config.request_timeout_s)
        if images:
            progress.check_prompt(server.address, [len(answer.get("prompt_token_ids") or [])])
        # A sample that was aborted before its first token has no entry.
        pieces = [Piece([], [], [], "abort") for _ in range(num_samples)]
        with server.parse_answer():
            for choice in answer["choices"]:
                pieces[choice["index"]] = read(choice, server, held)
        return pieces

    async def pause(self, server: Server, mode: str) -> None:
        mode = "abort" if server.info.kind == _BY_COMPLETIONS else mode
        await self.control(server, f"pause?mode={_PAUSE_MODES[mode]}")

    async def resume(self, server: Server) -> None:
        await self.control(server, "resume")

    async def release_memory(self, server: Server) -> None:
        await self.control(server, "sleep?level=1", is_json=False)

    async def resume_memory(self, server: Server) -> None:
        await self.control(server, "wake_up", is_json=False)

    async def reclaim_memory(self, server: Server) -> None:
        if "/is_sleeping" in server.info.endpoints:
            with server.parse_answer():
                url = f"{server.url}/is_sleeping"
                if (await self.http.get(url, timeout_s=PROBE_TIMEOUT_S))["is_sleeping"]:
                    await self.resume_memory(server)

    async def load_folder(self, server: Server, meta: WeightUpdateMeta) -> None:
        await self._call_extension(server, "arealite_load_folder", meta)

    async def load_segment(self, server: Server, meta: WeightUpdateMeta) -> None:
        await self._call_extension(server, "arealite_load_segment", meta)

    async def _call_extension(self, server: Server, method: str, meta: WeightUpdateMeta) -> None:
        server.adapter = ""
        call = {"method": method, "args": [meta.path]}
        await self.control(server, "collective_rpc", call, self.config.setup_timeout_s)
        await self._set_version(server, meta)

    async def join_group(self, server: Server, settings: dict[str, Any]) -> None:
        if "/init_weight_transfer_engine" not in server.info.endpoints:
            raise WeightUpdateError(
                f"{server.address} is a vLLM without /init_weight_transfer_engine: set rollout.weight_update=disk or "
                "shm"
            )
        await self.control(server, "init_weight_transfer_engine", {"init_info": settings}, JOIN_TIMEOUT_S)

    async def receive(
        self, server: Server, meta: WeightUpdateMeta, group: str, portions: Sequence[TensorLayout]
    ) -> None:
        server.adapter = ""
        limit_s = self.config.setup_timeout_s
        await self.control(server, "start_weight_update", timeout_s=limit_s)
        for portion in portions:
            names, dtypes, shapes = portion.to_lists()
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            await self.control(server, "update_weights", {"update_info": info}, limit_s)
        await self.control(server, "finish_weight_update", timeout_s=limit_s)
        await self._set_version(server, meta)

    async def load_adapter(self, server: Server, meta: WeightUpdateMeta) -> None:
        """Load the adapter under a new name, then unload the last one: no request uses it any more."""
        name, last = f"v{meta.version}", server.adapter
        body = {"lora_name": name, "lora_path": meta.path, "load_inplace": True}
        await self.control(server, "v1/load_lora_adapter", body, is_json=False)
        server.adapter = name
        if last not in ("", name):
            with self.tolerate_refused_unload(server, last):
                await self.control(server, "v1/unload_lora_adapter", {"lora_name": last}, is_json=False)
        await self._set_version(server, meta)

    async def _set_version(self, server: Server, meta: WeightUpdateMeta) -> None:
        if "/update_weight_version" in server.info.endpoints:
            await self.control(server, "update_weight_version", {"new_version": str(meta.version)})

    async def probe(self, server: Server) -> ServerInfo:
        await self.check_health(server, PROBE_TIMEOUT_S)
        schema = await self.http.get(f"{server.url}/openapi.json", timeout_s=2 * PROBE_TIMEOUT_S)
        endpoints = frozenset(schema["paths"])
        missing = [e for e in _NEEDED if e not in endpoints]
        if missing:
            version = (await self.http.get(f"{server.url}/version", timeout_s=PROBE_TIMEOUT_S))["version"]
            raise ConfigError(
                f"{server.address} is vLLM {version} without {', '.join(missing)}: 0.24 or later is needed, started "
                "with VLLM_SERVER_DEV_MODE=1 (the launcher does so)"
            )
        try:
            answer = await self.control(server, "collective_rpc", {"method": "arealite_device"})
        except HttpError as error:
            raise ServerError(
                f"{server.address} could not load new weights, start it with --worker-extension-cls {_EXTENSION} "
                f"(the launcher does so): {error.text}"
            ) from error
        # A server that does not report its version gets the current weights again.
        held, num_ranks = 0, 1
        if "/weight_info" in endpoints:
            info = await self.http.get(f"{server.url}/weight_info", timeout_s=PROBE_TIMEOUT_S)
            held = read_version(info.get("weight_version"), 0)
        if "/get_world_size" in endpoints:
            size = await self.http.get(f"{server.url}/get_world_size", timeout_s=PROBE_TIMEOUT_S)
            num_ranks = int(size["world_size"])
        kind = "vllm" if _TOKENS in endpoints else _BY_COMPLETIONS
        return ServerInfo(kind, held, endpoints, num_ranks, device=answer["results"][0])

    async def fingerprints(self, server: Server) -> Fingerprints | None:
        answer = await self.control(server, "collective_rpc", {"method": "arealite_fingerprints"})
        held = answer["results"][0]
        return None if held is None else {name: (d, h) for name, (d, h) in held.items()}


class RemotevLLMEngine(RemoteEngine):
    """Generates with vLLM servers."""

    client_class = VLLMClient


def _sampling_params(progress: Progress, num_samples: int, max_tokens: int) -> dict[str, Any]:
    params = progress.sampling_params(num_samples)
    params["max_tokens"] = max_tokens
    params["min_tokens"] = progress.min_new_tokens(max_tokens)
    params["top_k"] = progress.request.gconfig.top_k
    # 0: the log-prob of the sampled token, and no alternatives.
    params["logprobs"] = 0
    if progress.seed is not None:
        # A request draws the noise of its seed from the beginning: a continuation needs another seed.
        params["seed"] = (progress.seed + len(progress.tokens) * _SEED_STEP) % 2**63
    return params


def _piece(choice: dict[str, Any], server: Server, held: int) -> Piece:
    reason = choice["finish_reason"]
    if reason not in ("stop", "length", "abort"):
        raise ServerError(f"{server.address} ended a request for an unknown reason: {reason!r}")
    tokens = choice.get("token_ids") or []
    content = (choice.get("logprobs") or {}).get("content") or []
    if len(content) != len(tokens):
        raise ServerError(f"{server.address} returned {len(content)} log-probs for {len(tokens)} tokens")
    versions = [held] * len(tokens)
    for span in choice.get("weight_versions") or []:
        start, end = span["start"], span["end"]
        versions[start:end] = [read_version(span["version"], held)] * (end - start)
    if len(versions) != len(tokens):
        spans = choice["weight_versions"]
        raise ServerError(f"{server.address}: weight_versions {spans} do not fit {len(tokens)} tokens")
    return Piece(tokens, [entry["logprob"] for entry in content], versions, reason)


def _completion(choice: dict[str, Any], server: Server, held: int) -> Piece:
    """As `_piece`, for the OpenAI endpoint. It reports no versions, and every update interrupts it."""
    content = [{"logprob": p} for p in (choice.get("logprobs") or {}).get("token_logprobs") or []]
    return _piece({**choice, "logprobs": {"content": content}}, server, held)
