"""Training rows of sessions: every path from the root of the tree to a leaf is a row.

Tokens of an inner call stand in the rows of all branches behind it. They are trained in the first of these rows only,
and masked from the loss in the others. Returns of calls discount later rewards by turns.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from arealite.agents.session import Reply, Session
from arealite.api.io_struct import ROUTED_EXPERTS, STATS_PREFIX, Batch
from arealite.api.trajectory import join_records
from arealite.api.vision_api import image_columns


def call_returns(session: Session) -> tuple[dict[str, float], float]:
    """Return the return of each call by its id, and that of the whole session.

    A call gets its own reward, and the rewards of all later turns, each multiplied by `turn_discount` once for every
    turn in between. The reward of the session comes with the last turn. The return of the session is that of its first
    turn: with a discount of 1, the sum of all rewards.
    """
    gamma, last = session.turn_discount, session.num_turns
    of_turn = [0.0] * (last + 1)
    for reply in session.replies.values():
        of_turn[reply.turn] += reply.reward
    final = session.final_reward or 0.0
    # What comes behind turn t, seen from t; the session's reward is credited to the calls of the last turn too.
    behind = [0.0] * (last + 1)
    behind[last] = final
    for turn in range(last - 1, -1, -1):
        behind[turn] = gamma * (of_turn[turn + 1] + behind[turn + 1])
    returns = {reply.id: reply.reward + behind[reply.turn] for reply in session.replies.values()}
    return returns, (of_turn[1] + behind[1]) if last else final


def to_batch(sessions: Mapping[int, Session]) -> Batch:
    """Return the rows of the attempts at one task, by number of the attempt, as one padded batch.

    `token_rewards` is there only if calls of a session have different returns.
    """
    rows: list[dict[str, list[Any]]] = []
    columns: dict[str, list[float]] = {"rewards": [], "sample_ids": [], "truncated": []}
    has_turn_rewards = False
    for attempt, session in sessions.items():
        returns, total = call_returns(session)
        has_turn_rewards |= any(value != total for value in returns.values())
        own = _rows(session, returns)
        rows += own
        columns["rewards"] += [total] * len(own)
        columns["sample_ids"] += [attempt] * len(own)
        columns["truncated"] += [row["truncated"][0] for row in own]
        for name, value in session.stats().items():
            columns.setdefault(STATS_PREFIX + name, []).extend([value] * len(own))
    batch = {
        "input_ids": _pad(rows, "input_ids", 0, np.int64),
        "attention_mask": _pad(rows, "attention_mask", 0, np.int64),
        "loss_mask": _pad(rows, "loss_mask", 0, np.int64),
        "logprobs": _pad(rows, "logprobs", 0.0, np.float32),
        "versions": _pad(rows, "versions", -1, np.int64),
    }
    if has_turn_rewards:
        batch["token_rewards"] = _pad(rows, "token_rewards", 0.0, np.float32)
    records = [_joined(row["routed"]) for row in rows]
    if any(record is not None for record in records):
        batch[ROUTED_EXPERTS] = torch.from_numpy(join_records(records, batch["input_ids"].shape[1]))
    batch |= image_columns([row["images"] for row in rows])
    types = {"sample_ids": torch.long, "truncated": torch.bool}
    return batch | {
        name: torch.tensor(values, dtype=types.get(name, torch.float32)) for name, values in columns.items()
    }


def _rows(session: Session, returns: Mapping[str, float]) -> list[dict[str, list[Any]]]:
    """Return the columns of each path from the root to a leaf, in the order of the leaves."""
    parents = {reply.parent for reply in session.replies.values()}
    trained: set[Reply] = set()
    rows = []
    for leaf in session.replies.values():
        # A reply without tokens and without an end cannot be trained.
        if leaf in parents or not any(reply.tokens for reply in leaf.path() if reply not in trained):
            continue
        row: dict[str, list[Any]] = {
            name: [] for name in ("input_ids", "loss_mask", "logprobs", "versions", "token_rewards")
        }
        for reply in leaf.path():
            num, num_sampled = len(reply.observed), len(reply.tokens)
            row["input_ids"] += reply.observed + reply.tokens
            row["loss_mask"] += [0] * num + [int(reply not in trained)] * num_sampled
            row["logprobs"] += [0.0] * num + reply.logprobs
            row["versions"] += [-1] * num + reply.versions
            row["token_rewards"] += [0.0] * num + [returns[reply.id]] * num_sampled
            trained.add(reply)
        row["attention_mask"] = [1] * len(row["input_ids"])
        row["truncated"] = [leaf.truncated]
        row["images"] = leaf.all_images()
        row["routed"] = [reply.routed for reply in leaf.path()]
        rows.append(row)
    return rows


def _joined(records: list[np.ndarray | None]) -> np.ndarray | None:
    known = [record for record in records if record is not None]
    return np.concatenate(known) if known else None


def _pad(rows: list[dict[str, list[Any]]], name: str, value: float, dtype: type) -> torch.Tensor:
    padded = np.full((len(rows), max(len(row["input_ids"]) for row in rows)), value, dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row[name])] = row[name]
    return torch.from_numpy(padded)
