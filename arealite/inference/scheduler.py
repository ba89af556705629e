"""Plans steps: admits and preempts sequences, picks prompt chunks to prefill and slots to decode.

A prefill computes the KV of all tokens but the last; the last one is the input of the first decode step, which
samples. So prefilling never samples, a prompt shared by a group is computed once, and a preempted or continued
sequence starts like any other. The samples of one request fork from the first: they share its full blocks and copy its
last, partial one.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from arealite.inference.drafts.planning import Drafts
from arealite.inference.kv_cache import BlockPool
from arealite.inference.sequence import Request, Sequence
from arealite.inference.slots import SlotTable


@dataclass
class Chunk:
    """Tokens `start .. end` of the sequence in `slot`, to be computed in this step."""

    slot: int
    start: int
    end: int


@dataclass
class StepPlan:
    """One step: prefill `chunks`, then copy blocks (source, target), then decode `slots`."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    has_drafts: bool = False  # the device looks up a draft for each of `slots`

    def __bool__(self) -> bool:
        return bool(self.chunks) or len(self.slots) > 0


class Scheduler:
    """Waiting requests in order of arrival, running sequences in slots, blocks in the pool."""

    def __init__(self, slots: SlotTable, pool: BlockPool, max_prefill_tokens: int, max_len: int, drafts: Drafts):
        self.slots = slots
        self.pool = pool
        self.max_prefill_tokens = max_prefill_tokens
        self.max_len = max_len
        self.drafts = drafts
        self.waiting: deque[Request] = deque()  # requests with samples that have never run
        self.preempted: deque[Sequence] = deque()  # admitted before `waiting`
        self.num_unstarted = 0  # samples of `waiting` that have never run; other threads read it
        self.prefilling: list[Sequence] = []
        self.reset()
        # Collects the steps in flight. Called before a sequence is preempted, so that all its tokens are known.
        self.settle: Callable[[], None] = lambda: None

    def reset(self) -> None:
        """Reset the counters and flush the prefix cache."""
        self.pool.flush()
        self.num_preemptions = self.prompt_tokens = self.cached_tokens = 0
        self.drafts.reset()

    @property
    def num_running(self) -> int:
        return self.slots.num_slots - self.slots.num_free

    @property
    def num_waiting(self) -> int:
        return len(self.preempted) + self.num_unstarted

    @property
    def has_work(self) -> bool:
        return bool(self.num_running or self.waiting or self.preempted)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)
        self.num_unstarted += request.num_unstarted

    def schedule(self) -> StepPlan:
        """Plan the next step; an empty plan if there is nothing to compute."""
        plan = StepPlan()
        self.drafts.begin(self.num_waiting)
        self._grow_decoding()
        budget = self.max_prefill_tokens
        for seq in list(self.prefilling):
            budget -= self._prefill(plan, seq, budget)
        self._admit(plan, budget)
        slots = self.slots
        # The last token of a sequence at its limit is in flight.
        decoding = np.flatnonzero(slots.decoding & (slots.length < slots.limit))
        plan.slots, plan.has_drafts = self.drafts.add(decoding)
        return plan

    def _grow_decoding(self) -> None:
        """Allocate the blocks that decoding sequences need next; preempt the youngest if none is free."""
        slots, size = self.slots, self.pool.block_size
        needy = np.flatnonzero(
            slots.decoding & (slots.length < slots.limit) & ((slots.length - 1) // size >= slots.num_blocks)
        )
        for ticket, slot in sorted(zip(slots.ticket[needy].tolist(), needy.tolist(), strict=True)):
            while self.pool.num_free == 0 and slots.ticket[slot] == ticket:
                self._preempt_youngest()
            if slots.ticket[slot] == ticket:
                block = self.pool.allocate()
                slots.sequence[slot].blocks.append(block)
                slots.add_block(int(slot), block)

    def _preempt_youngest(self) -> None:
        self.settle()
        if self.pool.num_free:  # a step in flight has finished a sequence
            return
        youngest = self.slots.sequence[int(self.slots.ticket.argmax())]
        assert youngest is not None
        self.preempt(youngest)

    def preempt(self, seq: Sequence) -> None:
        """Free the slot and the blocks of a sequence; it will be prefilled again with the tokens it has."""
        slot, slots = seq.slot, self.slots
        start, end = slots.prompt_len[slot], slots.length[slot]
        seq.saved_tokens = slots.tokens[slot, start:end].copy()
        seq.saved_logprobs = slots.logprobs[slot, start:end].copy()
        seq.saved_raw = slots.raw_logprobs[slot, start:end].copy()
        self.release(seq)
        self.preempted.appendleft(seq)
        self.num_preemptions += 1

    def _prefill(self, plan: StepPlan, seq: Sequence, budget: int) -> int:
        """Plan a chunk within the budget; returns its size. The sequence decodes once all is computed."""
        slot = seq.slot
        target = int(self.slots.length[slot]) - 1
        end = min(target, seq.num_computed + budget)
        count = end - seq.num_computed
        if count > 0:
            plan.chunks.append(Chunk(slot, seq.num_computed, end))
            seq.num_computed = end
        if end == target:
            if seq in self.prefilling:
                self.prefilling.remove(seq)
            self.slots.decoding[slot] = True
            self._register(seq, target)
        elif seq not in self.prefilling:
            self.prefilling.append(seq)
        return count

    def _admit(self, plan: StepPlan, budget: int) -> None:
        while self.slots.num_free:
            if self.preempted:
                used = self._start(plan, self.preempted[0], budget)
                if used is None:
                    return
                self.preempted.popleft()
            elif self.waiting:
                request = self.waiting[0]
                source = self._fork_source(request)
                seq = request.sequences[-request.num_unstarted]
                if source is not None:
                    used = self._fork(plan, source, seq)
                elif any(other.request is request for other in self.prefilling):
                    return  # its prompt is still being computed
                else:
                    used = self._start(plan, seq, budget)
                if used is None:
                    return
                request.num_unstarted -= 1
                self.num_unstarted -= 1
                if request.num_unstarted == 0:
                    self.waiting.popleft()
            else:
                return
            budget -= used

    def _fork_source(self, request: Request) -> Sequence | None:
        """A running sample of the request whose prompt is computed; None without one."""
        slots, epoch = self.slots, self.pool.epoch
        running = (seq for seq in request.sequences if seq.slot >= 0)
        return next((s for s in running if slots.decoding[s.slot] and s.pool_epoch == epoch), None)

    def _start(self, plan: StepPlan, seq: Sequence, budget: int) -> int | None:
        """Admit a sequence; returns the prefilled tokens, None if budget or blocks do not suffice now."""
        if budget <= 0:
            return None
        request, pool = seq.request, self.pool
        tokens = request.prompt
        if seq.saved_tokens is not None:
            tokens = np.concatenate([tokens, seq.saved_tokens])
        shared, parent = pool.match(tokens[:-1], request.salt) if seq.uses_prefix_cache else ([], 0)
        missing = -(-len(tokens) // pool.block_size) - len(shared)
        # The reserve keeps the new sequence from being preempted at once; an idle engine needs none.
        if missing + self._reserve() > pool.num_free:
            pool.release(shared)
            return None
        seq.blocks = shared + [pool.allocate() for _ in range(missing)]
        seq.num_registered, seq.cache_parent, seq.pool_epoch = len(shared), parent, pool.epoch
        seq.num_computed = len(shared) * pool.block_size
        self._take_slot(seq)
        if seq.saved_tokens is None:
            seq.cached_tokens = seq.num_computed
            self._count_prompt(seq)
        return self._prefill(plan, seq, budget)

    def _fork(self, plan: StepPlan, source: Sequence, seq: Sequence) -> int | None:
        """Admit another sample of a computed prompt: share its full blocks, copy the partial one."""
        pool = self.pool
        if 1 + self._reserve() > pool.num_free:
            return None
        prompt_len = len(seq.request.prompt)
        num_full, rest = divmod(prompt_len - 1, pool.block_size)
        shared = source.blocks[:num_full]
        pool.share(shared)
        block = pool.allocate()
        if rest:
            plan.copies.append((source.blocks[num_full], block))
        seq.blocks = [*shared, block]
        seq.num_computed = seq.cached_tokens = prompt_len - 1
        seq.num_registered = min(source.num_registered, num_full)
        seq.cache_parent, seq.pool_epoch = source.cache_parent, pool.epoch
        if source.num_registered > num_full:  # the source is past the prompt: search the prompt's node again
            seq.num_registered, seq.cache_parent = 0, 0
        self._take_slot(seq)
        self._count_prompt(seq)
        self.slots.decoding[seq.slot] = True
        return 0

    def _reserve(self) -> int:
        return min(self.num_running, self.pool.num_usable // 16)

    def _take_slot(self, seq: Sequence) -> None:
        limit = len(seq.request.prompt) + seq.request.params.max_new_tokens
        slot = self.slots.take(seq, min(limit, self.max_len))
        self.slots.set_blocks(slot, seq.blocks)

    def _count_prompt(self, seq: Sequence) -> None:
        self.prompt_tokens += len(seq.request.prompt)
        self.cached_tokens += seq.cached_tokens

    def release(self, seq: Sequence) -> None:
        """Free slot and blocks of a sequence; its full blocks stay in the prefix cache."""
        slot = seq.slot
        if self.slots.decoding[slot]:
            self._register(seq, int(self.slots.length[slot]) - 1)
        elif seq in self.prefilling:
            self.prefilling.remove(seq)
        self.pool.release(seq.blocks)
        seq.blocks = []
        seq.num_computed = 0
        self.slots.free(slot)

    def remove_waiting(self, request: Request) -> None:
        """Remove the sequences of a request that are not running."""
        if request.num_unstarted:
            self.waiting.remove(request)
            self.num_unstarted -= request.num_unstarted
            request.num_unstarted = 0
        if any(seq.request is request for seq in self.preempted):
            self.preempted = deque(seq for seq in self.preempted if seq.request is not request)

    def _register(self, seq: Sequence, num_computed: int) -> None:
        """Add full blocks to the prefix cache, unless the weights have changed or a block is spoilt."""
        if seq.pool_epoch != self.pool.epoch or not self.pool.spoilt.isdisjoint(seq.blocks):
            return
        num_full = num_computed // self.pool.block_size
        if num_full > seq.num_registered:
            tokens = self.slots.tokens[seq.slot]
            seq.cache_parent = self.pool.register(
                seq.blocks[:num_full], tokens, seq.num_registered, seq.cache_parent, seq.request.salt
            )
            seq.num_registered = num_full
