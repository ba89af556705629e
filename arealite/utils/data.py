"""Operations on batches (dictionaries of tensors): join, select, pack, split by tokens.

Used by engines, the executor and workflows. Padded form: `[B, T]`, right-padded, with `attention_mask`. Packed form:
`[N]` with `cu_seqlens [B + 1]`, `max_seqlen` and `position_ids [N]`; values per sequence stay `[B]`. `unpack` reverses
`pack`.

B sequences, T padded length, N packed tokens.
"""

import heapq
from functools import reduce

import torch

from arealite.api.errors import ConfigError
from arealite.api.io_struct import IMAGE_FILES, IMAGE_INDEX, IMAGE_NAMES, NO_EXPERT, ROUTED_EXPERTS, STATS_PREFIX, Batch

# Image inputs, one entry per image set: the images of one prompt. `image_index [B]` has the set of each row, -1 for
# none, so that the answers to one prompt share its images. Dimension 1 counts images or patches, never tokens.
VISION_KEYS = ("pixel_values", "image_grid_thw", "num_images", IMAGE_NAMES, IMAGE_FILES)


def seq_lengths(batch: Batch) -> torch.Tensor:
    """Return the number of tokens of each sequence without padding, `[B]`."""
    return batch["attention_mask"].sum(dim=1)


def num_rows(batch: Batch) -> int:
    return batch["attention_mask"].shape[0]


def sample_ids(batch: Batch) -> torch.Tensor:
    """Return the sample that each row belongs to, `[B]`; without the column, every row is a sample."""
    own = batch.get("sample_ids")
    return torch.arange(num_rows(batch), device=batch["attention_mask"].device) if own is None else own


def sample_rewards(batch: Batch) -> list[float]:
    """Return the reward of each sample; rows of one sample have the same reward."""
    rewards = batch["rewards"].tolist()
    if "sample_ids" not in batch:
        return rewards
    return list(dict(zip(batch["sample_ids"].tolist(), rewards, strict=True)).values())


def with_sample_columns(batches: list[Batch]) -> list[Batch]:
    """Give all batches the optional columns that one of them has, so that they join.

    A row without them is a sample of its own, whose tokens all have its reward, and no recorded experts.
    """
    names = ("sample_ids", "token_rewards", ROUTED_EXPERTS)
    columns = [key for key in names if any(key in batch for batch in batches)]

    def fill(batch: Batch, key: str) -> torch.Tensor:
        if key == "sample_ids":
            return sample_ids(batch)
        if key == ROUTED_EXPERTS:
            known = next(other[key] for other in batches if key in other)
            return known.new_full((*batch["attention_mask"].shape, known.shape[2]), padding(key, known))
        return batch["rewards"].float()[:, None] * batch["attention_mask"]

    return [batch | {key: fill(batch, key) for key in columns if key not in batch} for batch in batches]


def is_per_token(batch: Batch, key: str) -> bool:
    """Return whether `key` of a padded batch has one entry per token, not one per sequence."""
    value = batch[key]
    shaped = value.dim() >= 2 and value.shape[:2] == batch["attention_mask"].shape
    return shaped and key not in VISION_KEYS


def padding(key: str, column: torch.Tensor) -> int:
    """Return the value of a column on tokens that are padding: 0, or what means that there is none."""
    if key == ROUTED_EXPERTS:
        return NO_EXPERT[str(column.dtype).removeprefix("torch.")]
    return -1 if key == "versions" else 0


def concat_padded(batches: list[Batch]) -> Batch:
    """Concatenate padded batches, padding each on the right to the longest (`padding`).

    All must have the same keys: a missing key would shift the rows of that key.
    Only those of images may be missing, in batches without any, and statistics of workflows, which are NaN then.
    """
    if not batches:
        raise ValueError("concat_padded needs at least one batch")
    if any(other.keys() != batches[0].keys() for other in batches):
        batches = _with_all_stats(batches)
    with_images = [batch for batch in batches if IMAGE_INDEX in batch]
    keys = [batch.keys() - ({*VISION_KEYS, IMAGE_INDEX} if with_images else set()) for batch in batches]
    for other in keys[1:]:
        if other != keys[0]:
            raise ValueError(f"batches have different keys: {sorted(keys[0] ^ other)} are not in all of them")
    joined = {}
    for key in (key for key in batches[0] if key in keys[0]):
        parts = [b[key] for b in batches]
        is_padded = is_per_token(batches[0], key) or (key in VISION_KEYS and parts[0].dim() > 1)
        joined[key] = _concat_padded(parts, padding(key, parts[0])) if is_padded else torch.cat(parts)
    return joined | _concat_images(batches, with_images)


def _concat_padded(parts: list[torch.Tensor], fill: float = 0) -> torch.Tensor:
    longest, rows = max(part.shape[1] for part in parts), [len(part) for part in parts]
    dtype = reduce(torch.promote_types, {part.dtype for part in parts})
    joined = parts[0].new_full((sum(rows), longest, *parts[0].shape[2:]), fill, dtype=dtype)
    for place, part in zip(joined.split(rows), parts, strict=True):
        place[:, : part.shape[1]] = part
    return joined


def _concat_images(batches: list[Batch], with_images: list[Batch]) -> Batch:
    """Join the image sets of all batches, and renumber the sets of their rows."""
    if not with_images:
        return {}
    columns = [key for key in VISION_KEYS if key in with_images[0]]
    for other in with_images[1:]:
        others = [key for key in VISION_KEYS if key in other]
        if others != columns:
            raise ValueError(f"batches have different image inputs: {columns} and {others}")
    joined = {}
    for key in columns:
        parts = [batch[key] for batch in with_images]
        joined[key] = torch.cat(parts) if parts[0].dim() == 1 else _concat_padded(parts)
    index, num_sets = [], 0
    for batch in batches:
        own = batch.get(IMAGE_INDEX)
        if own is None:
            own = torch.full((num_rows(batch),), -1)
        index.append(torch.where(own < 0, own, own + num_sets))
        num_sets += len(batch[columns[0]]) if IMAGE_INDEX in batch else 0
    return joined | {IMAGE_INDEX: torch.cat(index)}


def _with_all_stats(batches: list[Batch]) -> list[Batch]:
    names = dict.fromkeys(key for batch in batches for key in batch if key.startswith(STATS_PREFIX))
    missing = [{name: torch.full((num_rows(b),), torch.nan) for name in names if name not in b} for b in batches]
    return [batch | own for batch, own in zip(batches, missing, strict=True)]


def stats_means(batch: Batch) -> dict[str, float]:
    """Return `rollout/NAME`, the mean over the rows that report it, for each statistic of workflows."""
    columns = {key: batch[key] for key in sorted(batch) if key.startswith(STATS_PREFIX)}
    known = {key: column[column.isfinite()] for key, column in columns.items()}
    return {
        f"rollout/{key.removeprefix(STATS_PREFIX)}": values.mean().item()
        for key, values in known.items()
        if len(values)
    }


def select_rows(batch: Batch, rows: list[int] | torch.Tensor) -> Batch:
    """Return these rows of a padded batch in that order, without padding and images not needed."""
    index = torch.as_tensor(rows, dtype=torch.long)
    mask = batch["attention_mask"][index]
    length = int(mask.sum(dim=1).max()) if len(index) else 0
    chosen = {}
    for key, value in batch.items():
        if IMAGE_INDEX in batch and key in VISION_KEYS:
            continue
        picked = value[index.to(value.device)]
        chosen[key] = picked[:, :length] if is_per_token(batch, key) else picked
    if IMAGE_INDEX in batch:
        own = chosen[IMAGE_INDEX]
        used = own[own >= 0].unique()
        chosen[IMAGE_INDEX] = torch.where(own < 0, own, torch.searchsorted(used, own))
        chosen |= {key: batch[key][used] for key in VISION_KEYS if key in batch}
    return chosen


def pack(batch: Batch, rows: list[int] | None = None) -> Batch:
    """Drop the padding of a batch, or of these rows of it, and concatenate the tokens of all sequences."""
    device, each = batch["attention_mask"].device, slice(None) if rows is None else rows
    chosen = torch.arange(num_rows(batch), device=device)[each]
    mask = batch["attention_mask"][chosen].bool()
    lengths = mask.sum(dim=1)
    row, token = mask.nonzero(as_tuple=True)
    index = chosen[row] * mask.shape[1] + token
    packed = {
        key: value.flatten(0, 1).index_select(0, index) if is_per_token(batch, key) else value[each]
        for key, value in batch.items()
        if key != "attention_mask"
    }
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    cu_seqlens[1:] = lengths.cumsum(0)
    starts = cu_seqlens[:-1].repeat_interleave(lengths)
    packed["position_ids"] = torch.arange(len(index), device=device) - starts
    packed["cu_seqlens"] = cu_seqlens
    packed["max_seqlen"] = lengths.max() if len(lengths) else lengths.new_zeros(())
    return packed


def unpack(values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Turn packed `[N, ...]` into padded `[B, T, ...]` with zeros on padding."""
    padded = values.new_zeros(*attention_mask.shape, *values.shape[1:])
    padded[attention_mask.bool()] = values
    return padded


def trained_tokens(mb: Batch) -> torch.Tensor:
    """Return the mask `[N]` of the trained tokens of a packed batch; first tokens have no prediction."""
    return mb["loss_mask"].bool() & (mb["position_ids"] > 0)


def num_trained_tokens(mb: Batch) -> torch.Tensor:
    return trained_tokens(mb).sum()


def sequence_sums(values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Sum packed `values [N]` over each sequence, `[B]`; differentiable."""
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence_of_token(cu_seqlens), values)


def sequence_of_token(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the sequence that each packed token belongs to, `[N]`."""
    lengths = cu_seqlens.diff().long()
    return torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths)


def split_micro_batches(lengths: list[int], max_tokens: int, min_count: int = 1) -> list[list[int]]:
    """Group rows into at least `min_count` groups of at most `max_tokens`, equal if possible.

    A sequence longer than that gets a group of its own. Rows ascend within a group. With fewer rows than `min_count`,
    the last groups are empty.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    room: list[int] = []
    for row in order:
        for g, free in enumerate(room):
            if lengths[row] <= free:
                groups[g].append(row)
                room[g] -= lengths[row]
                break
        else:
            groups.append([row])
            room.append(max_tokens - lengths[row])
    # First-fit leaves a small last group. Equal groups use the device better, and fewer shapes are compiled.
    balanced = partition_balanced(lengths, max(len(groups), min_count))
    fits = all(sum(lengths[row] for row in group) <= max_tokens for group in balanced)
    return balanced if fits or len(groups) < min_count else [sorted(group) for group in groups]


def partition_balanced(lengths: list[int], parts: int) -> list[list[int]]:
    """Partition rows into `parts` groups of nearly equal tokens, longest first.

    Deterministic; rows ascend within a group. Every group gets a row if there are at least `parts` rows.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # Ties go to the group with fewer rows, so that rows of length zero are spread too.
    heap = [(0, 0, g) for g in range(parts)]
    groups: list[list[int]] = [[] for _ in range(parts)]
    for row in order:
        tokens, count, g = heapq.heappop(heap)
        groups[g].append(row)
        heapq.heappush(heap, (tokens + lengths[row], count + 1, g))
    return [sorted(group) for group in groups]


def split_groups(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into `parts` of nearly equal tokens; the rows of a group stay together."""
    groups = group_rows(batch)
    if len(groups) < parts:
        raise ConfigError(
            f"a batch of {len(groups)} groups cannot be split over {parts} ranks: each needs one. Raise "
            f"train_dataset.batch_size (for an evaluation, the rows of valid_dataset) to at least {parts}"
        )
    return [select_rows(batch, rows) for rows in _partition_groups(batch, groups, parts)]


def split_minibatches(batch: Batch, parts: int) -> list[list[int]]:
    """Return the rows of `parts` minibatches with nearly equal tokens and groups with a signal.

    The rows of a group stay together, so that they can share their prompt. With fewer groups with a signal than parts,
    they do not, because that would leave a minibatch without a gradient.
    """
    active = (batch["advantages"] != 0).any(dim=1).tolist()
    groups = group_rows(batch)
    with_signal = [rows for rows in groups if any(active[row] for row in rows)]
    if len(with_signal) < parts:
        return partition_balanced(seq_lengths(batch).tolist(), parts)
    idle = [rows for rows in groups if not any(active[row] for row in rows)]
    shares = _partition_groups(batch, with_signal, parts), _partition_groups(batch, idle, parts)
    # The part that got the longest group with a signal gets the shortest of the others.
    return [first + second for first, second in zip(shares[0], reversed(shares[1]), strict=True)]


def group_rows(batch: Batch) -> list[list[int]]:
    """Return the rows of each group, in the order of their first rows."""
    rows_of: dict[int, list[int]] = {}
    for row, group in enumerate(batch["group_ids"].tolist()):
        rows_of.setdefault(group, []).append(row)
    return list(rows_of.values())


def _partition_groups(batch: Batch, groups: list[list[int]], parts: int) -> list[list[int]]:
    lengths = seq_lengths(batch).tolist()
    shares = partition_balanced([sum(lengths[row] for row in rows) for rows in groups], parts)
    return [[row for group in share for row in groups[group]] for share in shares]
