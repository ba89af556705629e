"""Plans which steps have drafts.

Owned by the scheduler, which calls `begin` and `add` for every step. On CPU the tokens of a step are known before the
next one is planned, so the host looks up a draft for each sequence (`HostDrafts`). On CUDA several steps are in flight,
and the device looks drafts up (`DeviceDrafts`). There the host learns how many tokens a step has made when it collects
the step: until then `slots.length` counts one token of each.
"""

from collections.abc import Callable

import numpy as np

from arealite.inference.drafts.lookup import MAX_SEQUENCES, look_up
from arealite.inference.kv_cache import BlockPool
from arealite.inference.slots import SlotTable

WINDOW = 16  # steps with drafts on CUDA, after which their gain is compared with their cost
MAX_PAUSE = 256  # steps without drafts on CUDA, while drafts do not pay


class Drafts:
    """Plans no drafts: the base of those that do. Counts drafted and accepted tokens."""

    def __init__(self, slots: SlotTable, pool: BlockPool, most: int = 0):
        self.slots, self.pool = slots, pool
        self.most = most  # tokens of a draft
        self.reset()

    def reset(self) -> None:
        """Reset the counters."""
        self.drafted_tokens = self.accepted_tokens = 0

    def begin(self, num_waiting: int) -> None:
        """Prepare for the next step, to which so many waiting sequences may be admitted."""

    def add(self, rows: np.ndarray) -> tuple[np.ndarray, bool]:
        """Plan drafts for the slots `rows`; returns those to decode, and whether the device looks up drafts."""
        return rows, False

    def lengthen(self, rows: np.ndarray) -> None:
        """Count one more token, accepted from its draft, for each of the slots `rows`."""
        self.slots.length[rows] += 1
        self.slots.draft_hits[rows] += 1
        self.accepted_tokens += len(rows)

    def _make_room(self, slot: int, length: int, count: int) -> int:
        """Allocate blocks for the KV of `count` tokens behind `length`; returns how many fit. Never preempts."""
        slots, pool = self.slots, self.pool
        while (room := int(slots.num_blocks[slot]) * pool.block_size - length) < count:
            if pool.num_free <= self._reserve():
                return max(room, 0)
            block = pool.allocate()
            slots.sequence[slot].blocks.append(block)
            slots.add_block(slot, block)
        return count

    def _reserve(self) -> int:
        """Blocks that drafts leave to running sequences."""
        return min(self.slots.num_slots - self.slots.num_free, self.pool.num_usable // 16)


class HostDrafts(Drafts):
    """Writes drafts behind the tokens of sequences. No step is in flight."""

    def add(self, rows: np.ndarray) -> tuple[np.ndarray, bool]:
        slots = self.slots
        slots.num_drafts[rows] = 0
        if len(rows) > MAX_SEQUENCES:
            return rows, False
        for slot in rows.tolist():
            length = int(slots.length[slot])
            # After a miss one token is tried, after a hit twice as many as were right. The last token of a sequence
            # needs no draft: every pass samples one more token than the draft has.
            most = min(self.most, 2 * int(slots.draft_hits[slot]) + 1, int(slots.limit[slot]) - length - 1)
            draft = look_up(slots.tokens[slot, :length], most)
            draft = draft[: self._make_room(slot, length, len(draft))]
            if len(draft):
                slots.tokens[slot, length : length + len(draft)] = draft
                slots.num_drafts[slot], slots.draft_hits[slot] = len(draft), 0
                self.drafted_tokens += len(draft)
        return rows, False


class DeviceDrafts(Drafts):
    """Chooses between steps with and without drafts. Both kinds are never in flight together.

    A step with drafts computes more tokens and takes longer. Drafts are used while they gain more tokens than that:
    after 16 steps that gained less, the next 16 are tried 16 steps later, then 32, and up to 256.
    """

    def __init__(
        self, slots: SlotTable, pool: BlockPool, most: int, settle: Callable[[], None], max_in_flight: int
    ) -> None:
        super().__init__(slots, pool, most)
        self.settle = settle  # collects the steps in flight
        # Tokens that a sequence may have gained by the end of the next step, more than `slots.length` counts.
        self.ahead = max_in_flight * most
        # By how much a step with drafts takes longer, as a share of one without, by the number of sequences.
        self.costs = np.zeros(MAX_SEQUENCES + 1)
        self.active = False
        self._pause, self._next_pause = 0, WINDOW

    def reset(self) -> None:
        super().reset()
        self._num_steps = self._num_tried = self._accepted_before = 0

    def begin(self, num_waiting: int) -> None:
        wanted = self._is_possible(num_waiting) and not self._is_paused()
        if wanted != self.active:
            self.settle()  # so that the host knows all tokens, of which some may have ended their sequences
            self.active = wanted and self._is_possible(num_waiting)
        if self.active:
            self._allocate_ahead(self._decoding())  # before sequences are admitted, which might leave nothing

    def add(self, rows: np.ndarray) -> tuple[np.ndarray, bool]:
        """As the base's. Leaves out sequences that this step cannot compute: the next one has no drafts."""
        if not self.active:
            return rows, False
        rows = self._allocate_ahead(rows[~self._asks_more(rows)])
        self._num_steps += 1
        self._num_tried += len(rows)
        return rows, True

    def _allocate_ahead(self, rows: np.ndarray) -> np.ndarray:
        """Allocate blocks for all tokens that a step may add; returns the slots that have them."""
        slots = self.slots
        counts = np.minimum(self.ahead, slots.limit[rows] - slots.length[rows])
        wanted = zip(rows.tolist(), slots.length[rows].tolist(), counts.tolist(), strict=True)
        has_room = [self._make_room(slot, length, count) == count for slot, length, count in wanted]
        return rows[np.array(has_room, bool)]

    def _is_possible(self, num_waiting: int) -> bool:
        slots, pool = self.slots, self.pool
        num_running = slots.num_slots - slots.num_free
        if num_running + min(slots.num_free, num_waiting) > MAX_SEQUENCES:
            return False
        rows = self._decoding()
        num_blocks = num_running * (self.ahead // pool.block_size + 2)
        return len(rows) > 0 and pool.num_free >= self._reserve() + num_blocks and not self._asks_more(rows).any()

    def _decoding(self) -> np.ndarray:
        return np.flatnonzero(self.slots.decoding & (self.slots.length < self.slots.limit))

    def _is_paused(self) -> bool:
        """Whether drafts do not pay. Called once for each step that could have them."""
        if self._pause:
            self._pause -= 1
            return True
        if self._num_steps < WINDOW:
            return False
        gain = (self.accepted_tokens - self._accepted_before) / max(self._num_tried, 1)
        self._num_steps = self._num_tried = 0
        self._accepted_before = self.accepted_tokens
        if gain > self.costs[len(self._decoding())]:
            self._next_pause = WINDOW
            return False
        self._pause, self._next_pause = self._next_pause - 1, min(2 * self._next_pause, MAX_PAUSE)
        return True

    def _asks_more(self, rows: np.ndarray) -> np.ndarray:
        """Which of the slots `rows` ask for something that a pass with drafts does not compute."""
        slots = self.slots
        asked = slots.penalizes[rows] | slots.biased[rows] | slots.wants_raw[rows] | (slots.num_top[rows] > 0)
        return asked | slots.constrained[rows] | (slots.length[rows] < slots.min_len[rows])
