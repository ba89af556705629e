"""Makes and writes the rows of generated and trained answers (`rollouts` and its related tables).

`EpisodeAccounts` passes batches to `RolloutRecorder` after they were trained. Reading tokens as text and compressing
them is done on the ledger's thread: no batch waits for it.
"""

import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from arealite.api.chat import decode_all
from arealite.api.io_struct import IMAGE_FILES, IMAGE_NAMES, STATS_PREFIX, Batch
from arealite.api.vision_api import kept_images
from arealite.core.episode import Episode, EpisodeId
from arealite.core.ledger.images import ImageFolder, image_name
from arealite.core.ledger.reading import MAX_PREVIEW, spaced
from arealite.core.ledger.token_record import TokenRecord, token_bytes
from arealite.utils.data import IMAGE_INDEX, group_rows
from arealite.utils.text import clean

# Rows of a batch; a row costs about 0.1 ms, however short it is.
MAX_ROWS = 128
_TOKEN_COLUMNS = ("input_ids", "attention_mask", "loss_mask", "versions", "logprobs", "train_logp", "advantages")
_ROW_COLUMNS = ("rewards", "truncated", "group_ids", IMAGE_INDEX)
# One row for each set of images.
_SET_COLUMNS = ("num_images", "image_grid_thw", IMAGE_NAMES)
# Newer than every version of the weights.
_NEWEST = 1 << 62


def is_recorded(column: str) -> bool:
    """Whether rows are made of this column of a batch."""
    return column in (*_TOKEN_COLUMNS, *_ROW_COLUMNS, *_SET_COLUMNS) or _is_stat(column)


def _is_stat(column: str) -> bool:
    return column.startswith(STATS_PREFIX)


class RolloutRow(NamedTuple):
    """One row of `rollouts` and its long columns. `record` is None if tokens are not kept."""

    episode: int
    sample: int
    step: int
    reward: float
    oldest_version: int
    newest_version: int
    tokens: int
    prompt: str
    completion: str
    source: str = "stream"
    answer_tokens: int = 0
    turns: int = 1
    images: int = 0
    truncated: bool = False
    parts: dict[str, float] = {}  # noqa: RUF012 - never changed
    record: bytes | None = None
    # Texts of the tokens in `record`, unless they are known from earlier rows.
    vocabulary: tuple[tuple[int, bytes], ...] = ()
    # Hashes of the images that are kept, in order.
    image_names: tuple[int, ...] = ()


def prompt_id(text: str) -> int:
    """Return the id of a prompt: equal texts have equal ids."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big") >> 1


class RolloutRecorder:
    """Makes rows of batches, at most `max_tokens` and `MAX_ROWS` of each, on the ledger's thread."""

    def __init__(self, max_tokens: int, images: ImageFolder | None = None):
        self.max_tokens, self.images = max_tokens, images
        # The last batch that was given to the trainer, which adds columns to it, with its version and tokenizer.
        self._given: tuple[Batch, int] | None = None
        self._tokenizer: Any = None
        # The encoded images of the episodes of that batch.
        self._with_images: list[Batch] = []
        # Tokens whose texts are written. Grows once all rows of a batch are made: if one fails, none is written.
        self._known_tokens: set[int] = set()

    def give(self, batch: Batch, step: int, episodes: list[Episode] | None = None) -> None:
        """Remember the batch that this process trains: `take` reads what the trainer has added to it."""
        for episode in episodes or ():
            # Episodes of a checkpoint have no workflow.
            if episode.workflow is not None:
                self._tokenizer = getattr(episode.workflow, "tokenizer", None)
                break
        self._given = (batch, step) if self.max_tokens else None
        results = [e.result.batch for e in episodes or () if e.result is not None] if self.max_tokens else []
        # Not the pixels: they would stay in memory twice.
        self._with_images = [{key: b[key] for key in (IMAGE_NAMES, IMAGE_FILES)} for b in results if IMAGE_FILES in b]

    def replace(self, share: Batch) -> None:
        """The trainer of this process gets `share` of the last batch only."""
        if self._given is not None:
            self._given = share, self._given[1]

    def take(self) -> Callable[[], Iterator[RolloutRow]] | None:
        """Return a function that makes the rows of the last batch; None if they were taken before."""
        if self._given is None:
            return None
        (batch, step), self._given = self._given, None
        columns = {name: column for name, column in batch.items() if is_recorded(name)}
        tokenizer, with_images, self._with_images = self._tokenizer, self._with_images, []

        def rows() -> Iterator[RolloutRow]:
            known_tokens, used = self._known_tokens.copy(), set[int]()
            chosen = self._choose(columns)
            reader = _BatchReader(columns, [row for *_, row in chosen], tokenizer, known_tokens)
            for index, (owner, sample, _) in enumerate(chosen):
                yield reader.row(owner, sample, index, step)
                used.update(reader.image_names(index))
            self._known_tokens = known_tokens
            self._keep_images(with_images, used)

        return rows

    def _choose(self, columns: Batch) -> list[tuple[EpisodeId, int, int]]:
        """Return episode, sample and row of each answer that is kept.

        Groups are taken from the first one on, those that still fit.
        """
        lengths = np.count_nonzero(_array(columns["attention_mask"]), axis=1).tolist()
        budget, num_rows, chosen = self.max_tokens, 0, []
        for index, group in enumerate(group_rows(columns)):
            group_id = int(columns["group_ids"][group[0]])
            owner = EpisodeId("submitted", -1 - group_id) if group_id < 0 else EpisodeId("stream", group_id)
            num_rows += len(group)
            if index and (sum(lengths[row] for row in group) > budget or num_rows > MAX_ROWS):
                continue
            for sample, row in enumerate(group):
                # The first group may be too large by itself: then a part of it is kept.
                if lengths[row] <= budget or not (index or sample):
                    budget -= lengths[row]
                    chosen.append((owner, sample, row))
        return chosen

    def direct_rows(self, episodes: list[Episode], step: int) -> Callable[[], Iterator[RolloutRow]]:
        """Return a function that makes rows of an evaluation; tokens are kept while there is room."""

        def rows() -> Iterator[RolloutRow]:
            budget, known_tokens = self.max_tokens, self._known_tokens.copy()
            for episode in episodes:
                assert episode.result is not None
                tokenizer = getattr(episode.workflow, "tokenizer", None)
                budget -= episode.result.num_tokens
                samples = list(range(episode.result.num_samples))
                reader = _BatchReader(episode.result.batch, samples, tokenizer, known_tokens, with_tokens=budget >= 0)
                for sample in samples:
                    yield reader.row(episode.id, sample, sample, step)
                self._keep_images([episode.result.batch], None)
            self._known_tokens = known_tokens

        return rows

    def _keep_images(self, batches: list[Batch], used: set[int] | None) -> None:
        """Write the images of batches, only those in `used` if it is given."""
        if self.images is None:
            return
        for batch in batches:
            self.images.keep({n: data for n, data in kept_images(batch).items() if used is None or n in used})


class _BatchReader:
    """Makes rows of `rollouts` of these rows of a padded batch. Columns are read for all of them at once."""

    def __init__(self, batch: Batch, rows: list[int], tokenizer: Any, known_tokens: set[int], with_tokens: bool = True):
        self.tokenizer, self.known_tokens, self.with_tokens = tokenizer, known_tokens, with_tokens
        lengths = np.count_nonzero(_array(batch["attention_mask"])[rows], axis=1)
        self.lengths, longest = lengths.tolist(), int(lengths.max(initial=0))
        self.columns = {key: _array(batch[key])[rows] for key in _ROW_COLUMNS if key in batch}
        tokens = {key: _array(batch[key])[rows, :longest] for key in _TOKEN_COLUMNS if key in batch}
        # Image sets are those of the whole batch.
        self.columns |= {key: _array(batch[key]) for key in _SET_COLUMNS if key in batch}
        self.parts = {k.removeprefix(STATS_PREFIX): v[rows].tolist() for k, v in batch.items() if _is_stat(k)}
        self._read(tokens["input_ids"], tokens["versions"])
        self.records: list[bytes] = []
        if with_tokens:
            ids, mask, versions = tokens["input_ids"], tokens["loss_mask"], tokens["versions"]
            logprobs, train_logp, advantages = tokens["logprobs"], tokens.get("train_logp"), tokens.get("advantages")
            records = TokenRecord(ids, mask, versions, logprobs, train_logp, advantages)
            self.records = records.rows_to_bytes(self.lengths)

    def _read(self, ids: np.ndarray, versions: np.ndarray) -> None:
        """Set prompts, answers, and what versions say about each row."""
        # Padding has version -1, like all that was not generated.
        generated = versions >= 0
        any_generated = generated.any(axis=1)
        starts = np.where(any_generated, generated.argmax(axis=1), self.lengths).tolist()
        self.oldest = np.where(any_generated, np.where(generated, versions, _NEWEST).min(axis=1), -1).tolist()
        self.newest = versions.max(axis=1).tolist()
        self.num_generated = generated.sum(axis=1).tolist()
        self.turns = (generated[:, :1].sum(axis=1) + (generated[:, 1:] & ~generated[:, :-1]).sum(axis=1)).tolist()
        self.ids = [row[:length] for row, length in zip(ids.tolist(), self.lengths, strict=True)]
        cuts = list(zip(self.ids, starts, strict=True))
        self.prompts, self.answers = self._texts([r[:at] for r, at in cuts]), self._texts([r[at:] for r, at in cuts])

    def row(self, owner: EpisodeId, sample: int, row: int, step: int) -> RolloutRow:
        return RolloutRow(
            owner.number,
            sample,
            step,
            float(self.columns["rewards"][row]),
            self.oldest[row],
            self.newest[row],
            self.lengths[row],
            self.prompts[row],
            self.answers[row],
            owner.source,
            self.num_generated[row],
            self.turns[row],
            self._num_images(row),
            bool(self.columns["truncated"][row]) if "truncated" in self.columns else False,
            {name: values[row] for name, values in self.parts.items() if math.isfinite(values[row])},
            self.records[row] if self.with_tokens else None,
            self._new_tokens(self.ids[row]) if self.with_tokens else (),
            self.image_names(row),
        )

    def _texts(self, sequences: list[list[int]]) -> list[str]:
        if self.tokenizer is None:
            return [" ".join(map(str, tokens)) for tokens in sequences]
        return [clean(str(text)) for text in decode_all(self.tokenizer, sequences)]

    def _new_tokens(self, ids: list[int]) -> tuple[tuple[int, bytes], ...]:
        # Numbers must not replace texts that are known, and a later batch may have a tokenizer.
        if self.tokenizer is None:
            return ()
        new = set(ids) - self.known_tokens
        self.known_tokens |= new
        return tuple((token, token_bytes(self.tokenizer, token)) for token in new)

    def _image_set(self, row: int) -> int:
        return int(self.columns[IMAGE_INDEX][row]) if IMAGE_INDEX in self.columns else -1

    def _num_images(self, row: int) -> int:
        if (index := self._image_set(row)) < 0:
            return 0
        if "num_images" in self.columns:
            return int(self.columns["num_images"][index])
        grids = self.columns.get("image_grid_thw")
        return 1 if grids is None else int(np.count_nonzero(grids[index].prod(axis=-1)))

    def image_names(self, row: int) -> tuple[int, ...]:
        if (index := self._image_set(row)) < 0 or IMAGE_NAMES not in self.columns:
            return ()
        return tuple(name for name in self.columns[IMAGE_NAMES][index].tolist() if name)


def _array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.numpy(force=True)


def write_rollouts(db: sqlite3.Connection, rows: list[RolloutRow]) -> None:
    """Write rows, instead of earlier ones of the same samples."""
    if not rows:
        return
    has_search = bool(db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rollout_search'").fetchone())
    for row in rows:
        key = prompt_id(row.prompt)
        is_new = db.execute("INSERT OR IGNORE INTO prompts VALUES (?,?)", (key, row.prompt)).rowcount
        db.execute("DELETE FROM rollouts WHERE source=? AND episode=? AND sample=?", (row.source, *row[:2]))
        numbers = (row.source, *row[:7], row.answer_tokens, row.turns, row.images, row.truncated)
        preview = row.completion[:MAX_PREVIEW]
        new = db.execute(f"INSERT INTO rollouts VALUES (NULL{',?' * 14})", (*numbers, key, preview)).lastrowid
        parts = json.dumps(row.parts)
        db.execute("INSERT INTO rollout_data VALUES (?,?,?,?)", (new, row.completion, parts, row.record))
        db.executemany("INSERT OR REPLACE INTO vocabulary VALUES (?,?)", row.vocabulary)
        if row.image_names:
            names = " ".join(map(image_name, row.image_names))
            db.execute("INSERT INTO rollout_images VALUES (?,?)", (new, names))
        if has_search:
            db.execute("INSERT INTO rollout_search(rowid, text) VALUES (?,?)", (new, spaced(row.completion)))
            if is_new:
                db.execute("INSERT INTO prompt_search(rowid, text) VALUES (?,?)", (key, spaced(row.prompt)))
