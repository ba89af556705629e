"""Sends changes of the slot table to the copies that the device has of it. Used by the CUDA runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from arealite.inference.cuda.extras import SamplingExtras


def send_changes(runner: Any) -> None:
    """Send what the `CudaRunner` has not seen: new sequences, and new blocks of others."""
    journal = runner.journal
    if journal.taken:
        _send_taken(runner, np.array(sorted(journal.taken)))
    grown = {slot: first for slot, first in journal.grown.items() if slot not in journal.taken}
    if grown:
        _send_grown(runner, grown)
    if runner.verifier is not None:
        runner.verifier.take(journal.taken, grown)
    journal.taken.clear()
    journal.grown.clear()


def _send_taken(runner: Any, rows: np.ndarray) -> None:
    """Send the state of slots that hold another sequence."""
    slots = runner.slots
    width = int(slots.num_blocks[rows].max())
    at = slots.length[rows] - 1
    head = [
        rows,
        slots.tokens[rows, at],
        at,
        slots.temperature[rows].view(np.int32),
        slots.seed[rows, 0],
        slots.seed[rows, 1],
        slots.top_k[rows],
        slots.top_p[rows].view(np.int32),
        slots.min_p[rows].view(np.int32),
    ]
    state = np.concatenate([np.stack(head, 1), slots.block_table[rows, :width]], 1)
    sent = runner.send(state.astype(np.int64))
    at_row = sent[:, 0]
    runner.last_token[at_row] = sent[:, 1].int()
    runner.position[at_row] = sent[:, 2].int()
    runner.temperature.view(torch.int32)[at_row] = sent[:, 3].int()
    runner.seeds[at_row] = sent[:, 4:6]
    runner.top_k[at_row] = sent[:, 6].int()
    runner.top_p.view(torch.int32)[at_row] = sent[:, 7].int()
    runner.min_p.view(torch.int32)[at_row] = sent[:, 8].int()
    runner.table[at_row, :width] = sent[:, 9:].int()
    _update_extras(runner, rows)
    if runner.images is not None:
        runner.images.take(rows)


def _send_grown(runner: Any, grown: dict[int, int]) -> None:
    """Send new blocks of slots, from the first new one on."""
    slots = runner.slots
    places = [(slot, col) for slot, first in grown.items() for col in range(first, int(slots.num_blocks[slot]))]
    rows, cols = np.array(places).T
    sent = runner.send(np.stack([rows, cols, slots.block_table[rows, cols]]))
    runner.table[sent[0], sent[1]] = sent[2].int()


def _update_extras(runner: Any, rows: np.ndarray) -> None:
    slots = runner.slots
    rows = rows[slots.ticket[rows] > 0]
    asked = slots.penalizes | slots.biased | slots.wants_raw | (slots.min_len > slots.prompt_len)
    if runner.extras is None and asked[rows].any():
        runner.extras = SamplingExtras(slots, runner.shape.vocab_size, runner.shape.eos_ids, runner.device)
    if runner.extras is not None:
        runner.extras.take(rows)
