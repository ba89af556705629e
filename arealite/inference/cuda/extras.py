"""Rare sampling features on the device: penalties, logit bias, minimum length, raw log-probs.

Owned by the CUDA runner, which makes it for the first such request. Token counts live on the device, so that no step
waits for the host. The distribution is that of `cpu.sampler.sample`.

Legend: S slots (row S is padding), B rows of a step, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton

from arealite.inference.cuda import sample_kernels as _sample_kernels
from arealite.inference.sequence import MAX_BIAS, MAX_STOP_IDS
from arealite.inference.slots import SlotTable

# Type checkers do not know that a Triton kernel is indexed by its grid.
sample_kernels: Any = _sample_kernels
_PARTS = 16
_BLOCK = 2048
_IN_PROMPT = sample_kernels.IN_PROMPT.value


class SamplingExtras:
    """Tables over slots, and the kernels that run before and after the sampling graph."""

    def __init__(self, slots: SlotTable, vocab_size: int, eos_ids: tuple[int, ...], device: torch.device):
        self.slots, self.vocab_size, self.eos_ids, self.device = slots, vocab_size, eos_ids, device
        rows = slots.num_slots + 1
        self.most_banned = triton.next_power_of_2(MAX_STOP_IDS + len(eos_ids))

        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.flags = zeros(rows)
        self.codes = zeros(rows, vocab_size, dtype=torch.int16)  # bit 14: in the prompt; below: count
        self.penalties = torch.ones(rows, 3, device=device)  # repetition, frequency, presence
        self.num_bias, self.min_len, self.num_banned = zeros(rows), zeros(rows), zeros(rows)
        self.bias_ids = zeros(rows, MAX_BIAS)
        self.bias = zeros(rows, MAX_BIAS, dtype=torch.float32)
        self.banned = zeros(rows, self.most_banned)
        self.held = zeros(slots.num_slots, dtype=torch.float32)
        self.peak, self.total = zeros(2, slots.num_slots, _PARTS, dtype=torch.float32)

    def take(self, taken: np.ndarray) -> None:
        """Copy the parameters of the requests in the slots `taken` to the device."""
        slots = self.slots
        at = torch.from_numpy(taken).to(self.device)
        flags = slots.penalizes[taken] + 2 * slots.wants_raw[taken].astype(np.int32)
        penalties = np.stack([slots.repetition, slots.frequency, slots.presence], 1)[taken]
        self.flags[at] = self._to_device(flags.astype(np.int32))
        self.penalties[at] = self._to_device(penalties)
        self.min_len[at] = self._to_device(slots.min_len[taken].astype(np.int32))
        self.num_bias[at] = 0
        asking = slots.penalizes | slots.biased | (slots.min_len > slots.prompt_len)
        for row in taken[asking[taken]]:
            params = slots.sequence[row].request.params
            if slots.penalizes[row]:
                self.codes[row] = self._to_device(self._count(row))
            if params.min_new_tokens:
                banned = sorted({*self.eos_ids, *params.stop_token_ids})
                self.banned[row, : len(banned)] = self._to_device(np.array(banned, np.int32))
                self.num_banned[row] = len(banned)
            if params.logit_bias:
                count = len(params.logit_bias)
                ids = np.fromiter(params.logit_bias, np.int32, count)
                values = np.fromiter(params.logit_bias.values(), np.float32, count)
                self.bias_ids[row, :count] = self._to_device(ids)
                self.bias[row, :count] = self._to_device(values)
                self.num_bias[row] = count

    def _count(self, row: int) -> np.ndarray:
        """Codes [V] of the tokens in the sequence of `row`."""
        tokens, start, end = (self.slots.tokens[row], self.slots.prompt_len[row], self.slots.length[row])
        codes = np.bincount(tokens[start:end], minlength=self.vocab_size).clip(max=_IN_PROMPT - 1)
        codes[tokens[:start]] |= _IN_PROMPT
        return codes.astype(np.int16)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def adjust(
        self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, temperature: torch.Tensor
    ) -> None:
        """Apply penalties, bias and bans to logits [B, V]."""
        b, vocab = logits.shape
        block = min(_BLOCK, triton.next_power_of_2(vocab))
        part_size = triton.cdiv(triton.cdiv(vocab, _PARTS), block) * block
        sample_kernels.penalty_kernel[(b, _PARTS)](
            logits, rows, self.flags, self.codes, self.penalties, self.peak, self.total, vocab, part_size,
            PARTS=_PARTS, BLOCK=block, num_warps=8,
        )  # fmt: skip
        sample_kernels.bias_kernel[(b,)](
            logits, rows, self.num_bias, self.bias_ids, self.bias, vocab, MOST=MAX_BIAS, BLOCK=128
        )
        sample_kernels.ban_kernel[(b,)](
            logits, rows, positions, temperature, self.min_len, self.num_banned, self.banned, self.held, vocab,
            MOST=self.most_banned, num_warps=1,
        )  # fmt: skip

    def finish(self, logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, out: torch.Tensor) -> None:
        """Complete `out` (token, log-prob, raw log-prob) of the rows just sampled, and count their tokens."""
        floats = out.view(torch.float32)
        sample_kernels.finish_extras_kernel[(logits.shape[0],)](
            logits, rows, temperature, self.flags, self.codes, self.penalties, self.num_bias, self.bias_ids,
            self.bias, self.held, self.peak, self.total, out[0], floats[1], floats[2], self.vocab_size,
            PARTS=_PARTS, MOST=MAX_BIAS, BLOCK=128, num_warps=1,
        )  # fmt: skip
