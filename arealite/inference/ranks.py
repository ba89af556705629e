"""The ranks of a tensor-parallel server: rank 0 decides, the others do the same with their part of the model.

Rank 0 is the engine's own process; it has HTTP, scheduler and cache bookkeeping. The others, processes it starts, keep a copy of the slot table: over a
pipe they get what changed in it and the plan of each step, run the very same runner on it, and sample the same tokens by themselves, since
noise is keyed by seed and position. With every plan comes a checksum of the tokens rank 0 has read, so ranks that drift apart end the server instead of
generating nonsense. Weight updates are read and checked on all ranks before any of them takes one. Pipes, not the network: all ranks
share a machine, and a dead one is known at once by its closed end.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import AReaLiteError, ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.cpu.runner import ModelRunner, StepResult
from arealite.inference.loading import ModelShape, choose_device, load_model, read_config, shape_of
from arealite.inference.scheduler import Chunk, Plan
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.sharding import Shards, TensorGroup
from arealite.inference.slots import Journal, SlotTable
from arealite.inference.weights import ServedWeights, Staged, Weights, WeightSource
from arealite.utils.process_pool import die_with_owner
from arealite.weights.fingerprint import Fingerprints, digest, fingerprint, stride
from arealite.weights.host_memory import SharedWeights

_HOST = "127.0.0.1"
_CLOSE_S = 5.0
_ANSWER_S = 600.0  # to start, or to read a large model from a slow disk
_SEED_MASK = 0xFFFFFFFFFFFFFFFF


def make_runner(model: PreTrainedModel, shape: ModelShape, config: ServerConfig) -> Any:
    """The runner for the model's device. Triton is needed, and imported, only for CUDA."""
    if next(model.parameters()).device.type == "cuda":
        from arealite.inference.cuda.runner import CudaRunner

        return CudaRunner(model, shape, config)
    return ModelRunner(model, shape, config)


class Ranks:
    """The other ranks, as rank 0 sees them. `on_death` is called with a message when one ends unasked."""

    def __init__(self, config: ServerConfig, on_death: Callable[[str], None]):
        read_config(config)  # whatever can be refused is refused before a process is started
        context = multiprocessing.get_context("spawn")
        size = config.tensor_parallel
        store = dist.TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False)
        self._steps: list[Connection] = []
        self._updates: list[Connection] = []
        self.processes: list[Any] = []
        self._shared: SharedWeights | None = None
        self._closing = False
        self._reaping = threading.Lock()
        self.num_loads = 0  # updates that all ranks were told to take
        for rank in range(1, size):
            steps, their_steps = context.Pipe()
            updates, their_updates = context.Pipe()
            args = (rank, config, store.port, their_steps, their_updates)
            process = context.Process(target=_follow, args=args, name=f"rank {rank}", daemon=True)
            process.start()
            their_steps.close()
            their_updates.close()
            self._steps.append(steps)
            self._updates.append(updates)
            self.processes.append(process)
        self._receive(self._steps)  # all are there
        self.group = TensorGroup(0, size, store, choose_device(config))
        threading.Thread(target=self._watch, args=(on_death,), daemon=True).start()

    def send(self, op: str, **message: Any) -> None:
        """Have every rank do something at this point of the sequence of steps."""
        self._send(self._steps, {"op": op, **message})

    def ask(self, op: str, **message: Any) -> list[dict[str, torch.Tensor]]:
        """As `send`, for something that has tensors as its answer."""
        self.send(op, **message)
        return [load(answer) for answer in self._receive(self._steps)]

    @contextmanager
    def staging(self, source: WeightSource | None) -> Iterator[None]:
        """The other ranks read and check new weights while this one does; fails if any of them refuses.

        Without a source they only wait until they have copied all updates so far.
        """
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
        """Lay tensors that only this rank has where the others can map them."""
        if self._shared is not None and _kinds(self._shared.tensors) != _kinds(tensors):
            self._shared.unlink()  # a copy into other types would round
            self._shared = None
        if self._shared is None:
            self._shared = SharedWeights.create(f"/dev/shm/arealite-ranks-{os.getpid()}", tensors)
        for name, tensor in tensors.items():
            self._shared.tensors[name].copy_(tensor)
        return str(self._shared.path)

    def lost(self, wait_s: float = 0.0) -> str | None:
        """What to say of a rank that has ended; None if all live."""
        ending = wait([process.sentinel for process in self.processes], wait_s)
        with self._reaping:  # a process's end can be asked of the kernel only once
            for process in self.processes:
                if process.sentinel in ending:
                    process.join(_CLOSE_S)  # its files are closed before it has an exit code
            codes = [process.exitcode for process in self.processes]
        for rank, code in enumerate(codes, 1):
            if code is not None:
                pid = self.processes[rank - 1].pid
                return (
                    f"rank {rank} of {len(codes) + 1} (process {pid}) ended with exit code {code}: the server cannot go on "
                    "without its part of the model"
                )
        return None

    def close(self) -> None:
        self._closing = True
        for pipe in (*self._steps, *self._updates):
            pipe.close()
        for process in self.processes:
            process.join(_CLOSE_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self._shared is not None:
            self._shared.unlink()

    def _send(self, pipes: list[Connection], message: dict[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":"), default=int).encode()  # numpy counts
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
            raise ServerError(self.lost(_CLOSE_S) or f"a rank is silent: {error!r}") from error
        return answers

    def _watch(self, on_death: Callable[[str], None]) -> None:
        """Waits for the end of any rank; unblocked by the kernel."""
        wait([process.sentinel for process in self.processes])
        message = self.lost()
        if message is not None and not self._closing:
            on_death(message)


class ParallelWeights(ServedWeights):
    """Rank 0's weights, whose updates all ranks read and check before any of them takes one."""

    def __init__(self, model: PreTrainedModel, shards: Shards, ranks: Ranks):
        super().__init__(model, shards)
        self.ranks = ranks

    def stage(self, source: WeightSource) -> Staged:
        if source.tensors is None:
            with self.ranks.staging(source):
                return super().stage(source)
        # Only this rank has received them: the others map them from shared memory.
        staged = super().stage(source)
        with self.ranks.staging(None):
            pass  # until they have copied what was there before
        shared = WeightUpdateMeta("shm", self.ranks.share(source.tensors))
        with self.ranks.staging(WeightSource.published(shared)):
            return staged

    def fingerprints(self) -> Fingerprints:
        """Of the whole tensors, from samples that each rank takes of its part."""
        found, samples = {}, self.ranks.ask("sample")
        for name, tensor in self.named_tensors().items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if name not in self.shards.dims:
                found[name] = (dtype, fingerprint(tensor))
                continue
            whole = self.shards.whole_shape(name, tensor.shape)
            step = stride(whole.numel())
            owners = self.shards.owners(name, tensor.shape, step)
            values = torch.empty(len(owners), dtype=tensor.dtype)
            values[owners == 0] = self.shards.sample(name, tensor, step)
            for rank, sample in enumerate(samples, 1):
                values[owners == rank] = sample[name]
            found[name] = (dtype, digest(values, whole))
        return found

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        dim = self.shards.dims.get(name)
        if dim is None:
            return part
        others = [answer["part"] for answer in self.ranks.ask("part", name=name)]
        return torch.cat([part.detach().cpu(), *others], dim)


class ParallelRunner:
    """Rank 0's runner, whose every step the other ranks take too."""

    def __init__(self, runner: Any, ranks: Ranks):
        self.runner, self.ranks = runner, ranks
        self.device, self.num_blocks = runner.device, runner.num_blocks
        self.max_in_flight = runner.max_in_flight
        self.stage = runner.stage
        self._num_collected = self._checksum = 0

    def attach(self, slots: SlotTable) -> None:
        self.slots = slots
        num_tokens = (self.num_blocks - 1) * self.runner.block_size
        self.ranks.send("start", num_tokens=num_tokens, max_len=slots.max_len)
        self.runner.attach(slots)
        if slots.journal is None:
            slots.journal = Journal()

    def launch(self, plan: Plan) -> _SharedStep:
        journal = self.slots.journal
        assert journal is not None
        self.ranks.send(
            "step",
            taken=[row for slot in sorted(journal.taken) if (row := self._row(slot))],
            grown=[
                (slot, int(self.slots.block_table[slot, self.slots.num_blocks[slot] - 1]))
                for slot in sorted(journal.grown - journal.taken)
            ],
            chunks=[(c.slot, c.start, c.end) for c in plan.chunks],
            copies=plan.copies,
            slots=plan.slots.tolist(),
            collected=self._num_collected,
            checksum=self._checksum,
        )
        step = self.runner.launch(plan)
        journal.taken.clear()
        journal.grown.clear()
        return _SharedStep(step, self)

    def load(self, pairs: list) -> None:
        self.ranks.num_loads += 1
        self.ranks.send("load")
        self.runner.load(pairs)

    def clear_blocks(self, blocks: list[int]) -> None:
        self.ranks.send("clear", blocks=blocks)
        self.runner.clear_blocks(blocks)

    def note(self, result: StepResult | None) -> None:
        self._num_collected += 1
        self._checksum = _add_tokens(self._checksum, result)

    def _row(self, slot: int) -> dict[str, Any] | None:
        """A slot that was filled anew, as another rank can fill it too."""
        slots, seq = self.slots, self.slots.sequence[slot]
        if seq is None:  # it has ended before its first step
            return None
        params = asdict(seq.request.params) | {"n": 1, "sampling_seed": None}
        return {
            "slot": slot,
            "ticket": int(slots.ticket[slot]),
            "limit": int(slots.limit[slot]),
            "prompt_len": int(slots.prompt_len[slot]),
            "tokens": slots.tokens[slot, : slots.length[slot]].tolist(),
            "blocks": slots.block_table[slot, : slots.num_blocks[slot]].tolist(),
            "seed": seq.seed & _SEED_MASK,
            "params": params,
            "raw": seq.request.want_raw_logprobs,
        }


class _SharedStep:
    """A step whose tokens rank 0 reads, and counts for the other ranks to compare."""

    def __init__(self, step: Any, runner: ParallelRunner):
        self._step, self._runner = step, runner

    def collect(self) -> StepResult | None:
        result = self._step.collect()
        self._runner.note(result)
        return result


# ------------------------------------------------------------------------------------------- the other ranks


def _follow(rank: int, config: ServerConfig, port: int, steps: Connection, updates: Connection) -> None:
    """The life of a rank other than 0. Ends when rank 0 closes the pipe or dies."""
    die_with_owner()
    disable_progress_bar()  # a log is no place for bars
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # for rank 0, which ends this one
    try:
        steps.send_bytes(b"")
        store = dist.TCPStore(_HOST, port, config.tensor_parallel, wait_for_workers=False)
        device = choose_device(config, rank)
        group = TensorGroup(rank, config.tensor_parallel, store, device)
        _Follower(config, group, steps, updates).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # rank 0 has closed; its end of the group is gone, which taking this one apart would complain about
    except (AReaLiteError, RuntimeError) as error:
        sys.exit(f"rank {rank}: {error}")


class _Follower:
    """One rank's part of the model and its copy of the slot table. Each method named after an `op` does what rank 0 does."""

    def __init__(self, config: ServerConfig, group: TensorGroup, steps: Connection, updates: Connection):
        self.config, self.steps, self.updates = config, steps, updates
        self.model, shards = load_model(config, group)
        self.weights = ServedWeights(self.model, shards)
        self.device = next(self.model.parameters()).device
        self.staged: Staged | None = None
        self.num_loads, self.loaded = 0, threading.Condition()
        self.runner: Any = None
        self.in_flight: deque[Any] = deque()
        self.num_collected = self.checksum = 0

    def run(self) -> None:
        threading.Thread(target=self._stage_updates, daemon=True).start()
        ops = {name: getattr(self, name) for name in ("start", "step", "load", "clear", "release", "sample", "part")}
        while True:
            message = json.loads(self.steps.recv_bytes())
            ops[message.pop("op")](**message)

    def start(self, num_tokens: int, max_len: int) -> None:
        self.model.to(self.device)  # pyright: ignore[reportArgumentType]
        config = replace(self.config, max_total_tokens=num_tokens)
        shape = shape_of(self.model, config.context_length)
        self.runner = make_runner(self.model, shape, config)
        self.slots = SlotTable(config.max_running_requests, max_len, config.block_size)
        self.runner.attach(self.slots)
        self.num_collected = self.checksum = 0

    def step(
        self,
        taken: list[dict[str, Any]],
        grown: list[list[int]],
        chunks: list[list[int]],
        copies: list[tuple[int, int]],
        slots: list[int],
        collected: int,
        checksum: int,
    ) -> None:
        while self.num_collected < collected:
            self._collect()
        if self.checksum != checksum:
            raise ServerError("its tokens differ from those of rank 0: the ranks have drifted apart")
        for row in taken:
            self._fill(**row)
        for slot, block in grown:
            self.slots.add_block(slot, block)
        rows = np.array(slots, np.int64)
        self.in_flight.append(self.runner.launch(Plan([Chunk(*c) for c in chunks], copies, rows)))
        self.slots.length[rows] += 1

    def load(self) -> None:
        self._settle()
        assert self.staged is not None
        self.runner.load(self.staged.pairs)
        self.weights.accept(self.staged)
        self.staged = None
        with self.loaded:
            self.num_loads += 1
            self.loaded.notify_all()

    def clear(self, blocks: list[int]) -> None:
        self.runner.clear_blocks(blocks)

    def release(self) -> None:
        self._settle()
        self.runner = None
        self.model.to("cpu")  # pyright: ignore[reportArgumentType]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def sample(self) -> None:
        shards, found = self.weights.shards, {}
        for name, part in self.model.named_parameters():
            if name in shards.dims:
                step = stride(shards.whole_shape(name, part.shape).numel())
                found[name] = shards.sample(name, part, step)
        self.steps.send_bytes(save(found))

    def part(self, name: str) -> None:
        self.steps.send_bytes(save({"part": self.model.get_parameter(name).detach().cpu()}))

    def _fill(
        self,
        slot: int,
        ticket: int,
        limit: int,
        prompt_len: int,
        tokens: list[int],
        blocks: list[int],
        seed: int,
        params: dict[str, Any],
        raw: bool,
    ) -> None:
        sampling = SamplingParams.from_json(params)
        request = Request(tokens[:prompt_len], sampling, "", want_raw_logprobs=raw)
        (seq,) = request.sequences
        seq.seed = seed
        if len(tokens) > prompt_len:
            seq.saved_tokens = np.array(tokens[prompt_len:], np.int32)
            seq.saved_logprobs = seq.saved_raw = np.zeros(len(seq.saved_tokens), np.float32)
        self.slots.fill(slot, seq, limit, ticket)
        self.slots.set_blocks(slot, blocks)

    def _collect(self) -> None:
        result = self.in_flight.popleft().collect()
        self.num_collected += 1
        self.checksum = _add_tokens(self.checksum, result)
        if result is not None:
            alive = self.slots.ticket[result.slots] == result.tickets
            rows, places = result.slots[alive], result.positions[alive]
            self.slots.tokens[rows, places] = result.tokens[alive]

    def _settle(self) -> None:
        while self.in_flight:
            self._collect()

    def _stage_updates(self) -> None:
        """Reads and checks new weights while steps go on; unblocked by rank 0, ended by its closed pipe."""
        try:
            while True:
                message = json.loads(self.updates.recv_bytes())
                self.updates.send_bytes(json.dumps(self._stage(**message)).encode())
        except (EOFError, OSError):
            return

    def _stage(self, source: dict[str, Any] | None, after: int = 0) -> str | None:
        """What is wrong with the new weights; None if they are ready. Begins when the updates before it are in use here too."""
        if after:
            with self.loaded:
                if not self.loaded.wait_for(lambda: self.num_loads >= after, _ANSWER_S / 2):
                    return "the update before this one was not taken in time"
        if source is None:
            return None
        try:
            staged = self.weights.stage(WeightSource.from_json(source))
            staged.pairs = self.runner.stage(staged.pairs)
            self.staged = staged
        except WeightUpdateError as refusal:
            return str(refusal)
        except Exception as error:  # also a bug: rank 0 waits for an answer, and tells who asked
            return repr(error)


def _kinds(tensors: Weights) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _add_tokens(checksum: int, result: StepResult | None) -> int:
    return checksum if result is None else zlib.crc32(result.tokens.astype(np.int64), checksum)
