"""Steps with drafts on CUDA: samples the next token of each sequence and all tokens of its draft.

Owned by the CUDA runner. The host waits for such a step, since the next draft depends on its tokens. Attention reads
the context of a sequence once for the token and its draft (`runs`), so a step costs about as much as an ordinary one.

Legend: Q sequences at most, N tokens of a pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arealite.inference.cuda import ops as cuda_ops
from arealite.inference.cuda.results import read_result, to_host
from arealite.inference.cuda.runs import choose_tuning, plan_runs
from arealite.inference.drafts import MAX_SEQUENCES
from arealite.inference.runner import StepResult, keep_accepted


class DraftVerifier:
    """Graphs for numbers of tokens, with their inputs and outputs."""

    def __init__(self, runner: Any):
        self.runner = runner  # the CudaRunner that owns it
        self.max_count = runner.config.draft_tokens + 1
        most = MAX_SEQUENCES * self.max_count
        self.sizes = [2**i for i in range(1, most.bit_length()) if 2**i < most] + [most]
        device, vocab = runner.device, runner.shape.vocab_size
        group = runner.group_size
        self.tuning = choose_tuning(runner.cache.data.element_size(), self.max_count * group, runner.shape.head_dim)
        self.logits = torch.zeros(most, vocab, dtype=torch.float32, device=device)
        self.thresholds = torch.full((most,), float("-inf"), device=device)
        self.out = torch.zeros(3, most, dtype=torch.int32, device=device)  # as the runner's
        self.inputs = {n: torch.zeros(3 * n + 2 * MAX_SEQUENCES, dtype=torch.int32, device=device) for n in self.sizes}
        for n in reversed(self.sizes):
            self.inputs[n][n : 2 * n] = runner.slots.num_slots
            runner.graphs.add(("verify", n), lambda n=n: self._layers(n))
            runner.graphs.add(("verify sample", n), lambda n=n: self._sample(n))

    def _split(self, n: int) -> tuple[torch.Tensor, ...]:
        """Ids, rows and positions [N], first token and number of tokens of each sequence [Q]."""
        inputs = self.inputs[n]
        return *inputs[: 3 * n].view(3, n), *inputs[3 * n :].view(2, MAX_SEQUENCES)

    def _layers(self, n: int) -> None:
        runner = self.runner
        ids, rows, positions, first, count = self._split(n)
        num_kv = runner.shape.num_kv_heads
        plan = plan_runs(positions, num_kv, self.tuning, first, count, self.max_count)
        runner.decode(ids, runner.make_batch(rows, positions, plan=plan), self.logits[:n])

    def _sample(self, n: int) -> None:
        runner = self.runner
        _, rows, positions, *_ = self._split(n)
        cuda_ops.sample(
            self.logits[:n], rows, positions, runner.temperature, runner.seeds, self.thresholds[:n],
            self.out[0], self.out.view(torch.float32)[1],
        )  # fmt: skip

    def run(self, slots: np.ndarray) -> StepResult:
        """Sample the next tokens of these slots; returns those that their drafts allow, as a chain."""
        runner, table = self.runner, self.runner.slots
        counts = table.num_drafts[slots] + 1
        total = int(counts.sum())
        n = next(size for size in self.sizes if size >= total)
        data = np.zeros(3 * n + 2 * MAX_SEQUENCES, np.int32)
        ids, rows, positions = data[: 3 * n].reshape(3, n)
        first, count = data[3 * n :].reshape(2, MAX_SEQUENCES)
        rows[:] = table.num_slots
        rows[:total] = np.repeat(slots, counts)
        first[: len(slots)] = np.cumsum(counts) - counts
        count[: len(slots)] = counts
        within = np.arange(total) - np.repeat(first[: len(slots)], counts)
        positions[:total] = table.length[rows[:total]] - 1 + within
        ids[:total] = table.tokens[rows[:total], positions[:total]]
        self.inputs[n].copy_(runner.send(data))
        runner.graphs.run(("verify", n))
        if table.truncates[slots].any():
            limits = runner.temperature, runner.top_k, runner.top_p, runner.min_p
            cuda_ops.find_thresholds(self.logits[:n], self._split(n)[1], *limits, self.thresholds[:n])
        else:
            self.thresholds.fill_(float("-inf"))
        runner.graphs.run(("verify sample", n))
        held = rows[:total].astype(np.int64)
        places = held, table.ticket[held], positions[:total].astype(np.int64) + 1
        out, event = self.out.clone(), None
        if runner.on_gpu:
            out, event = to_host(self.out), torch.cuda.Event(blocking=True)
            event.record(runner.stream)
        return keep_accepted(read_result(places, out, None, event), table)
