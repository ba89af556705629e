"""The embedded inference engine: a thread that runs steps, and thread-safe calls to it.

The HTTP server uses it and, in process, the embedded rollout engine. All state is in `EngineCore` and changes on the
engine's thread only: calls from other threads are queued, run between two steps and return futures. Without work the
thread sleeps. If a step fails, all pending futures get the error, later calls raise it, and `failure` stays set.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import RequestError, ServerError, WeightUpdateError
from arealite.inference.core import EngineCore
from arealite.inference.loading import choose_block_size, load_model, load_processor, load_tokenizer, prepare_model
from arealite.inference.ranks import LeaderCore, ParallelWeights, Ranks
from arealite.inference.sequence import Request, SampleOutput, SamplingParams, resolve
from arealite.inference.timing.step_times import StepTimes
from arealite.inference.timing.step_trial import measure_steps
from arealite.inference.vision import PromptImages, read_prompt
from arealite.inference.weights import ServedWeights, WeightSource
from arealite.utils.decoders import TRIAL_TOKENS, check_trial
from arealite.weights.fingerprint import Fingerprints

PAUSE_MODES = ("abort", "retract", "in_place")
# Decoding images takes memory: only a few at once.
_IMAGE_THREADS = ThreadPoolExecutor(2, thread_name_prefix="images")
_FINGERPRINT_THREAD = ThreadPoolExecutor(1, thread_name_prefix="fingerprints")


class Engine:
    """Generates text. `start` it, `submit` requests, `close` it."""

    def __init__(self, config: ServerConfig, model: PreTrainedModel | None = None, tokenizer: Any | None = None):
        config.check()
        config = replace(config, block_size=choose_block_size(config))
        self.config, self.tokenizer = config, tokenizer
        self.ranks: Ranks | None = None
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] = lambda: None  # called when `failure` is set
        self.busy_s = 0.0
        self.step_times, self.trial_times = StepTimes(), StepTimes()
        # When the present step began; None between two steps.
        self._step_began: float | None = None
        self._inbox: deque[tuple[Callable[[], None], Future]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="inference-engine", daemon=True)
        self._started_s, self._started_cpu_s = time.monotonic(), time.process_time()
        # Held from the reading of an update until it is in use.
        self._updating = threading.Lock()
        try:
            self.core = self._make_core(model)
        except BaseException as error:
            if self.ranks is None:
                raise
            cause = self._lost_rank()
            self.ranks.close()
            if cause is None:
                raise
            raise cause from error
        self.weights, self.model = self.core.weights, self.core.weights.model
        self.shape, self.max_len = self.core.shape, self.core.max_len
        self.scheduler, self._is_on_cpu = self.core.scheduler, self.model.device.type == "cpu"
        self.processor = load_processor(config.model_path, self.model.config)
        if self.ranks is None:  # a rank cannot run its modules alone
            self._check_against_model()

    def _make_core(self, model: PreTrainedModel | None) -> EngineCore:
        config = self.config
        if model is not None:
            core = EngineCore(config, ServedWeights(prepare_model(model)), self.tokenizer)
        elif config.tensor_parallel == 1:
            weights = ServedWeights(*load_model(config))
            self.tokenizer = self.tokenizer or load_tokenizer(config.model_path)
            core = EngineCore(config, weights, self.tokenizer)
        else:
            self.ranks = Ranks(config, lambda message: self.fail(ServerError(message)))
            weights = ParallelWeights(*load_model(config, self.ranks.group), self.ranks)
            self.tokenizer = self.tokenizer or load_tokenizer(config.model_path)
            core = LeaderCore(config, weights, self.tokenizer, self.ranks)
        core.attach()
        return core

    def _check_against_model(self) -> None:
        """Compare the log-probs of a few generated tokens with the model's own forward pass. Leaves no state."""
        core = self.core
        count = min(TRIAL_TOKENS, self.max_len - 1)
        prompt = torch.arange(1, count + 1) * 7919 % self.shape.vocab_size
        params = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True, sampling_seed=0)
        request = Request(prompt.tolist(), params)
        core.add(request)
        while not request.future.done():
            core.step()
        core.settle()
        (output,) = request.future.result()
        logprobs = torch.tensor(output.logprobs)
        # Broken weights are reported when a request asks for tokens.
        if logprobs.isfinite().all():
            ids = torch.cat([prompt, torch.tensor(output.token_ids)])
            check_trial(self.model, ids.to(self.model.device), logprobs)
        core.scheduler.reset()
        core.post.generated_tokens = 0

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self.core.version

    @cached_property
    def max_characters(self) -> int:
        """Number of characters above which no text fits into the context.

        A token stands for at most as many characters as its name has. Tokenizers that drop white space or join unknown
        characters take more: they are never held to less than 64 Ki.
        """
        longest = 1 if self.tokenizer is None else max(map(len, self.tokenizer.get_vocab()), default=1)
        return max(1 << 16, self.max_len * longest)

    @property
    def adapter_name(self) -> str:
        """Name of the LoRA adapter in use; empty without one."""
        return self.core.adapter_name

    # ------------------------------------------------------------------------------ calls from other threads

    def start(self, with_trial: bool = False) -> Self:
        """Start the thread. `with_trial` measures decode steps before."""
        if with_trial and self.ranks is None:
            measure_steps(self.core, self.trial_times)
        self._started_cpu_s = time.process_time()
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the loop and the other ranks; unfinished requests fail. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            # After a failure the thread may wait for a dead rank forever.
            self._thread.join(None if self.failure is None else 5.0)
        self._answer_all(ServerError("it was closed"))
        if self.ranks is not None:
            self.ranks.close()

    def fail(self, error: BaseException) -> None:
        """Fail all pending futures and reject later calls."""
        self.failure = error
        self._answer_all(error)
        self.on_failure()

    def check(self, request: Request) -> None:
        """Raise `RequestError` for a request that `submit` would reject."""
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
        if self.processor is not None and request.images is None:
            token = self.processor.image_token_id
            if (prompt == token).any():
                raise RequestError(f"the prompt has image placeholders (token {token}), but no images: send them too")
        if request.want_routing and not self.config.record_routing:
            raise RequestError("return_routed_experts needs a server that records them: start it with record_routing")
        request.params.check(vocab, self.shape.eos_ids)
        if request.grammar is not None:
            self.check_grammar(request.params)
        if request.want_text and self.tokenizer is None:
            raise RequestError("text or stop strings need a tokenizer, and the model has none")

    def check_grammar(self, params: SamplingParams) -> None:
        """Raise `RequestError` if answers cannot be constrained on this device, or with these parameters."""
        if self.ranks is not None:
            raise RequestError("response_format must be text with tensor_parallel > 1: ranks cannot follow a grammar")
        if params.ignore_eos or params.min_new_tokens or params.logit_bias:
            raise RequestError("response_format cannot be combined with ignore_eos, min_tokens or logit_bias")

    def submit(self, request: Request) -> Future[list[SampleOutput]]:
        """Queue a request. Raises `RequestError` at once if it is invalid."""
        self.check(request)
        self._send(lambda: self._add(request), request.future)
        return request.future

    def read_prompt(
        self, prompt: list[int] | str | list[dict[str, Any]], images: list[bytes], **variables: Any
    ) -> Future[tuple[list[int], PromptImages | None]]:
        """Tokenize a prompt with images on another thread (`inference.vision.read_prompt`)."""
        return _IMAGE_THREADS.submit(read_prompt, self.model, self.processor, prompt, images, **variables)

    def abort(self, rid: str | None = None) -> Future[int]:
        """End the request `rid`, or all if None, with the tokens it has; returns the number ended."""
        return self._call(lambda: self.core.abort(rid))

    def abort_request(self, request: Request) -> None:
        """End this very request with the tokens it has; not another one with the same id."""

        def abort() -> None:
            if self.core.requests.get(request.rid) is request:
                self.core.abort(request.rid)

        self._call(abort)

    def pause(self, mode: str = "abort") -> Future[int]:
        """Stop generation between two steps. New requests wait until `resume`.

        `abort`: running requests end with the tokens they have. `retract`: they stay, and their keys and values are
        computed again after `resume`. `in_place`: they stay with their keys and values.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"pause mode is {mode!r}; use one of {', '.join(PAUSE_MODES)}")
        return self._call(lambda: self.core.pause(mode))

    def resume(self) -> Future[None]:
        """Continue after `pause`."""
        return self._call(self.core.resume)

    def flush_cache(self) -> Future[bool]:
        """Forget all cached prefixes; False, and nothing is done, while requests are running or waiting."""
        return self._call(self.core.flush_cache)

    def update(self, source: WeightSource, flush_cache: bool = True) -> Future[int]:
        """Load new weights.

        Generation goes on while this thread reads them; they are swapped in between two steps.

        `flush_cache=False` keeps the KV cache of requests in flight. The prefix cache is emptied either way, unless
        `keep_prefix_across_updates` is set. Returns the number of requests in flight. One update at a time: an adapter
        is merged with the base weights that are in use when it comes into use.
        """
        self._updating.acquire()
        try:
            staged = self.core.stage(source)
            future = self._call(lambda: self.core.swap(staged, source.version, flush_cache, source.adapter_name))
        except BaseException:
            self._updating.release()
            raise
        future.add_done_callback(lambda _: self._updating.release())
        return future

    def release_removed(self) -> None:
        """Release mapped weights of runs that have ended, unless an update is being read."""
        if self._updating.acquire(blocking=False):
            try:
                self._call(self.core.release_removed).add_done_callback(lambda _: self._updating.release())
            except ServerError:
                self._updating.release()

    def release_memory(self) -> Future[None]:
        """Free the memory of KV cache, graphs and weights until `resume_memory`. Running requests wait."""
        return self._call(self.core.release)

    def resume_memory(self) -> Future[None]:
        """Take the device memory back and continue."""
        return self._call(self.core.reclaim)

    def set_version(self, version: int) -> Future[None]:
        """Change the version number of the weights in use."""
        return self._call(lambda: self.core.set_version(version))

    def fingerprint(self) -> Future[str]:
        """A hash of all weights."""
        return self._call(self.weights.fingerprint)

    def fingerprints(self) -> Future[Fingerprints]:
        """Compute a cheap fingerprint of each tensor. Generation goes on meanwhile."""
        if self.ranks is not None:  # the other ranks answer between two steps
            return self._call(self.weights.fingerprints)
        return _FINGERPRINT_THREAD.submit(self.weights.fingerprints)

    def stats(self) -> dict[str, Any]:
        """Counters for people and routers. Does not stop the loop."""
        scheduler, core, drafts = self.scheduler, self.core, self.scheduler.drafts
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "free_blocks": scheduler.pool.num_free,
            "total_blocks": scheduler.pool.num_usable,
            "preemptions": scheduler.num_preemptions,
            "prompt_tokens": scheduler.prompt_tokens,
            "cached_tokens": scheduler.cached_tokens,
            "prefix_hit_rate": scheduler.cached_tokens / max(scheduler.prompt_tokens, 1),
            "generated_tokens": core.post.generated_tokens,
            "drafted_tokens": drafts.drafted_tokens,
            "accepted_tokens": drafts.accepted_tokens,
            "draft_acceptance_rate": drafts.accepted_tokens / max(drafts.drafted_tokens, 1),
            "busy_s": self.busy_s,
            "cpu_s": time.process_time() - self._started_cpu_s if self._is_on_cpu else None,
            "step_times": self.step_times.rows(),
            "trial_times": self.trial_times.rows(),
            "last_update_s": core.last_update_s,
            "uptime_s": time.monotonic() - self._started_s,
            "paused": core.paused,
            "adapter": core.adapter_name,
            "weight_version": str(core.version),
        }

    def status(self) -> dict[str, Any]:
        """Return the counters, and how long the present step and the calls that wait for it have taken."""
        began = self._step_began
        step_s = 0.0 if began is None else time.perf_counter() - began
        queued = {"step_s": round(step_s, 3), "calls": len(self._inbox), "is_updating": self._updating.locked()}
        failure = None if self.failure is None else str(self.failure)[:300]
        return {**self.stats(), **queued, "failure": failure}

    def _send(self, action: Callable[[], None], future: Future) -> None:
        """Run `action`, which resolves `future`, between two steps."""
        with self._wake:
            if self.failure is not None:
                raise ServerError(f"the inference engine has failed: {self.failure!r}")
            if self._closing:
                raise ServerError("the inference engine is closed")
            self._inbox.append((action, future))
            self._wake.notify()

    def _call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run `function` between two steps. The future gets a `WeightUpdateError`; others fail the loop."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # it runs also if the caller gives up

        def act() -> None:
            try:
                resolve(future, function())
            except WeightUpdateError as error:
                resolve(future, error)

        self._send(act, future)
        return future

    def _answer_all(self, error: BaseException) -> None:
        """Fail all queued calls and all unfinished requests."""
        with self._wake:
            futures = [future for _, future in self._inbox]
            self._inbox.clear()
        if hasattr(self, "core"):  # a rank may die while the core is made
            # Copied at once: the loop may be running.
            futures += [request.future for request in list(self.core.requests.values())]
            self.core.requests.clear()
        for future in futures:
            resolve(future, ServerError(f"the inference engine has failed: {error!r}"))

    # -------------------------------------------------------------------------------- on the engine's thread

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._step_began = time.perf_counter()
                if self.core.can_step:
                    self._step()
                self.busy_s += time.perf_counter() - self._step_began
                self._step_began = None
        except BaseException as error:
            cause = self._lost_rank()
            self.fail(cause or error)
            if cause is None:
                raise

    def _step(self) -> None:
        scheduler, post = self.scheduler, self.core.post
        began, cpu_s = time.perf_counter(), time.thread_time()
        tokens, prompts = post.generated_tokens, scheduler.prompt_tokens - scheduler.cached_tokens
        self.core.step()
        tokens, prompts = post.generated_tokens - tokens, scheduler.prompt_tokens - scheduler.cached_tokens - prompts
        seconds, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_s
        self.step_times.add(tokens, max(0, prompts), seconds, cpu_s, self.core.context)

    def _wait_for_work(self) -> bool:
        """Sleep until there is work, then run the queued calls. False: the loop is closing."""
        with self._wake:
            while not (self._inbox or self._closing or self.core.can_step):
                self._wake.wait()
        while self._inbox:
            self._inbox[0][0]()
            self._inbox.popleft()
        return not self._closing

    def _add(self, request: Request) -> None:
        if request.rid in self.core.requests:
            resolve(request.future, RequestError(f"request id {request.rid!r} is in use: choose another"))
        else:
            self.core.add(request)

    def _lost_rank(self) -> ServerError | None:
        """The death of a rank, which may be the cause of an error."""
        message = self.ranks.lost(wait_s=2.0) if self.ranks else None
        return None if message is None else ServerError(message)
