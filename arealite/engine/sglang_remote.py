"""`RemoteSGLangEngine`: generation with SGLang or embedded servers, which speak one protocol.

Only the wire format is here (`SGLangClient`). Choice of server, retries, interruption and collection are in
`RemoteEngine`.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import chain
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, HttpError, ServerError, WeightUpdateError
from arealite.api.io_struct import ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.engine.remote.base import RemoteEngine
from arealite.engine.remote.client import CONTROL_TIMEOUT_S, PROBE_TIMEOUT_S, ServerClient, read_version
from arealite.engine.remote.progress import Piece, Progress
from arealite.engine.remote.server import Server, ServerInfo
from arealite.utils.images.encoded import to_data_url
from arealite.utils.json_client import UnreachableError
from arealite.weights.fingerprint import SHA256, Fingerprints
from arealite.weights.layout import TensorLayout
from arealite.weights.process_group import JOIN_TIMEOUT_S, PORTION_BYTES
from arealite.weights.sync import make_transport

_NEEDED = ("/generate", "/pause_generation", "/continue_generation", "/update_weights_from_disk")


class SGLangClient(ServerClient):
    """Speaks SGLang's native endpoints."""

    async def generate(self, server: Server, progress: Progress, num_samples: int) -> list[Piece]:
        held = server.version
        max_new_tokens = progress.next_segment(self.config.segment_tokens)
        body = {
            "input_ids": progress.request.input_ids + progress.tokens,
            "sampling_params": sampling_params(progress, num_samples, max_new_tokens),
            "return_logprob": True,
            "rid": progress.next_rid(),
        }
        if self.config.routing_replay:
            body["return_routed_experts"] = True
        images = progress.request.images
        if images:
            urls = [to_data_url(image) for image in images]
            # With several samples, SGLang takes a list of images for each request.
            body["image_data"] = [urls] if num_samples > 1 and not server.is_arealite else urls
        if images and not server.is_arealite:
            # SGLang expands placeholders itself.
            body["input_ids"] = progress.collapsed_ids()
        if not server.is_arealite:
            # After an update in place, SGLang keeps its prefix cache: new requests must not use keys and values of old
            # weights.
            body["extra_key"] = server.cache_key
        if server.adapter:
            body["lora_path"] = server.adapter
        if progress.request.on_tokens is not None:
            answers = await self._stream(server, progress, body)
        else:
            if server.is_arealite:
                body["flat_logprobs"] = True
            answer = await self.http.generate(f"{server.url}/generate", body, self.config.request_timeout_s)
            answers = answer if isinstance(answer, list) else [answer]
        with server.parse_answer():
            pieces = [_piece(a, server, held, self.config.pause_mode) for a in answers]
        if images:
            progress.check_prompt(server.address, [a["meta_info"]["prompt_tokens"] for a in answers])
        if len(pieces) != num_samples:
            raise ServerError(f"{server.address} returned {len(pieces)} samples instead of {num_samples}")
        return pieces

    async def _stream(self, server: Server, progress: Progress, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the last chunk of each sample. Each chunk has all tokens so far; new ones are reported."""
        last: dict[int, dict[str, Any]] = {}
        url, limit_s = f"{server.url}/generate", self.config.request_timeout_s
        async with aclosing(self.http.events(url, {**body, "stream": True}, limit_s)) as chunks:
            async for chunk in chunks:
                if "error" in chunk:
                    raise ServerError(f"{server.address} ended a stream: {chunk['error']}")
                with server.parse_answer():
                    index, entries = chunk.get("index", 0), chunk["meta_info"]["output_token_logprobs"]
                    known = len(last[index]["meta_info"]["output_token_logprobs"]) if index in last else 0
                    last[index] = chunk
                    progress.report(index, known, [e[1] for e in entries[known:]], [e[0] for e in entries[known:]])
        return [last[index] for index in sorted(last)]

    async def pause(self, server: Server, mode: str) -> None:
        server.is_paused = True
        await self.control(server, "pause_generation", {"mode": mode})

    async def resume(self, server: Server) -> None:
        await self.control(server, "continue_generation")
        server.is_paused = False

    async def release_memory(self, server: Server) -> None:
        # SGLang's scheduler ends with an error if it has to free what is free, or to allocate what is allocated.
        if server.is_arealite or not server.is_released:
            # Only the cache: SGLang would bring released weights back as whatever the memory holds then.
            await self.control(server, "release_memory_occupation", {"tags": ["kv_cache"]})
        server.is_released = True

    async def resume_memory(self, server: Server) -> None:
        await self.control(server, "resume_memory_occupation", {"tags": ["kv_cache"]})
        server.is_released = False

    async def reclaim_memory(self, server: Server) -> None:
        # SGLang does not say whether its memory is released.
        if server.is_arealite or server.is_released:
            await self.resume_memory(server)

    def can_swap(self, server: Server) -> bool:
        return server.is_arealite

    async def load_folder(self, server: Server, meta: WeightUpdateMeta) -> None:
        server.adapter = ""
        body = {"model_path": meta.path, **_version_fields(server, meta)}
        await self._load(server, "update_weights_from_disk", body | self._flush())

    async def load_segment(self, server: Server, meta: WeightUpdateMeta) -> None:
        server.adapter = ""
        if server.is_arealite:
            body = {"path": meta.path, **_version_fields(server, meta)}
            await self._load(server, "update_weights_from_shm", body | self._flush())
            return
        # SGLang has no endpoint for a file: it maps tensors by name.
        loop, tensors = asyncio.get_running_loop(), make_transport(meta).open(meta)
        async with self._update_session(server):
            for portion in TensorLayout.of(tensors).portions(PORTION_BYTES):
                named = {name: tensors[name] for name in portion.specs}
                pickles, copies = await loop.run_in_executor(None, _share, named, server.num_ranks)
                await self._load(
                    server, "update_weights_from_tensor", {"serialized_named_tensors": pickles} | self._flush()
                )
                del copies
        await self._set_version(server, meta)

    async def join_group(self, server: Server, settings: dict[str, Any]) -> None:
        if server.group and "/destroy_weights_update_group" in server.info.endpoints:
            # It may have been restarted since.
            with suppress(HttpError):
                await self.control(server, "destroy_weights_update_group", {"group_name": server.group})
        await self.control(server, "init_weights_update_group", settings, JOIN_TIMEOUT_S)
        server.group = settings["group_name"]

    async def receive(
        self, server: Server, meta: WeightUpdateMeta, group: str, portions: Sequence[TensorLayout]
    ) -> None:
        server.adapter = ""
        if server.is_arealite:
            # The embedded engine receives all portions at once, because it swaps them at once.
            portions = [TensorLayout.join(portions)]
        async with self._update_session(server):
            for index, portion in enumerate(portions, 1):
                names, dtypes, shapes = portion.to_lists()
                body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group, **self._flush()}
                # The version belongs to the complete weights.
                if index == len(portions):
                    body |= _version_fields(server, meta)
                await self._load(server, "update_weights_from_distributed", body)

    async def load_stream(self, server: Server, meta: WeightUpdateMeta, order: dict[str, Any]) -> None:
        if not server.is_arealite:
            await super().load_stream(server, meta, order)
        server.adapter = ""
        body = {"order": order, **_version_fields(server, meta)}
        await self._load(server, "update_weights_from_stream", body | self._flush())

    async def load_adapter(self, server: Server, meta: WeightUpdateMeta) -> None:
        """Load the adapter under a new name, then unload the last one: no request uses it any more."""
        name, last = f"v{meta.version}", server.adapter
        body: dict[str, Any] = {"lora_name": name, "lora_path": meta.path}
        if server.is_arealite:
            # It merges the adapter, so requests need not name it.
            await self._load(server, "load_lora_adapter", body | _version_fields(server, meta) | self._flush())
            return
        try:
            await self._load(server, "load_lora_adapter", body)
        except HttpError:
            # A trainer that was restarted sends a version that the server has.
            await self._load(server, "unload_lora_adapter", {"lora_name": name})
            await self._load(server, "load_lora_adapter", body)
        await self._set_version(server, meta)
        server.adapter = name
        if last not in ("", name):
            with self.tolerate_refused_unload(server, last):
                await self._load(server, "unload_lora_adapter", {"lora_name": last})

    async def _load(self, server: Server, endpoint: str, body: dict[str, Any]) -> None:
        answer = await self.control(server, endpoint, body, self.config.setup_timeout_s)
        if isinstance(answer, dict) and not answer.get("success", True):
            message = answer.get("message") or answer.get("error_message") or answer
            raise WeightUpdateError(f"{server.address} refused new weights: {message}")

    def _flush(self) -> dict[str, bool]:
        """Return whether an update empties the KV cache; in place, requests in flight keep theirs."""
        return {"flush_cache": self.config.pause_mode == "abort"}

    async def _set_version(self, server: Server, meta: WeightUpdateMeta) -> None:
        body = {"new_version": str(meta.version), "abort_all_requests": False}
        await self._load(server, "update_weight_version", body)

    @asynccontextmanager
    async def _update_session(self, server: Server) -> AsyncIterator[None]:
        """Around tensors: newer SGLang takes them between begin and end. Ends a session left open."""
        if "/begin_weight_update" not in server.info.endpoints:
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

    async def check_health(self, server: Server, timeout_s: float) -> None:
        """As for any server, except while this client has SGLang paused.

        SGLang's check generates a token, which a paused server does not: it answers 503 after 20 s. While its scheduler
        loads weights, only its HTTP front end answers; loading has a limit of its own.
        """
        if server.is_arealite or not server.is_paused:
            try:
                return await super().check_health(server, timeout_s)
            except ServerError:
                # It may have been paused meanwhile.
                if server.is_arealite or not server.is_paused:
                    raise
        await self._get(server, "model_info", timeout_s)

    async def probe(self, server: Server) -> ServerInfo:
        silence: ServerError | None = None
        try:
            await super().check_health(server, PROBE_TIMEOUT_S)
        except (HttpError, UnreachableError):
            raise
        except ServerError as error:
            silence = error
        info = await self._get(server, "model_info")
        version = read_version(info.get("weight_version"), 0)
        if info.get("engine") == "arealite":
            if silence is not None:
                raise silence
            return ServerInfo("arealite", version, context_length=int(info["context_length"]))
        # SGLang is silent where a trainer that was killed, or a failed update, has left it paused. This asks its
        # scheduler, so it is silent too if the server hangs.
        setup = await self._get(server, "server_info")
        schema = await self.http.get(f"{server.url}/openapi.json", timeout_s=2 * PROBE_TIMEOUT_S)
        endpoints = frozenset(schema["paths"])
        missing = [e for e in _NEEDED if e not in endpoints]
        if missing:
            raise ConfigError(
                f"{server.address} is SGLang {setup.get('version')}, which lacks {', '.join(missing)}: 0.5.4 or later "
                "is needed"
            )
        if int(setup.get("pp_size", 1)) > 1 and self.config.weight_update not in ("auto", "disk"):
            raise ConfigError(
                f"{server.address} runs in {setup['pp_size']} pipeline stages, which SGLang loads from disk only: "
                "set rollout.weight_update=disk"
            )
        return ServerInfo(
            "sglang",
            version,
            endpoints,
            num_ranks=int(setup.get("tp_size", 1)),
            device=str(setup.get("device", "cuda")),
            dtype=str(setup.get("dtype", "auto")),
        )

    async def _get(self, server: Server, name: str, timeout_s: float = PROBE_TIMEOUT_S) -> dict[str, Any]:
        """Return the answer of /{name}, or of /get_{name} in older versions."""
        try:
            return await self.http.get(f"{server.url}/{name}", timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 404:
                raise
        return await self.http.get(f"{server.url}/get_{name}", timeout_s=timeout_s)

    async def fingerprints(self, server: Server) -> Fingerprints | None:
        if server.is_arealite:
            url = f"{server.url}/weights_checker?tensors=1"
            answer = await self.http.get(url, CONTROL_TIMEOUT_S)
            return {name: (dtype, digest) for name, (dtype, digest) in answer["tensors"].items()}
        # On CUDA SGLang hashes with a kernel of its own; shards of tensors cannot be compared either.
        info = server.info
        if "/weights_checker" not in info.endpoints or info.device != "cpu":
            return None
        if info.num_ranks > 1 or info.dtype == "auto":
            return None
        answer = await self.http.get(f"{server.url}/weights_checker", CONTROL_TIMEOUT_S)
        return {
            name: (info.dtype, SHA256 + digest)
            for name, digest in answer["ranks"][0]["checksums"].items()
            # The rows of these may be padded.
            if "embed_tokens" not in name and "lm_head" not in name
        }


class RemoteSGLangEngine(RemoteEngine):
    """Generates with SGLang or embedded servers."""

    client_class = SGLangClient

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        # SGLang gives all samples of a request the same seed; the embedded server uses seed + i.
        if request.seed is not None and not all(s.is_arealite for s in self.router.servers.values()):
            return await InferenceEngine.agenerate_group(self, request)
        return await super().agenerate_group(request)


def sampling_params(progress: Progress, num_samples: int, max_new_tokens: int) -> dict[str, Any]:
    """Return a request's sampling parameters in SGLang's form."""
    params = progress.sampling_params(num_samples)
    params["max_new_tokens"] = max_new_tokens
    params["min_new_tokens"] = progress.min_new_tokens(max_new_tokens)
    params["top_k"] = progress.request.gconfig.top_k or -1
    if progress.seed is not None:
        params["sampling_seed"] = progress.seed
    return params


def _version_fields(server: Server, meta: WeightUpdateMeta) -> dict[str, Any]:
    """Return the version of new weights, as servers expect it.

    The embedded server takes the next version only, unless it is told otherwise: a run that recovers goes back, and a
    server that joins late skips versions.
    """
    fields: dict[str, Any] = {"weight_version": str(meta.version)}
    if server.is_arealite and not server.version <= meta.version <= server.version + 1:
        fields["reset_version"] = True
    return fields


def _piece(answer: dict[str, Any], server: Server, held: int, pause_mode: str) -> Piece:
    meta = answer["meta_info"]
    reason = meta["finish_reason"]["type"]
    if reason == "abort" and meta["finish_reason"].get("status_code"):
        status = int(meta["finish_reason"]["status_code"])
        raise HttpError(f"{server.url}/generate", status, str(meta["finish_reason"].get("message")))
    if reason not in ("stop", "length", "abort"):
        raise ServerError(f"{server.address} ended a request for an unknown reason: {reason!r}")
    if "output_logprobs" in meta:
        tokens, logprobs = answer["output_ids"], meta["output_logprobs"]
    else:
        logprobs, tokens = ([entry[i] for entry in meta["output_token_logprobs"]] for i in range(2))
    if len(tokens) != len(logprobs):
        raise ServerError(f"{server.address} sent {len(logprobs)} log-probs for {len(tokens)} tokens")
    spans = meta.get("weight_versions")
    if spans:
        parts = [[read_version(span["version"], held)] * (span["end"] - span["start"]) for span in spans]
        versions = list(chain.from_iterable(parts))
        if len(versions) != len(tokens):
            raise ServerError(f"{server.address}: weight_versions {spans} do not cover {len(tokens)} tokens")
    else:
        version = read_version(meta.get("weight_version"), held)
        if pause_mode == "in_place":
            # This is the version of the last token; the first one may be older.
            version = min(version, held)
        versions = [version] * len(tokens)
    return Piece(tokens, logprobs, versions, reason, _routed_experts(meta, len(tokens)))


def _routed_experts(meta: dict[str, Any], num_tokens: int) -> np.ndarray | None:
    """Decode the experts of prompt and tokens, if the server has sent them."""
    if not meta.get("routed_experts"):
        return None
    # SGLang sends int32.
    dtype = meta.get("routed_experts_dtype", "int32")
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype)
    record = flat.reshape(meta["prompt_tokens"] + num_tokens - 1, -1)
    return record.astype(np.int16) if dtype == "int32" else record


def _share(tensors: dict[str, torch.Tensor], num_ranks: int) -> tuple[list[str], list[torch.Tensor]]:
    """Copy tensors into shared memory, for SGLang's /update_weights_from_tensor.

    Returns one description for each rank of the server, and the copies: their memory is freed with them, so they must
    live until the server has answered. Pickles are only written here, never read.
    """
    copies = [(name, tensor.clone()) for name, tensor in tensors.items()]
    before = torch.multiprocessing.get_sharing_strategy()
    # By name: file descriptors pass between parent and child only.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        pickles = [bytes(ForkingPickler.dumps(copies)) for _ in range(num_ranks)]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return [base64.b64encode(p).decode() for p in pickles], [tensor for _, tensor in copies]
