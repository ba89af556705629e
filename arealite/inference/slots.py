"""The state of running sequences as arrays with one row ("slot") per sequence.

A step touches no Python object per token. The scheduler fills rows, the runner reads them, postprocessing appends
tokens.

Legend: S slots, M longest sequence, K extra stop ids.
"""

from typing import Any

import numpy as np

from arealite.inference.sequence import MAX_STOP_IDS, Sequence

_MASK = 0xFFFFFFFFFFFFFFFF


class Journal:
    """Slots that have changed since a runner with tables of its own has read them."""

    def __init__(self) -> None:
        self.taken: set[int] = set()  # hold a new sequence
        self.grown: dict[int, int] = {}  # have more blocks, from this one on


class SlotTable:
    """Arrays over slots. Pages of `np.zeros` use memory only once they are written, so M may be large."""

    def __init__(self, num_slots: int, max_len: int, block_size: int):
        self.num_slots, self.max_len = num_slots, max_len
        self.tokens = np.zeros((num_slots, max_len), np.int32)  # [S, M]
        self.logprobs, self.raw_logprobs = np.zeros((2, num_slots, max_len), np.float32)
        self.length = np.zeros(num_slots, np.int64)  # tokens, including those being sampled
        self.limit = np.zeros(num_slots, np.int64)  # the sequence finishes at this length
        # Tokens that are only proposed: they stand in `tokens` from `length` on (see `drafts`).
        self.num_drafts = np.zeros(num_slots, np.int64)
        self.draft_hits = np.zeros(num_slots, np.int64)  # tokens gained by the last draft
        self.min_len = np.zeros(num_slots, np.int64)  # no stop token before this length
        self.block_table = np.zeros((num_slots, -(-max_len // block_size)), np.int32)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.ticket = np.zeros(num_slots, np.int64)  # number of the sequence in the slot; 0: free
        self.temperature, self.top_p, self.repetition = np.ones((3, num_slots), np.float32)
        self.min_p, self.frequency, self.presence = np.zeros((3, num_slots), np.float32)
        self.top_k, self.prompt_len = np.zeros((2, num_slots), np.int64)
        self.seed = np.zeros((num_slots, 2), np.int64)  # two 32-bit halves
        self.stop_ids = np.full((num_slots, MAX_STOP_IDS), -1, np.int32)  # [S, K]
        self.num_stop_ids, self.num_top = np.zeros((2, num_slots), np.int64)
        # What the position of a token in time, height and width is above its index, after the images of the prompt.
        self.rope_delta = np.zeros(num_slots, np.int64)
        self.decoding, self.ignore_eos, self.truncates, self.penalizes = np.zeros((4, num_slots), bool)
        self.biased, self.wants_raw, self.watched, self.constrained = np.zeros((4, num_slots), bool)
        self.sequence: list[Any] = [None] * num_slots  # a Sequence, or None
        self.journal: Journal | None = None  # set by runners with tables of their own
        self._free = list(range(num_slots - 1, -1, -1))
        self._next_ticket = 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_constrained(self) -> bool:
        """Whether a sequence with a grammar decodes."""
        return bool((self.constrained & self.decoding).any())

    def take(self, seq: Sequence, limit: int) -> int:
        """Fill a free row with the tokens and sampling parameters of `seq`; returns its slot."""
        slot = seq.slot = self._free.pop()
        self.sequence[slot] = seq
        self.ticket[slot] = self._next_ticket
        self._next_ticket += 1
        prompt, params = seq.request.prompt, seq.request.params
        length = len(prompt)
        self.tokens[slot, :length] = prompt
        self.prompt_len[slot] = length
        if seq.saved_tokens is not None:
            end = length + len(seq.saved_tokens)
            self.tokens[slot, length:end] = seq.saved_tokens
            self.logprobs[slot, length:end] = seq.saved_logprobs
            self.raw_logprobs[slot, length:end] = seq.saved_raw
            length = end
        self.length[slot] = length
        self.limit[slot] = limit
        self.num_drafts[slot], self.draft_hits[slot] = 0, self.max_len
        self.num_blocks[slot] = 0
        self.decoding[slot] = False
        self.seed[slot] = split_seed(seq.seed)
        self.rope_delta[slot] = 0 if seq.request.images is None else seq.request.images.rope_delta
        self.temperature[slot] = params.temperature
        self.ignore_eos[slot] = params.ignore_eos
        self.min_len[slot] = self.prompt_len[slot] + params.min_new_tokens
        self.truncates[slot] = params.truncates
        self.penalizes[slot] = params.penalizes
        self.biased[slot] = bool(params.logit_bias)
        self.wants_raw[slot] = seq.request.want_raw_logprobs
        self.num_top[slot] = seq.request.num_top_logprobs
        self.constrained[slot] = seq.request.grammar is not None
        if seq.request.grammar is not None and seq.constraint is None:
            seq.constraint = seq.request.grammar.begin()
        self.watched[slot] = seq.request.watched
        self.top_p[slot] = params.top_p
        self.top_k[slot] = max(params.top_k, 0)
        self.min_p[slot] = params.min_p
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self.repetition[slot] = params.repetition_penalty
        count = len(params.stop_token_ids)
        if count or self.num_stop_ids[slot]:
            self.stop_ids[slot] = -1
            self.stop_ids[slot, :count] = params.stop_token_ids
            self.num_stop_ids[slot] = count
        return slot

    def set_blocks(self, slot: int, blocks: list[int]) -> None:
        """Set the block table of a slot that was just taken."""
        self.block_table[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        if self.journal is not None:
            self.journal.taken.add(slot)

    def add_block(self, slot: int, block: int) -> None:
        """Append a block to the block table of a slot."""
        if self.journal is not None:
            self.journal.grown.setdefault(slot, int(self.num_blocks[slot]))
        self.block_table[slot, self.num_blocks[slot]] = block
        self.num_blocks[slot] += 1

    def free(self, slot: int) -> None:
        """Take the sequence out of its slot."""
        self.sequence[slot].slot = -1
        self.sequence[slot] = None
        self.ticket[slot] = 0
        self.decoding[slot] = False
        self._free.append(slot)


def split_seed(seed: int) -> tuple[int, int]:
    """Hash a seed into two 32-bit halves (splitmix64), so that neighbouring seeds are unrelated."""
    x = (seed + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return x & 0xFFFFFFFF, x >> 32
