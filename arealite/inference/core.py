"""State of the engine and all operations on it: requests, scheduler, KV cache, steps, weights.

`Engine` calls it from one thread. It is deterministic: with the same calls in the same order it plans the same steps
and samples the same tokens, so in tensor parallel every rank runs a core of its own on the same calls (`ranks`).
"""

import gc
import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import WeightUpdateError
from arealite.inference.cpu.runner import CpuRunner
from arealite.inference.drafts.planning import DeviceDrafts, Drafts, HostDrafts
from arealite.inference.fp8 import check_device
from arealite.inference.kv_cache import BlockPool
from arealite.inference.loading import ModelShape, shape_of
from arealite.inference.postprocess import Postprocessor
from arealite.inference.runner import Runner, Step, StepResult
from arealite.inference.scheduler import Scheduler
from arealite.inference.sequence import Request, Sequence, resolve
from arealite.inference.slots import SlotTable
from arealite.inference.timing.step_times import context_of
from arealite.inference.weights import ServedWeights, Staged, WeightSource
from arealite.utils.step_context import NO_CONTEXT
from arealite.weights.segment import release_removed


def make_runner(model: PreTrainedModel, shape: ModelShape, config: ServerConfig) -> Runner:
    """Make the runner for the model's device. Triton is needed, and imported, only for CUDA."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        from arealite.inference.cuda.runner import CudaRunner

        return CudaRunner(model, shape, config)
    return CpuRunner(model, shape, config)


class EngineCore:
    """Call `attach` once, then `step` while `can_step`. All other methods are calls between two steps."""

    def __init__(self, config: ServerConfig, weights: ServedWeights, tokenizer: Any | None = None):
        self.weights = weights
        self.shape = shape_of(weights.model, config.context_length)
        if config.weight_dtype == "fp8":
            check_device(config, weights.model.device)
            weights.use_fp8()
        # None while memory is released
        self.runner: Runner | None = make_runner(weights.model, self.shape, config)
        pool = BlockPool(self.runner.num_blocks, config.block_size)
        self.max_len = min(self.shape.context_length, pool.num_usable * config.block_size)
        self.config = replace(config, max_running_requests=self.runner.num_slots)
        slots = SlotTable(self.runner.num_slots, self.max_len, config.block_size)
        drafts = self._make_drafts(slots, pool, self.runner.max_in_flight)
        self.scheduler = Scheduler(slots, pool, config.max_prefill_tokens, self.max_len, drafts)
        self.scheduler.settle = self.settle
        self.post = Postprocessor(slots, self.shape, tokenizer)
        self.requests: dict[str, Request] = {}
        self.version = 0
        self.paused = False
        # Name of the LoRA adapter in use, and the version of the weights without it.
        self.adapter_name = ""
        self._base_version = 0
        # How long the last weight update held up generation.
        self.last_update_s = 0.0
        self._device = self.runner.device
        self._next_seed = config.seed
        # Of the sequences that the last step decodes.
        self.context = NO_CONTEXT
        self._in_flight: deque[Step] = deque()

    def attach(self) -> None:
        """Connect the runner with the slot table. On CUDA this captures the graphs."""
        self._attach()

    def _attach(self) -> None:
        # Apart from `attach`, which rank 0 sends to the others: `reclaim` is sent, too.
        assert self.runner is not None
        self.runner.attach(self.scheduler.slots)
        if isinstance(self.scheduler.drafts, DeviceDrafts):
            self.scheduler.drafts.costs = self.runner.measure_drafts()

    def _make_drafts(self, slots: SlotTable, pool: BlockPool, max_in_flight: int) -> Drafts:
        most = self.config.draft_tokens
        if most and max_in_flight > 1:
            return DeviceDrafts(slots, pool, most, self.settle, max_in_flight)
        return HostDrafts(slots, pool, most) if most else Drafts(slots, pool)

    @property
    def can_step(self) -> bool:
        """Whether there is something to compute now."""
        has_work = self.scheduler.has_work or bool(self._in_flight)
        return has_work and not self.paused and self.runner is not None

    def step(self) -> None:
        """Plan and launch the next step; collect results of earlier ones as the runner's limit demands."""
        assert self.runner is not None
        if self._in_flight and self.scheduler.slots.has_constrained:
            self.settle()  # a grammar allows tokens that depend on all earlier ones
        plan = self.scheduler.schedule()
        self.context = context_of(self.scheduler.slots.length[plan.slots])
        if dirty := self.scheduler.pool.take_dirty():
            self.runner.clear_blocks(dirty)
        if plan:
            self._in_flight.append(self.runner.launch(plan))
            self.scheduler.slots.length[plan.slots] += 1
        elif not self._in_flight and self.scheduler.has_work:
            raise RuntimeError("requests are waiting, but none can be admitted into an idle engine")
        while self._in_flight and (not plan or len(self._in_flight) >= self.runner.max_in_flight):
            self._collect()

    def settle(self) -> None:
        """Collect all steps in flight, so that the host knows every token."""
        while self._in_flight:
            self._collect()

    def _collect(self) -> None:
        result, drafts = self._in_flight.popleft()(), self.scheduler.drafts
        if result is not None:
            drafts.drafted_tokens += result.num_drafted
        while result is not None:
            self._append(result)
            result = result.following
            if result is not None:
                # A sequence may have ended with a token before: its slot is free.
                alive = self.scheduler.slots.ticket[result.slots] == result.tickets
                drafts.lengthen(result.slots[alive])

    def _append(self, result: StepResult) -> None:
        for seq in self.post.append(result):
            self._finish(seq)

    def _finish(self, seq: Sequence) -> None:
        """Take a sequence out of the engine. The last one of a request resolves the request's future."""
        request, slots = seq.request, self.scheduler.slots
        seq.output = self.post.output(seq)
        if request.want_routing and self.runner is not None:
            # A sequence whose keys are not all computed has no complete record.
            num_tokens = int(slots.length[seq.slot]) - 1 if seq.slot >= 0 and slots.decoding[seq.slot] else 0
            blocks = slots.block_table[seq.slot, : -(-num_tokens // self.config.block_size)]
            seq.output.routed_experts = self.runner.read_routing(blocks.astype(np.int64), num_tokens)
        if seq.slot >= 0:
            if seq.finish_reason and "status_code" in seq.finish_reason:
                self.scheduler.pool.spoil(seq.blocks)
            self.scheduler.release(seq)
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self.requests[request.rid]
            resolve(request.future, [s.output for s in request.sequences])

    def add(self, request: Request) -> None:
        """Queue a request. Its id must not be in use."""
        seed = request.params.sampling_seed
        if seed is None:
            seed, self._next_seed = self._next_seed << 20, self._next_seed + 1
        for seq in request.sequences:
            seq.seed = seed + seq.index
            seq.mark_version(self.version, 0)
        self.requests[request.rid] = request
        self.scheduler.add(request)

    def abort(self, rid: str | None, message: str = "aborted") -> int:
        """End the request `rid`, or all if None, with the tokens it has; returns the number ended."""
        self.settle()
        requests = list(self.requests.values())
        if rid is not None:
            requests = [self.requests[rid]] if rid in self.requests else []
        for request in requests:
            self._abort_request(request, message)
        return len(requests)

    def _abort_request(self, request: Request, message: str) -> None:
        self.scheduler.remove_waiting(request)
        for seq in request.sequences:
            if seq.output is None:
                seq.finish_reason = {"type": "abort", "message": message}
                self._finish(seq)

    def pause(self, mode: str) -> int:
        """Stop generation until `resume` (see `Engine.pause`); returns the number of running requests."""
        self.settle()
        self.paused = True
        running = [seq for seq in self.scheduler.slots.sequence if seq is not None]
        requests = {seq.request.rid: seq.request for seq in (*running, *self.scheduler.preempted)}
        if mode == "abort":
            for request in requests.values():
                self._abort_request(request, "paused for a weight update")
        elif mode == "retract":
            self._retract()
        return len(requests)

    def resume(self) -> None:
        """Continue after `pause`."""
        self.paused = False

    def flush_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing is done, while requests are running or waiting."""
        if self.scheduler.has_work:
            return False
        self.scheduler.pool.flush()
        return True

    def _retract(self) -> None:
        """Preempt every running sequence; it keeps its tokens."""
        self.settle()
        slots = self.scheduler.slots
        running = [seq for seq in slots.sequence if seq is not None]
        for seq in sorted(running, key=lambda seq: -slots.ticket[seq.slot]):
            self.scheduler.preempt(seq)

    def release(self) -> None:
        """Free the device memory of KV cache, graphs and weights until `reclaim`."""
        if self.runner is None:
            return
        self._retract()
        self.scheduler.pool.flush()
        self.runner.close()
        self.runner = None
        self.weights.model.to("cpu")  # pyright: ignore[reportArgumentType]
        if self._device.type == "cuda":
            # The server has frozen the objects of its start; some of them are garbage now.
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()

    def reclaim(self) -> None:
        """Take the device memory back and continue."""
        if self.runner is not None:
            return
        self.weights.model.to(self._device)  # pyright: ignore[reportArgumentType]
        pool = self.scheduler.pool
        config = replace(self.config, max_total_tokens=pool.num_usable * pool.block_size)
        self.runner = make_runner(self.weights.model, self.shape, config)
        self._attach()

    def active_runner(self) -> Runner:
        """Return the runner; raises `WeightUpdateError` while memory is released."""
        if self.runner is None:
            raise WeightUpdateError("the engine's memory is released: call /resume_memory_occupation first")
        return self.runner

    def stage(self, source: WeightSource) -> Staged:
        """Read and check new weights and bring them to the device. Any thread may call it while steps run."""
        runner = self.active_runner()
        if source.meta is None and not self.adapter_name:
            raise WeightUpdateError("no adapter is loaded: the base weights are in use")
        staged = self.weights.stage(source)
        staged.pairs = runner.stage(staged.pairs)
        return staged

    def swap(self, staged: Staged, version: int | None, flush_cache: bool, adapter_name: str) -> int:
        """Use new weights from the next step on. Returns the number of running sequences.

        Running sequences keep their tokens; with `flush_cache` all of their keys and values are computed again. New
        requests use no keys and values of earlier weights, unless `keep_prefix_across_updates` is set.
        """
        begin = time.perf_counter()
        runner = self.active_runner()
        self.settle()
        if staged.adapter is not None and not self.adapter_name:
            self._base_version = self.version
        runner.load(staged.pairs)
        self.weights.accept(staged)
        self.adapter_name = adapter_name
        num_running = self.scheduler.num_running
        if flush_cache:
            self._retract()
        if not self.config.keep_prefix_across_updates:
            self.scheduler.pool.flush()
        elif flush_cache:
            for seq in self.scheduler.preempted:
                seq.uses_prefix_cache = False
        self._mark_version(self._base_version if version is None else version)
        self.last_update_s = time.perf_counter() - begin
        return num_running

    def release_removed(self) -> None:
        """Release mapped weights of runs that have ended."""
        release_removed()

    def set_version(self, version: int) -> None:
        """Mark all tokens from the next step on with this version."""
        self.settle()
        self._mark_version(version)

    def _mark_version(self, version: int) -> None:
        self.version = version
        for request in self.requests.values():
            for seq in request.sequences:
                if seq.output is None:
                    seq.mark_version(version, self.post.num_sampled(seq))
