"""Samples tokens from logits on the CPU, for a whole batch with vectorized operations.

Gumbel-max sampling with noise that is a pure function of (seed, absolute position, token id): a token does not depend
on the rest of the batch, and a continued request draws the tokens of an uninterrupted one. The reported log-prob is
that of softmax(penalized logits / temperature) before top-k, top-p and min-p, which a trainer can recompute; for
greedy requests the temperature counts as 1. Tokens outside a request's grammar have no share in it. The raw log-prob,
on request, is the log-softmax of the model's logits.

Legend: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from arealite.inference.slots import SlotTable

_GOLDEN = 0x9E3779B9
_FINE = 1 << 16
_CACHED = 1 << 16  # numbers that are hashed at once: they fit into the core's cache


@dataclass
class SamplingBatch:
    """Sampling parameters of the rows of one step; None where no row needs a feature."""

    seeds: torch.Tensor  # [B, 2] 32-bit halves in int64
    positions: torch.Tensor  # [B] absolute position of the token to sample
    temperature: torch.Tensor | None = None  # [B]; None: all 1
    greedy: torch.Tensor | None = None  # [B] bool; None: none
    all_greedy: bool = False
    top_k: torch.Tensor | None = None  # the three come together
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    addend: torch.Tensor | None = None  # [B, V] logit bias
    counts: torch.Tensor | None = None  # [B, V] earlier occurrences among sampled tokens
    seen: torch.Tensor | None = None  # [B, V] bool, occurred in prompt or output
    frequency: torch.Tensor | None = None  # [B, 1], with the two below whenever `counts` is given
    presence: torch.Tensor | None = None
    repetition: torch.Tensor | None = None
    banned: torch.Tensor | None = None  # [B, V] bool, tokens that may not be sampled
    forbidden: torch.Tensor | None = None  # [B, V] bool, tokens outside the grammar: they count as impossible
    want_raw: bool = False
    num_top: int = 0  # K


Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Sample tokens [B]; returns them with log-probs [B], and raw log-probs and `top_logprobs` if wanted."""
    logits = logits.float()
    raw = logits
    if batch.counts is not None:
        logits = penalize(logits, batch)
    if batch.addend is not None:
        logits = logits + batch.addend
    if batch.forbidden is not None:
        logits = logits.masked_fill(batch.forbidden, float("-inf"))
    if batch.temperature is not None:
        logits = logits / batch.temperature[:, None]
    scores = logits
    if batch.banned is not None:
        scores = scores.masked_fill(batch.banned, float("-inf"))
    if batch.top_k is not None:
        assert batch.top_p is not None and batch.min_p is not None
        scores = truncate(scores, batch.top_k, batch.top_p, batch.min_p)
    if not batch.all_greedy:
        noise = gumbel_noise(batch.seeds, batch.positions, logits.shape[1])
        if batch.greedy is not None:
            noise.masked_fill_(batch.greedy[:, None], 0.0)
        scores = scores + noise
    tokens = scores.argmax(-1)
    picked = tokens[:, None]
    logprobs = logits.gather(1, picked)[:, 0] - logits.logsumexp(-1)
    top = None
    if batch.num_top:
        allowed = logits if batch.banned is None else logits.masked_fill(batch.banned, float("-inf"))
        top = top_logprobs(allowed, tokens, logprobs, batch.num_top)
    if not batch.want_raw:
        return tokens, logprobs, None, top
    return tokens, logprobs, raw.gather(1, picked)[:, 0] - raw.logsumexp(-1), top


def top_logprobs(scaled: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, count: int) -> torch.Tensor:
    """Return the likeliest tokens and the bits of their log-probs, int32 [B, 2, K].

    `scaled` are logits over temperature without banned tokens. The normalizer, in which those count, follows from the
    log-probs of the sampled tokens. On every device.
    """
    values, ids = scaled.topk(min(count, scaled.shape[1]), dim=-1)
    normalizer = scaled.gather(1, tokens.long()[:, None]) - logprobs[:, None]
    return torch.stack([ids.int(), (values - normalizer).float().view(torch.int32)], 1)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [B, V] as a function of seed, position and token id only.

    The noise is -log(E) with E = -log(1 - v) and v uniform in (0, 1). Large noise comes from small v, so v needs a
    fine resolution near 0: 32 bits of hash, and another 32 bits if those are below `_FINE`. Tokens down to a
    probability of 1e-19 can be drawn.
    """
    halves = seeds.numpy().astype(np.uint32)
    inner = _mix(positions.numpy().astype(np.uint32) + halves[:, 1])
    key, low_key = _mix(halves[:, 0] ^ inner), inner * _GOLDEN + halves[:, 0]
    ids = np.arange(vocab_size, dtype=np.uint32) * _GOLDEN
    noise = torch.empty(len(key), vocab_size)
    uniform, rows = noise.numpy(), max(1, _CACHED // vocab_size)
    for start in range(0, len(key), rows):
        part = slice(start, start + rows)
        bits = _mix(ids ^ key[part, None])
        uniform[part] = bits
        if bits.min() < _FINE:
            row, token = np.nonzero(bits < _FINE)
            low = bits[row, token] * _GOLDEN + low_key[part][row]
            uniform[part][row, token] += (low + 0.5) * 2.0**-32
    # The bound keeps the noise finite: 2^32 - 1 is rounded to 2^32.
    return noise.mul_(-(2.0**-32)).clamp_(min=2.0**-24 - 1).log1p_().neg_().log_().neg_()


def _mix(x: np.ndarray) -> np.ndarray:
    """Murmur3's finalizer, in place, on uint32 (products wrap)."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    x ^= x >> 16
    return x


def penalize(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Repetition (prompt and output), frequency and presence (output only) penalties."""
    assert batch.repetition is not None and batch.seen is not None and batch.counts is not None
    assert batch.frequency is not None and batch.presence is not None
    scaled = torch.where(logits > 0, logits / batch.repetition, logits * batch.repetition)
    logits = torch.where(batch.seen, scaled, logits)
    return logits - batch.frequency * batch.counts - batch.presence * (batch.counts > 0)


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set the logits that top-k, then top-p, then min-p exclude to -inf, never that of the best token."""
    ordered = logits.sort(-1, descending=True).values
    ranks = torch.arange(ordered.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, ordered.shape[1])[:, None]
    probs = ordered.masked_fill(ranks >= limit, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs
    whole = top_p[:, None] >= 1  # rounding must not cut the tail of a row without top-p
    keep = ((before < top_p[:, None]) | whole) & (ranks < limit) & (probs >= min_p[:, None] * probs[:, :1])
    keep[:, 0] = True
    smallest = ordered.masked_fill(~keep, float("inf")).amin(-1, keepdim=True)
    return logits.masked_fill(logits < smallest, float("-inf"))


def make_batch(
    slots: SlotTable, rows: np.ndarray, vocab_size: int, eos_ids: Sequence[int], lengths: np.ndarray | None = None
) -> SamplingBatch:
    """Sampling parameters of the slots `rows`, which sample after their first `lengths` tokens.

    Without `lengths`, after the tokens they have. A sequence with a draft has several rows; their lengths count the
    draft.
    """
    if lengths is None:
        lengths = slots.length[rows]
    batch = SamplingBatch(torch.from_numpy(slots.seed[rows]), torch.from_numpy(lengths))
    temperature = slots.temperature[rows]
    greedy = temperature == 0
    batch.all_greedy = bool(greedy.all())
    if greedy.any():
        batch.greedy = torch.from_numpy(greedy)
        temperature[greedy] = 1.0
    if (temperature != 1).any():
        batch.temperature = torch.from_numpy(temperature)
    if slots.truncates[rows].any():
        batch.top_k = torch.from_numpy(slots.top_k[rows])
        batch.top_p = torch.from_numpy(slots.top_p[rows])
        batch.min_p = torch.from_numpy(slots.min_p[rows])
    if slots.penalizes[rows].any():
        _add_penalties(batch, slots, rows, lengths, vocab_size)
    if slots.biased[rows].any():
        batch.addend = torch.zeros(len(rows), vocab_size)
        for i in np.flatnonzero(slots.biased[rows]):
            for token, bias in slots.sequence[rows[i]].request.params.logit_bias.items():
                batch.addend[i, token] = bias
    early = lengths < slots.min_len[rows]
    if early.any():
        batch.banned = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        for i in np.flatnonzero(early):
            batch.banned[i, [*eos_ids, *slots.sequence[rows[i]].request.params.stop_token_ids]] = True
    if slots.constrained[rows].any():
        batch.forbidden = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
        for i in np.flatnonzero(slots.constrained[rows]):
            draft = slots.tokens[rows[i], slots.length[rows[i]] : lengths[i]].tolist()
            batch.forbidden[i] = torch.from_numpy(slots.sequence[rows[i]].constraint.forbidden(draft))
    batch.want_raw = bool(slots.wants_raw[rows].any())
    batch.num_top = int(slots.num_top[rows].max(initial=0))
    return batch


def _add_penalties(
    batch: SamplingBatch, slots: SlotTable, rows: np.ndarray, lengths: np.ndarray, vocab_size: int
) -> None:
    counts = np.zeros((len(rows), vocab_size), np.float32)
    seen = np.zeros((len(rows), vocab_size), bool)
    for i in np.flatnonzero(slots.penalizes[rows]):
        row, start, end = rows[i], slots.prompt_len[rows[i]], lengths[i]
        counts[i] = np.bincount(slots.tokens[row, start:end], minlength=vocab_size)
        seen[i, slots.tokens[row, :end]] = True
    batch.counts, batch.seen = torch.from_numpy(counts), torch.from_numpy(seen)
    batch.frequency = torch.from_numpy(slots.frequency[rows, None])
    batch.presence = torch.from_numpy(slots.presence[rows, None])
    batch.repetition = torch.from_numpy(slots.repetition[rows, None])
