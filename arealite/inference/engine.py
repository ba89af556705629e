"""The embedded inference engine: a thread that repeats schedule → run → postprocess, and thread-safe calls to feed it.

Used by the HTTP server and, in process, by the embedded rollout engine. Everything that changes state runs on the engine's thread, between
two steps; calls hand it over and return futures (`StepLoop`).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import RequestError, ServerError, WeightUpdateError
from arealite.inference.cpu.runner import Step
from arealite.inference.kv_cache import BlockPool
from arealite.inference.loading import load_model, load_tokenizer, prepare_model, shape_of
from arealite.inference.postprocess import Postprocessor
from arealite.inference.ranks import ParallelRunner, ParallelWeights, Ranks, make_runner
from arealite.inference.scheduler import Scheduler
from arealite.inference.sequence import Request, SampleOutput, SamplingParams, Sequence
from arealite.inference.slots import SlotTable
from arealite.inference.step_loop import StepLoop, resolve
from arealite.inference.weights import ServedWeights, Staged, WeightSource
from arealite.utils.decoders import TRIAL_TOKENS, check_trial
from arealite.weights.fingerprint import Fingerprints

PAUSE_MODES = ("abort", "retract", "in_place")
_BESIDE = ThreadPoolExecutor(1, thread_name_prefix="fingerprints")


class Engine(StepLoop):
    """Generates. `start` it, `submit` requests, `close` it."""

    def __init__(self, config: ServerConfig, model: PreTrainedModel | None = None, tokenizer: Any | None = None):
        super().__init__()
        config.check()
        self.config = config
        self.tokenizer = tokenizer
        self.version = 0
        self.paused = False
        self.last_update_s = 0.0  # how long the last weight update held up generation
        self._started_s = time.monotonic()
        self.adapter_name = ""  # of the LoRA adapter in use, if any
        self._base_version = 0  # of the weights without it
        self._updating = threading.Lock()  # from reading an update to its use
        self._home: torch.device | None = None  # where the weights live, while they are elsewhere
        self._requests: dict[str, Request] = {}
        self._next_seed = config.seed
        self._in_flight: deque[Step] = deque()
        self.ranks: Ranks | None = None
        try:
            self._load(model)
        except BaseException as error:
            if self.ranks is None:
                raise
            cause = self._cause(error)
            self.ranks.close()
            if cause is None:
                raise
            raise cause from error

    def _load(self, model: PreTrainedModel | None) -> None:
        """The model, and around it what its size decides."""
        config = self.config
        if model is not None:
            self.weights = ServedWeights(prepare_model(model))
        else:
            if config.tensor_parallel > 1:
                self.ranks = Ranks(config, lambda message: self.fail(ServerError(message)))
                self.weights = ParallelWeights(*load_model(config, self.ranks.group), self.ranks)
            else:
                self.weights = ServedWeights(*load_model(config))
            self.tokenizer = self.tokenizer or load_tokenizer(config.model_path)
        self.model = self.weights.model
        self.shape = shape_of(self.model, config.context_length)
        self.runner: Any = self._make_runner(config)  # None while memory is released
        pool = BlockPool(self.runner.num_blocks, config.block_size)
        self.max_len = min(self.shape.context_length, pool.num_usable * config.block_size)
        slots = SlotTable(config.max_running_requests, self.max_len, config.block_size)
        self.runner.attach(slots)
        self.scheduler = Scheduler(slots, pool, config.max_prefill_tokens, self.max_len)
        self.scheduler.settle = self._settle
        self.post = Postprocessor(slots, self.shape, self.tokenizer)
        if self.ranks is None:  # a rank cannot run its modules alone
            self._try()

    def _try(self) -> None:
        """Generate a little and compare it with the model's own forward pass; leaves no trace."""
        count = min(TRIAL_TOKENS, self.max_len - 1)
        prompt = torch.arange(1, count + 1) * 7919 % self.shape.vocab_size
        params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, sampling_seed=0)
        request = Request(prompt.tolist(), params)
        self._accept(request)
        while not request.future.done():
            self._step()
        self._settle()
        (output,) = request.future.result()
        logprobs = torch.tensor(output.logprobs)
        if logprobs.isfinite().all():  # broken weights are told to whoever asks for tokens
            ids = torch.cat([prompt, torch.tensor(output.token_ids)])
            check_trial(self.model, ids.to(self.model.device), logprobs)
        self.scheduler.forget()
        self.post.generated_tokens = 0

    # ------------------------------------------------------------------------------ calls from other threads

    def close(self) -> None:
        super().close()
        if self.ranks is not None:
            self.ranks.close()

    def check(self, request: Request) -> None:
        """`RequestError` for what `submit` refuses."""
        prompt, vocab = request.prompt, self.shape.vocab_size
        if len(prompt) == 0:
            raise RequestError("the prompt is empty: give at least one token")
        if int(prompt.min()) < 0 or int(prompt.max()) >= vocab:
            bad = int(prompt.min()) if int(prompt.min()) < 0 else int(prompt.max())
            raise RequestError(f"token id {bad} is outside the vocabulary of {vocab}")
        if len(prompt) >= self.max_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, prompt and continuation together may have {self.max_len}: "
                "shorten it, or raise context_length or max_total_tokens"
            )
        request.params.check(vocab)
        if request.want_text and self.tokenizer is None:
            raise RequestError("text or stop strings need a tokenizer, and the model has none")

    def submit(self, request: Request) -> Future[list[SampleOutput]]:
        """Queue a request; an invalid one raises `RequestError` at once and touches nothing."""
        self.check(request)
        self._send(lambda: self._accept(request), request.future)
        return request.future

    def abort(self, rid: str | None = None) -> Future[int]:
        """End the request `rid` (all, if None); it returns what it has. Gives the number of requests ended."""
        return self._call(lambda: self._abort(rid))

    def pause(self, mode: str = "abort") -> Future[int]:
        """Stop between two steps. `abort`: running requests return what they have; `retract`: they stay, and their KV is
        computed anew after `resume`; `in_place`: they stay with their KV. Requests that come meanwhile wait.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"pause mode is {mode!r}; use one of {', '.join(PAUSE_MODES)}")
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self._call(lambda: setattr(self, "paused", False))

    def flush_cache(self) -> Future[bool]:
        """Forget all prefixes; False (and nothing done) while requests are running."""
        return self._call(self._flush)

    def update(self, source: WeightSource, flush_cache: bool = True) -> Future[int]:
        """Load new weights. Generation goes on while this thread reads them; they are swapped in between two steps.

        `flush_cache=False` keeps the KV cache of requests in flight. Returns the number of requests in flight. One
        update at a time: an adapter is merged with the base weights that are in use when it comes into use.
        """
        self._updating.acquire()
        try:
            runner = self._runner_in_use()
            if source.meta is None and not self.adapter_name:
                raise WeightUpdateError("no adapter is loaded: the base weights are in use")
            staged = self.weights.stage(source)
            staged.pairs = runner.stage(staged.pairs)
            future = self._call(lambda: self._swap(staged, source.version, flush_cache, source.adapter_name))
        except BaseException:
            self._updating.release()
            raise
        future.add_done_callback(lambda _: self._updating.release())
        return future

    def release_memory(self) -> Future[None]:
        """Give the device's memory back (KV cache, graphs, weights) until `resume_memory`; running requests wait."""
        return self._call(self._release)

    def resume_memory(self) -> Future[None]:
        return self._call(self._reclaim)

    def set_version(self, version: int) -> Future[None]:
        return self._call(lambda: self._set_version(version))

    def fingerprint(self) -> Future[str]:
        return self._call(self.weights.fingerprint)

    def fingerprints(self) -> Future[Fingerprints]:
        """A cheap fingerprint of each tensor, to be compared after every update; read while generation goes on."""
        if self.ranks is not None:  # other ranks must be asked between the same two steps
            return self._call(self.weights.fingerprints)
        return _BESIDE.submit(self.weights.fingerprints)

    def stats(self) -> dict[str, Any]:
        """Counters for people and routers; read without stopping the loop."""
        scheduler = self.scheduler
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_blocks": scheduler.pool.num_free,
            "total_blocks": scheduler.pool.num_usable,
            "preemptions": scheduler.num_preemptions,
            "prompt_tokens": scheduler.prompt_tokens,
            "cached_tokens": scheduler.cached_tokens,
            "generated_tokens": self.post.generated_tokens,
            "busy_s": self.busy_s,
            "last_update_s": self.last_update_s,
            "uptime_s": time.monotonic() - self._started_s,
            "paused": self.paused,
            "adapter": self.adapter_name,
            "weight_version": str(self.version),
        }

    # ------------------------------------------------------------------------------------------- the loop

    @property
    def _can_step(self) -> bool:
        has_work = self.scheduler.has_work or bool(self._in_flight)
        return has_work and not self.paused and self._home is None

    def _step(self) -> None:
        plan = self.scheduler.schedule()
        if dirty := self.scheduler.pool.take_dirty():
            self.runner.clear_blocks(dirty)
        if plan:
            self._in_flight.append(self.runner.launch(plan))
            self.scheduler.slots.length[plan.slots] += 1
        elif not self._in_flight and self.scheduler.has_work:
            raise RuntimeError("requests are waiting, but none can be admitted into an idle engine")
        while self._in_flight and (not plan or len(self._in_flight) >= self.runner.max_in_flight):
            self._collect()

    def _collect(self) -> None:
        result = self._in_flight.popleft().collect()
        if result is None:
            return
        for seq in self.post.append(result):
            self._finish(seq)

    def _settle(self) -> None:
        """Wait for the steps in flight, so that the host knows every token."""
        while self._in_flight:
            self._collect()

    def _finish(self, seq: Sequence) -> None:
        """Take a sequence out of the engine; answer its request when it was the last one."""
        request = seq.request
        seq.output = self.post.output(seq)
        if seq.slot >= 0:
            if "status_code" in seq.finish_reason:
                self.scheduler.pool.spoil(seq.blocks)
            self.scheduler.release(seq)
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self._requests[request.rid]
            resolve(request.future, [s.output for s in request.sequences])

    # --------------------------------------------------------------------------- actions on the engine's thread

    def _accept(self, request: Request) -> None:
        if request.rid in self._requests:
            error = RequestError(f"request id {request.rid!r} is in use: choose another")
            resolve(request.future, error)
            return
        seed = request.params.sampling_seed
        if seed is None:
            seed, self._next_seed = self._next_seed << 20, self._next_seed + 1
        for seq in request.sequences:
            seq.seed = seed + seq.index
            seq.mark_version(self.version, 0)
        self._requests[request.rid] = request
        self.scheduler.add(request)

    def _abort(self, rid: str | None, message: str = "aborted") -> int:
        self._settle()
        if rid is None:
            requests = list(self._requests.values())
        else:
            requests = [self._requests[rid]] if rid in self._requests else []
        for request in requests:
            self._abort_request(request, message)
        return len(requests)

    def _abort_request(self, request: Request, message: str) -> None:
        self.scheduler.remove_waiting(request)
        for seq in request.sequences:
            if seq.output is None:
                seq.finish_reason = {"type": "abort", "message": message}
                self._finish(seq)

    def _pause(self, mode: str) -> int:
        self._settle()
        self.paused = True
        running = [seq for seq in self.scheduler.slots.sequence if seq is not None]
        requests = {seq.request.rid: seq.request for seq in (*running, *self.scheduler.preempted)}
        if mode == "abort":
            for request in requests.values():
                self._abort_request(request, "paused for a weight update")
        elif mode == "retract":
            self._retract()
        return len(requests)

    def _flush(self) -> bool:
        if self.scheduler.has_work:
            return False
        self.scheduler.pool.flush()
        return True

    def _retract(self) -> None:
        """Send every running sequence back to the queue with the tokens it has."""
        self._settle()
        slots = self.scheduler.slots
        running = [seq for seq in slots.sequence if seq is not None]
        for seq in sorted(running, key=lambda seq: -slots.ticket[seq.slot]):
            self.scheduler.preempt(seq)

    def _release(self) -> None:
        if self._home is not None:
            return
        self._retract()
        self.scheduler.pool.flush()
        self._home = self.runner.device
        self.runner = None
        if self.ranks is not None:
            self.ranks.send("release")
        self.model.to("cpu")
        if self._home.type == "cuda":
            gc.unfreeze()  # the server froze what was there at the start: some of it is garbage now
            gc.collect()
            torch.cuda.empty_cache()

    def _reclaim(self) -> None:
        if self._home is None:
            return
        self.model.to(self._home)
        pool = self.scheduler.pool
        config = replace(self.config, max_total_tokens=pool.num_usable * pool.block_size)
        self.runner = self._make_runner(config)
        self.runner.attach(self.scheduler.slots)
        self._home = None

    def _swap(self, staged: Staged, version: int | None, flush_cache: bool, adapter_name: str) -> int:
        begin = time.perf_counter()
        self._runner_in_use()
        self._settle()
        if staged.adapter is not None and not self.adapter_name:
            self._base_version = self.version
        self.runner.load(staged.pairs)
        self.weights.accept(staged)
        self.adapter_name = adapter_name
        num_met = self.scheduler.num_running
        if flush_cache:  # what is under way keeps its tokens, and has its keys and values computed anew
            self._retract()
            self.scheduler.pool.flush()
        self._set_version(self._base_version if version is None else version)
        self.last_update_s = time.perf_counter() - begin
        return num_met

    def _set_version(self, version: int) -> None:
        self._settle()
        self.version = version
        for request in self._requests.values():
            for seq in request.sequences:
                if seq.output is None:
                    seq.mark_version(version, self.post.num_sampled(seq))

    # ---------------------------------------------------------------------------------------------- helpers

    def _make_runner(self, config: ServerConfig) -> Any:
        runner = make_runner(self.model, self.shape, config)
        return runner if self.ranks is None else ParallelRunner(runner, self.ranks)

    def _runner_in_use(self) -> Any:
        if self.runner is None:
            raise WeightUpdateError("the engine's memory is released: call /resume_memory_occupation first")
        return self.runner

    def _cause(self, error: BaseException) -> BaseException | None:
        lost = self.ranks.lost(wait_s=2.0) if self.ranks else None
        return None if lost is None else ServerError(lost)

    def _take_waiting(self) -> list[Future]:
        requests = list(self._requests.values())  # at once: this may run beside the loop
        self._requests.clear()
        return [request.future for request in requests]
