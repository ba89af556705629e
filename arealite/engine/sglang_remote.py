"""`RemoteSGLangEngine`: the client of SGLang's native endpoints, which the embedded server speaks too.

Only the wire format is here; choice of server, interruption, retries and collecting are inherited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, ServerError, WeightUpdateError
from arealite.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.engine.remote.base import CONTROL_TIMEOUT_S, Piece, Progress, RemoteEngine, read_version
from arealite.engine.remote.broadcast import JOIN_TIMEOUT_S
from arealite.engine.remote.published import read_published
from arealite.engine.remote.router import Server
from arealite.engine.remote.shared_tensors import share
from arealite.utils.http import HttpError
from arealite.weights.fingerprint import SHA256, Fingerprints
from arealite.weights.process_group import buckets, specs_of

_NEEDED = ("/generate", "/pause_generation", "/continue_generation", "/update_weights_from_disk")


class RemoteSGLangEngine(RemoteEngine):
    """Generates with SGLang or embedded servers."""

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        # SGLang gives all n samples of a request the same seed; the embedded server seed + i
        if request.seed is not None and not all(s.is_arealite for s in self.router.servers.values()):
            return await InferenceEngine.agenerate_group(self, request)
        return await super().agenerate_group(request)

    async def send(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        held = server.version
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
            body["extra_key"] = f"v{held}"
        if server.adapter:
            body["lora_path"] = server.adapter
        answer = await self.http.post(f"{server.url}/generate", body, self.config.request_timeout_s)
        answers = answer if isinstance(answer, list) else [answer]
        with server.answering():
            pieces = [_piece(a, server, held, self.config.pause_mode) for a in answers]
        if len(pieces) != num_samples:
            raise ServerError(f"{server.address} gave {len(pieces)} samples, {num_samples} were asked for")
        return pieces

    async def pause_server(self, server: Server, mode: str) -> None:
        await self.control(server, "pause_generation", {"mode": mode})

    async def continue_server(self, server: Server) -> None:
        await self.control(server, "continue_generation")

    async def release_memory(self, server: Server) -> None:
        # only the cache: weights would come back as whatever the memory holds then
        await self.control(server, "release_memory_occupation", {"tags": ["kv_cache"]})

    async def resume_memory(self, server: Server) -> None:
        await self.control(server, "resume_memory_occupation", {"tags": ["kv_cache"]})

    # ------------------------------------------------------------------------------------ weight updates

    def can_swap(self, server: Server) -> bool:
        return server.is_arealite

    async def join_group(self, server: Server, settings: dict[str, Any]) -> None:
        if server.group and "/destroy_weights_update_group" in server.endpoints:
            with suppress(HttpError):  # it may have been started anew since
                await self.control(server, "destroy_weights_update_group", {"group_name": server.group})
        await self.control(server, "init_weights_update_group", settings, JOIN_TIMEOUT_S)
        server.group = settings["group_name"]

    async def load_weights(self, server: Server, meta: WeightUpdateMeta) -> None:
        # in place, requests in flight keep their KV cache
        flush = {"flush_cache": self.config.pause_mode == "abort"}
        common = {**flush, "weight_version": str(meta.version)}
        try:
            if meta.is_adapter:
                await self._load_adapter(server, meta)
                return
            server.adapter = ""
            if meta.type == "disk":
                body = {"model_path": meta.path, **common}
                await self._load(server, "update_weights_from_disk", body)
            elif meta.type == "broadcast":
                await self._receive(server, meta, flush)
            elif server.is_arealite:
                await self._load(server, "update_weights_from_shm", {"path": meta.path, **common})
            else:
                await self._share_with(server, meta, flush)
        except HttpError as error:
            raise self.not_loaded(server, meta, error) from None

    async def _load(self, server: Server, endpoint: str, body: dict[str, Any]) -> None:
        answer = await self.control(server, endpoint, body, self.config.setup_timeout_s)
        if isinstance(answer, dict) and not answer.get("success", True):
            message = answer.get("message") or answer.get("error_message") or answer
            raise WeightUpdateError(f"{server.address} refused new weights: {message}")

    async def _receive(self, server: Server, meta: WeightUpdateMeta, flush: dict[str, Any]) -> None:
        """Portion after portion; the embedded engine takes all at once, because it swaps them at once."""
        portions = list(self.sender.portions(meta))
        if server.is_arealite:
            portions = [[spec for portion in portions for spec in portion]]
        async with self._session(server):
            for index, portion in enumerate(portions, 1):
                names, dtypes, shapes = map(list, zip(*portion, strict=True))
                body = {"names": names, "dtypes": dtypes, "shapes": shapes, **flush}
                body |= {"group_name": self.sender.name}
                if index == len(portions):  # half of the weights are no version
                    body["weight_version"] = str(meta.version)
                await self._load(server, "update_weights_from_distributed", body)

    async def _share_with(self, server: Server, meta: WeightUpdateMeta, flush: dict[str, Any]) -> None:
        """From shared memory, where SGLang has no endpoint for a file of ours: tensors it maps by name."""
        loop, tensors = asyncio.get_running_loop(), read_published(meta)
        async with self._session(server):
            for portion in buckets(specs_of(tensors)):
                described, copies = await loop.run_in_executor(None, share, tensors, portion, server.num_ranks)
                body = {"serialized_named_tensors": described, **flush}
                await self._load(server, "update_weights_from_tensor", body)
                del copies
        version = {"new_version": str(meta.version), "abort_all_requests": False}
        await self._load(server, "update_weight_version", version)

    @asynccontextmanager
    async def _session(self, server: Server) -> AsyncIterator[None]:
        """Newer SGLang takes tensors only between begin and end; an end that a crash left out is made up for."""
        if "/begin_weight_update" not in server.endpoints:
            yield
            return
        try:
            await self._load(server, "begin_weight_update", {})
        except HttpError as error:
            if error.status != 400:
                raise
            await self._load(server, "end_weight_update", {})
            await self._load(server, "begin_weight_update", {})
        yield
        await self._load(server, "end_weight_update", {})

    async def _load_adapter(self, server: Server, meta: WeightUpdateMeta) -> None:
        """The adapter under a name of its own; the one before it goes, as its requests have been interrupted."""
        name, before = f"v{meta.version}", server.adapter
        body: dict[str, Any] = {"lora_name": name, "lora_path": meta.path}
        if server.is_arealite:  # it merges the adapter, so requests need not name it
            body["flush_cache"] = self.config.pause_mode == "abort"
            await self._load(server, "load_lora_adapter", body)
            return
        try:
            await self._load(server, "load_lora_adapter", body)
        except HttpError:  # a trainer that starts again sends a version the server has
            await self._load(server, "unload_lora_adapter", {"lora_name": name})
            await self._load(server, "load_lora_adapter", body)
        version = {"new_version": str(meta.version), "abort_all_requests": False}
        await self._load(server, "update_weight_version", version)
        server.adapter = name
        if before not in ("", name):
            await self._load(server, "unload_lora_adapter", {"lora_name": before})

    # -------------------------------------------------------------------------------------- what it is

    async def probe(self, server: Server) -> None:
        await self.http.get(f"{server.url}/health", timeout_s=5)
        info = await self._first(server, "model_info", "get_model_info")
        server.version = read_version(info.get("weight_version"), 0)
        if info.get("engine") == "arealite":
            server.kind, server.context = "arealite", int(info["context_length"])
            return
        setup = await self._first(server, "server_info", "get_server_info")
        schema = await self.http.get(f"{server.url}/openapi.json", timeout_s=10)
        server.kind, server.endpoints = "sglang", frozenset(schema["paths"])
        missing = [e for e in _NEEDED if e not in server.endpoints]
        if missing:
            raise ConfigError(
                f"{server.address} is SGLang {setup.get('version')}, which lacks {', '.join(missing)}: 0.5.4 or later is needed"
            )
        server.num_ranks = int(setup.get("tp_size", 1))
        server.device = str(setup.get("device", "cuda"))
        server.dtype = str(setup.get("dtype", "auto"))
        if int(setup.get("pp_size", 1)) > 1 and self.config.weight_update not in ("auto", "disk"):
            raise ConfigError(
                f"{server.address} runs in {setup['pp_size']} pipeline stages, which SGLang loads from disk only: "
                "set rollout.weight_update=disk"
            )
        if server.version == 0:
            server.adapter = ""

    async def _first(self, server: Server, *names: str) -> dict[str, Any]:
        """The answer of the first of these endpoints that exists: older versions have other names."""
        for name in names[:-1]:
            try:
                return await self.http.get(f"{server.url}/{name}", timeout_s=5)
            except HttpError as error:
                if error.status != 404:
                    raise
        return await self.http.get(f"{server.url}/{names[-1]}", timeout_s=5)

    async def fingerprints(self, server: Server) -> Fingerprints | None:
        if server.is_arealite:
            url = f"{server.url}/weights_checker?tensors=1"
            answer = await self.http.get(url, CONTROL_TIMEOUT_S)
            return {name: (dtype, digest) for name, (dtype, digest) in answer["tensors"].items()}
        # On CUDA SGLang hashes by a kernel of its own; shards of tensors cannot be compared either.
        if "/weights_checker" not in server.endpoints or server.device != "cpu":
            return None
        if server.num_ranks > 1 or server.dtype == "auto":
            return None
        answer = await self.http.get(f"{server.url}/weights_checker", CONTROL_TIMEOUT_S)
        held = answer["ranks"][0]["checksums"]
        return {
            name: (server.dtype, SHA256 + digest)
            for name, digest in held.items()
            if "embed_tokens" not in name and "lm_head" not in name  # their rows may be padded
        }


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
        params["min_new_tokens"] = min(g.min_new_tokens - num_done, max_new_tokens)
    if g.stop_token_ids:
        params["stop_token_ids"] = g.stop_token_ids
    if g.stop:
        params["stop"] = g.stop
    for name, off in (("frequency_penalty", 0.0), ("presence_penalty", 0.0), ("repetition_penalty", 1.0)):
        if getattr(g, name) != off:
            params[name] = getattr(g, name)
    if progress.seed is not None:
        params["sampling_seed"] = progress.seed
    return params


def _piece(answer: dict[str, Any], server: Server, held: int, pause_mode: str) -> Piece:
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
            versions += [read_version(span["version"], held)] * (span["end"] - span["start"])
        if len(versions) != len(tokens):
            raise ServerError(f"{server.address}: weight_versions {spans} do not cover {len(tokens)} tokens")
    else:
        version = read_version(meta.get("weight_version"), held)
        if pause_mode == "in_place":  # it is that of the last token; the first may be older
            version = min(version, held)
        versions = [version] * len(tokens)
    return Piece(tokens, logprobs, versions, reason)
