"""Ranks of a tensor-parallel server: each runs the same engine core on its part of the model.

Rank 0 is the engine's own process. It starts the other ranks as processes and sends every call to its core (a new
request, an abort, a pause, a weight update, a step) to theirs first. Scheduling and sampling are deterministic, so all
ranks sample the same tokens; a checksum of the tokens comes with every step, and a difference ends the server. All
ranks read and check a weight update before any of them loads it. Ranks share a machine and communicate over pipes: a
closed pipe shows at once that a rank has died.
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import AReaLiteError, ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.core import EngineCore
from arealite.inference.fp8 import loaded_dtype
from arealite.inference.loading import choose_device, load_model, load_tokenizer, read_config
from arealite.inference.runner import StepResult
from arealite.inference.sequence import Request
from arealite.inference.sharding import Shards, TensorGroup
from arealite.inference.weights import ServedWeights, Staged, WeightSource
from arealite.utils.pools.process_pool import die_with_owner
from arealite.weights.fingerprint import Fingerprints, digest, fingerprint, stride
from arealite.weights.host_memory import SharedWeights
from arealite.weights.layout import TensorLayout

logger = logging.getLogger("arealite.server")

_CLOSE_S = 5.0
_ANSWER_S = 600.0  # a large model on a slow disk takes long to start or to update


class Ranks:
    """The other ranks, as rank 0 sees them. Calls `on_death` with a message when one ends on its own."""

    def __init__(self, config: ServerConfig, on_death: Callable[[str], None]):
        read_config(config)  # raises before a process is started
        context = multiprocessing.get_context("spawn")
        size = config.tensor_parallel
        # The ranks find each other through a file that only this user can read: every user can connect to a port.
        self._folder = tempfile.TemporaryDirectory(prefix="arealite-ranks-")
        path = f"{self._folder.name}/store"
        store = FileStore(path, size)
        self._inputs: list[Connection] = []
        self._updates: list[Connection] = []
        self.processes: list[Any] = []
        self._shared: SharedWeights | None = None
        self._closing = False
        self._reaping = threading.Lock()
        self.num_loads = 0  # weight updates that all ranks have loaded or are about to load
        for rank in range(1, size):
            inputs, their_inputs = context.Pipe()
            updates, their_updates = context.Pipe()
            args = (rank, config, path, their_inputs, their_updates)
            process = context.Process(target=_run_rank, args=args, name=f"rank {rank}", daemon=True)
            process.start()
            their_inputs.close()
            their_updates.close()
            self._inputs.append(inputs)
            self._updates.append(updates)
            self.processes.append(process)
        self._receive(self._inputs)  # all have started
        self.group = TensorGroup(0, size, store, choose_device(config))
        threading.Thread(target=self._watch, args=(on_death,), daemon=True).start()

    def send(self, method: str, *args: Any) -> None:
        """Make every other rank call this method of `RankWorker` or its core, after all earlier calls."""
        self._send(self._inputs, [method, *args])

    def ask(self, method: str, *args: Any) -> list[dict[str, torch.Tensor]]:
        """As `send`, for a method that answers with tensors."""
        self.send(method, *args)
        return [load(answer) for answer in self._receive(self._inputs)]

    @contextmanager
    def staging(self, source: WeightSource | None) -> Iterator[None]:
        """Let the other ranks read and check new weights. Source None: only wait for earlier updates."""
        fields = None if source is None else source.to_json()
        self._send(self._updates, {"source": fields, "after": self.num_loads})
        try:
            yield
        finally:
            answers = [json.loads(answer) for answer in self._receive(self._updates)]
        for rank, error in enumerate(answers, 1):
            if error is not None:
                raise WeightUpdateError(f"rank {rank}: {error}")

    def share(self, tensors: dict[str, torch.Tensor]) -> str:
        """Copy tensors that only this rank has to shared memory; returns the path for the others."""
        if self._shared is not None and TensorLayout.of(self._shared.tensors) != TensorLayout.of(tensors):
            self._shared.unlink()  # a copy into other types would round
            self._shared = None
        if self._shared is None:
            self._shared = SharedWeights.create(f"/dev/shm/arealite-ranks-{secrets.token_hex(16)}", tensors)
        # Makes it again if it was removed.
        self._shared = SharedWeights.attach(self._shared.path)
        for name, tensor in tensors.items():
            self._shared.tensors[name].copy_(tensor)
        return str(self._shared.path)

    def lost(self, wait_s: float = 0.0) -> str | None:
        """An error message if a rank has ended; None if all are alive."""
        ending = wait([process.sentinel for process in self.processes], wait_s)
        with self._reaping:  # only one thread can wait for a process
            for process in self.processes:
                if process.sentinel in ending:
                    process.join(_CLOSE_S)  # the sentinel closes before the exit code is known
            codes = [process.exitcode for process in self.processes]
        for rank, code in enumerate(codes, 1):
            if code is not None:
                pid = self.processes[rank - 1].pid
                return (
                    f"rank {rank} of {len(codes) + 1} (process {pid}) ended with exit code {code}: the server cannot "
                    "continue without its part of the model"
                )
        return None

    def close(self) -> None:
        """End the other ranks."""
        self._closing = True
        for pipe in (*self._inputs, *self._updates):
            pipe.close()
        for process in self.processes:
            process.join(_CLOSE_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self._shared is not None:
            self._shared.unlink()
        self._folder.cleanup()

    def _send(self, pipes: list[Connection], message: Any) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        try:
            for pipe in pipes:
                pipe.send_bytes(data)
        except OSError as error:
            raise ServerError(self.lost(_CLOSE_S) or f"a rank cannot be reached: {error}") from error

    def _receive(self, pipes: list[Connection]) -> list[bytes]:
        answers = []
        try:
            for rank, pipe in enumerate(pipes, 1):
                if not pipe.poll(_ANSWER_S):
                    raise ServerError(f"rank {rank} has not answered for {_ANSWER_S:.0f} s")
                answers.append(pipe.recv_bytes())
        except (OSError, EOFError) as error:
            raise ServerError(self.lost(_CLOSE_S) or f"a rank does not answer: {error!r}") from error
        return answers

    def _watch(self, on_death: Callable[[str], None]) -> None:
        """Wait until any rank ends."""
        wait([process.sentinel for process in self.processes])
        message = self.lost()
        if message is not None and not self._closing:
            on_death(message)


class ParallelWeights(ServedWeights):
    """The weights of rank 0. All ranks read and check an update before any of them loads it."""

    def __init__(self, model: PreTrainedModel, shards: Shards, ranks: Ranks):
        super().__init__(model, shards)
        self.ranks = ranks

    def stage(self, source: WeightSource) -> Staged:
        if source.tensors is None:
            with self.ranks.staging(source):
                return super().stage(source)
        # Only this rank has received the tensors: the others map them from shared memory.
        staged = super().stage(source)
        with self.ranks.staging(None):
            pass  # until they have copied the tensors that were there before
        shared = WeightUpdateMeta("shm", self.ranks.share(source.tensors))
        with self.ranks.staging(WeightSource.published(shared)):
            return staged

    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the whole tensors, from samples that each rank takes of its part."""
        found, samples = {}, self.ranks.ask("sample")
        for name, tensor in self.named_tensors().items():
            loaded = loaded_dtype(tensor)
            dtype = str(loaded).removeprefix("torch.")
            if name not in self.shards.dims:
                found[name] = (dtype, fingerprint(tensor))
                continue
            whole = self.shards.whole_shape(name, tensor.shape)
            step = stride(whole.numel())
            owners = self.shards.owners(name, tensor.shape, step)
            values = torch.empty(len(owners), dtype=loaded)
            values[owners == 0] = self.sample(name, tensor).cpu()
            for rank, sample in enumerate(samples, 1):
                values[owners == rank] = sample[name]
            found[name] = (dtype, digest(values, whole))
        return found

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole parameter, from the parts of all ranks."""
        dim = self.shards.dims.get(name)
        if dim is None:
            return part
        others = [answer["part"] for answer in self.ranks.ask("part", name)]
        return torch.cat([part.detach().cpu(), *others], dim)


class RankCore(EngineCore):
    """The core of one rank. `checksum` covers all tokens sampled so far."""

    checksum = 0

    def _append(self, result: StepResult) -> None:
        self.checksum = zlib.crc32(result.tokens.astype(np.int64).tobytes(), self.checksum)
        super()._append(result)


def _send_first(method: Any) -> Any:
    """Wrap a method of the core: rank 0 sends the call to the other ranks before it makes it itself."""

    @functools.wraps(method)
    def call(self: LeaderCore, *args: Any) -> Any:
        self.ranks.send(method.__name__, *args)
        return method(self, *args)

    return call


class LeaderCore(RankCore):
    """The core of rank 0, which sends every input to the other ranks before it applies it."""

    def __init__(self, config: ServerConfig, weights: ParallelWeights, tokenizer: Any | None, ranks: Ranks):
        super().__init__(config, weights, tokenizer)
        self.ranks = ranks
        # The other ranks make caches of the same size.
        ranks.send("start", self.scheduler.pool.num_usable * config.block_size)

    attach = _send_first(RankCore.attach)
    abort = _send_first(RankCore.abort)
    pause = _send_first(RankCore.pause)
    resume = _send_first(RankCore.resume)
    set_version = _send_first(RankCore.set_version)
    flush_cache = _send_first(RankCore.flush_cache)
    release = _send_first(RankCore.release)
    reclaim = _send_first(RankCore.reclaim)
    release_removed = _send_first(RankCore.release_removed)

    def step(self) -> None:
        self.ranks.send("step", self.checksum)
        super().step()

    def add(self, request: Request) -> None:
        self.ranks.send("add", request.to_json())
        super().add(request)

    def swap(self, staged: Staged, version: int | None, flush_cache: bool, adapter_name: str) -> int:
        self.active_runner()  # raises before the other ranks begin
        self.ranks.num_loads += 1
        self.ranks.send("swap", version, flush_cache, adapter_name)
        return super().swap(staged, version, flush_cache, adapter_name)


def _run_rank(rank: int, config: ServerConfig, path: str, inputs: Connection, updates: Connection) -> None:
    """Main function of a rank's process. Ends when rank 0 closes the pipe or dies."""
    die_with_owner()
    disable_progress_bar()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for rank 0, which ends this process
    try:
        inputs.send_bytes(b"")
        store = FileStore(path, config.tensor_parallel)
        device = choose_device(config, rank)
        group = TensorGroup(rank, config.tensor_parallel, store, device)
        RankWorker(config, *load_model(config, group), inputs, updates).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # rank 0 has closed: a regular exit would complain about the closed process group
    except (AReaLiteError, RuntimeError) as error:
        sys.exit(f"rank {rank}: {error}")


class RankWorker:
    """One of the other ranks: repeats the calls of rank 0, and reads weight updates on a thread."""

    def __init__(
        self, config: ServerConfig, model: PreTrainedModel, shards: Shards, inputs: Connection, updates: Connection
    ):
        self.config, self.inputs, self.updates = config, inputs, updates
        self.weights = ServedWeights(model, shards)
        self.core: RankCore
        self.staged: Staged | None = None
        self.num_loads, self.loaded = 0, threading.Condition()

    def run(self) -> None:
        """Make the calls of rank 0 until it closes the pipe, to methods of this class or else of the core."""
        threading.Thread(target=self._stage_updates, daemon=True).start()
        while True:
            method, *args = json.loads(self.inputs.recv_bytes())
            getattr(self if hasattr(self, method) else self.core, method)(*args)

    def start(self, num_tokens: int) -> None:
        """Make the core, with a KV cache as large as that of rank 0."""
        config = replace(self.config, max_total_tokens=num_tokens)
        # Stop strings end sequences, so every rank looks for them.
        self.core = RankCore(config, self.weights, load_tokenizer(config.model_path))

    def step(self, checksum: int) -> None:
        """Take the next step, if all ranks have sampled the same tokens."""
        if self.core.checksum != checksum:
            raise ServerError("its tokens differ from those of rank 0: the ranks have drifted apart")
        self.core.step()

    def add(self, fields: dict[str, Any]) -> None:
        """Queue a request."""
        self.core.add(Request.from_json(fields))

    def swap(self, version: int | None, flush_cache: bool, adapter_name: str) -> None:
        """Load the weights that were staged last."""
        assert self.staged is not None
        self.core.swap(self.staged, version, flush_cache, adapter_name)
        self.staged = None
        with self.loaded:
            self.num_loads += 1
            self.loaded.notify_all()

    def sample(self) -> None:
        """Answer with this rank's share of the sampled elements of each tensor, for fingerprints."""
        parts = dict(self.weights.model.named_parameters())
        names = [name for name in parts if name in self.weights.shards.dims]
        self.inputs.send_bytes(save({name: self.weights.sample(name, parts[name]).cpu() for name in names}))

    def part(self, name: str) -> None:
        """Answer with this rank's part of a parameter."""
        self.inputs.send_bytes(save({"part": self.weights.model.get_parameter(name).detach().cpu()}))

    def _stage_updates(self) -> None:
        """Read and check new weights while steps go on. Waits for rank 0; ends when the pipe is closed."""
        try:
            while True:
                message = json.loads(self.updates.recv_bytes())
                self.updates.send_bytes(json.dumps(self._stage(**message)).encode())
        except (EOFError, OSError):
            return

    def _stage(self, source: dict[str, Any] | None, after: int = 0) -> str | None:
        """Read and check new weights once `after` updates are loaded here; returns what is wrong with them."""
        if after:
            with self.loaded:
                if not self.loaded.wait_for(lambda: self.num_loads >= after, _ANSWER_S / 2):
                    return "the update before this one was not loaded in time"
        if source is None:
            return None
        try:
            self.staged = self.core.stage(WeightSource.from_json(source))
        except WeightUpdateError as error:
            return str(error)
        except Exception as error:  # also a bug: rank 0 waits for an answer and reports it
            logger.exception("the update was not read")
            return type(error).__name__
