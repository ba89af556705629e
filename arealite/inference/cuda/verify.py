"""Steps with drafts on CUDA: look up drafts, sample behind their tokens, keep those that agree.

Owned by the CUDA runner. All of it happens on the device, which has the tokens of the sequences, so such steps are
queued as others are. Attention reads the context of a sequence once for the token and its draft (`runs`), so a step
costs about as much as an ordinary one.

Legend: Q sequences of a graph, W tokens of a sequence in a pass, N = Q * W tokens of a pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from arealite.inference.cuda import draft_kernels as _draft_kernels
from arealite.inference.cuda import ops as cuda_ops
from arealite.inference.cuda.results import read_accepted, to_host
from arealite.inference.cuda.runs import choose_tuning, plan_runs
from arealite.inference.drafts.lookup import MAX_SEQUENCES
from arealite.inference.runner import Step

# Type checkers do not know that a Triton kernel is indexed by its grid.
draft_kernels: Any = _draft_kernels
_MAX_TOKENS = 64  # of a pass: up to here linear layers take the time of reading their weights
_MAX_TILE = 128  # rows of queries that attention holds: tokens of a sequence times query heads of a KV head
_MARGIN = 0.05  # share of a step that drafts must gain besides their measured cost
_MAX_COST = 1.0  # others may use the GPU while costs are measured


class DraftVerifier:
    """Graphs for numbers of sequences, with their inputs and outputs."""

    def __init__(self, runner: Any):
        self.runner = runner  # the CudaRunner that owns it
        device, slots, group = runner.device, runner.slots, runner.group_size
        self.sizes = [q for q in (1, 2, 4, 8) if q < 2 * slots.num_slots]
        most = min(runner.config.draft_tokens + 1, max(2, _MAX_TILE // group))
        self.widths = {q: min(most, _MAX_TOKENS // q) for q in self.sizes}
        ints = partial(torch.zeros, dtype=torch.int32, device=device)
        self.history = ints(MAX_SEQUENCES, slots.max_len)
        self.lines: dict[int, int] = {}  # slots whose tokens are in `history`, and their lines
        self.room = ints(slots.num_slots + 1)  # tokens that the blocks of a slot hold, below its limit
        self.inputs = ints(2, MAX_SEQUENCES)  # slots and lines
        self.inputs[0] = slots.num_slots
        self.sent = np.zeros((2, MAX_SEQUENCES), np.int32)
        self.tokens = ints(3, _MAX_TOKENS)  # ids, rows and positions
        self.groups = ints(2, MAX_SEQUENCES)  # first token and number of tokens of each sequence
        self.logits = torch.zeros(_MAX_TOKENS, runner.shape.vocab_size, dtype=torch.float32, device=device)
        self.thresholds = torch.full((_MAX_TOKENS,), float("-inf"), device=device)
        self.out = ints(5, _MAX_TOKENS)  # tokens, log-probs; per sequence: kept, first position, drafted
        for q in reversed(self.sizes):
            runner.graphs.add(("draft", q), lambda q=q: self._layers(q))
            runner.graphs.add(("accept", q), lambda q=q: self._accept(q))

    def _layers(self, q: int) -> None:
        runner, width = self.runner, self.widths[q]
        (rows, lines), (first, count) = self.inputs[:, :q], self.groups[:, :q]
        ids, token_rows, positions = self.tokens[:, : q * width]
        draft_kernels.draft_kernel[(q,)](
            rows, lines, runner.position, self.room, self.history, self.history.stride(0),
            ids, token_rows, positions, first, count, runner.slots.num_slots,
            W=width, WIDTH=triton.next_power_of_2(width),
            BLOCK=min(4096, triton.next_power_of_2(self.history.shape[1])), num_warps=8,
        )  # fmt: skip
        tuning = choose_tuning(runner.cache_item, width * runner.group_size, runner.shape.head_dim)
        plan = plan_runs(positions, runner.shape.num_kv_heads, tuning, first, count, width)
        runner.decode(ids, runner.make_batch(token_rows, positions, plan=plan), self.logits[: q * width])

    def _accept(self, q: int) -> None:
        runner, width = self.runner, self.widths[q]
        n = q * width
        ids, token_rows, positions = self.tokens[:, :n]
        cuda_ops.sample(
            self.logits[:n], token_rows, positions, runner.temperature, runner.seeds, self.thresholds[:n],
            self.out[0], self.out.view(torch.float32)[1],
        )  # fmt: skip
        draft_kernels.accept_kernel[(q,)](
            self.inputs[1], runner.last_token, runner.position, self.history, self.history.stride(0),
            ids, token_rows, self.groups[1], self.out[0], *self.out[2:], runner.slots.num_slots,
            W=width, WIDTH=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip

    def launch(self, slots: np.ndarray) -> Step:
        """Sample the next tokens of these slots: as many as their drafts allow, and one more."""
        if len(slots) == 0:
            return lambda: None
        runner, table = self.runner, self.runner.slots
        q = next(size for size in self.sizes if size >= len(slots))
        n = q * self.widths[q]
        self._send_slots(slots)
        runner.graphs.run(("draft", q))
        if table.truncates[slots].any():
            limits = runner.temperature, runner.top_k, runner.top_p, runner.min_p
            cuda_ops.find_thresholds(self.logits[:n], self.tokens[1, :n], *limits, self.thresholds[:n])
        else:
            self.thresholds.fill_(float("-inf"))
        runner.graphs.run(("accept", q))
        places = slots, table.ticket[slots]
        if not runner.on_gpu:
            return partial(read_accepted, places, self.widths[q], self.out.clone(), None)
        out, event = to_host(self.out), torch.cuda.Event(blocking=True)
        event.record(runner.stream)
        return partial(read_accepted, places, self.widths[q], out, event)

    def _send_slots(self, slots: np.ndarray) -> None:
        """Send the slots of the next pass, and the tokens of those that the device does not have."""
        table, send = self.runner.slots, self.runner.send
        held = {slot: self.lines[slot] for slot in slots.tolist() if slot in self.lines}
        free = iter(sorted(set(range(MAX_SEQUENCES)) - set(held.values())))
        for slot in slots.tolist():
            if slot not in held:
                # No step of this slot is in flight: the host knows its tokens.
                held[slot], length = next(free), int(table.length[slot])
                self.history[held[slot], :length] = send(table.tokens[slot, :length].copy())
        self.lines = held
        wanted = np.zeros_like(self.sent)
        wanted[0] = table.num_slots
        wanted[:, : len(slots)] = slots, [held[slot] for slot in slots.tolist()]
        if not np.array_equal(wanted, self.sent):
            self.inputs.copy_(send(wanted))
            self.sent = wanted

    def take(self, taken: set[int], grown: dict[int, int]) -> None:
        """Follow changes of the slot table."""
        for slot in taken:
            self.lines.pop(slot, None)
        table, rows = self.runner.slots, np.array(sorted(taken | grown.keys()), np.int64)
        if len(rows):
            room = np.minimum(table.num_blocks[rows] * self.runner.block_size, table.limit[rows] - 1)
            sent = self.runner.send(np.stack([rows, room]))
            self.room[sent[0]] = sent[1].int()

    def measure(self) -> np.ndarray:
        """Return by which share a step takes longer than one without drafts, by the number of sequences."""
        runner = self.runner
        costs = np.zeros(MAX_SEQUENCES + 1)
        for q in reversed(self.sizes):
            b = next(size for size in runner.decode_sizes if size >= min(q, runner.slots.num_slots))
            plain, drafted = (
                runner.graphs.measure([(name, size) for name in names])
                for names, size in ((("layers", "sample"), b), (("draft", "accept"), q))
            )
            costs[: q + 1] = drafted / plain - 1 + _MARGIN
        return np.clip(costs, _MARGIN, _MAX_COST)
