"""Reads `run.sqlite`, also of a run that goes on: rollouts, ages, episodes, servers, events.

Used by reports and the dashboard. It imports neither torch nor transformers. Functions take a connection of
`open_ledger` and return plain values; the format of the tables is known here and where they are written.
"""

import json
import re
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arealite.core.ledger.token_record import TokenRecord, join_token_texts, token_bytes

SORTS = ("step", "reward", "tokens", "answer_tokens", "turns", "images", "episode", "oldest_version", "newest_version")
_ROLLOUT_COLUMNS = (
    "source", "episode", "sample", "step", "reward", "oldest_version", "newest_version", "tokens", "answer_tokens",
    "turns", "images", "truncated",
)  # fmt: skip
_COLUMNS = ", ".join(f"r.{name}" for name in _ROLLOUT_COLUMNS)
MAX_PREVIEW = 200
# How the chat templates of most models begin a message; the second group is the role.
_MESSAGE_START = re.compile(
    r"(<\|im_start\|>|<start_of_turn>)([a-z_]+)\n|(<\|start_header_id\|>)([a-z_]+)<\|end_header_id\|>\n*"
)
_MESSAGE_END = re.compile(r"(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end_of_text\|>|<\|endoftext\|>)\s*$")
# Scripts without spaces between words.
_WITHOUT_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def spaced(text: str) -> str:
    """Return the text as the index of words gets it: characters of scripts without spaces are words."""
    return _WITHOUT_SPACES.sub(r" \g<0> ", text)


def match_phrase(text: str) -> str:
    """Return the query that finds a text in the index of words; its last word may be incomplete."""
    return '"{}"*'.format(spaced(text).strip().replace('"', '""'))


def phrase_finder(text: str) -> Callable[[str], bool]:
    """Return a function that says of a text whether `match_phrase` would find it, but for accents.

    Without a word, the characters themselves are looked for.
    """
    words = [re.escape(word) for word in re.findall(r"[^\W_]+", spaced(text))]
    phrase = r"(?<![^\W_])" + r"[\W_]+".join(words) if words else re.escape(text.strip())
    pattern = re.compile(phrase, re.IGNORECASE)
    prepare = spaced if _WITHOUT_SPACES.search(text) else str
    return lambda candidate: pattern.search(prepare(candidate)) is not None


def open_ledger(path: str | Path) -> sqlite3.Connection:
    """Open `run.sqlite` for reading; raises `sqlite3.Error` if there is none.

    In a file of WAL mode without a log beside it nobody writes: then no file is made beside it for locks either.
    """
    path = Path(path).absolute()
    is_closed = not path.with_name(f"{path.name}-wal").exists() and _is_in_wal_mode(path)
    uri = f"{path.as_uri()}?mode=ro" + ("&immutable=1" if is_closed else "")
    return sqlite3.connect(uri, uri=True, timeout=5.0, check_same_thread=False)


def _is_in_wal_mode(path: Path) -> bool:
    """Return whether the header of a database says so."""
    # On file systems without shared memory, a run writes without a log.
    try:
        with path.open("rb") as file:
            return file.read(20)[18:] == b"\x02\x02"
    except OSError:
        return False


class RolloutFilter(NamedTuple):
    """Which rollouts are wanted.

    `text` is a sequence of words in the completion or the prompt; the last one may be incomplete.
    """

    text: str = ""
    source: str | None = None
    state: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    step_from: int | None = None
    step_to: int | None = None


def find_rollouts(
    db: sqlite3.Connection,
    where: RolloutFilter = RolloutFilter(),  # noqa: B008 - immutable
    sort: str = "step",
    desc: bool = True,
    offset: int = 0,
    limit: int = 100,
) -> tuple[int, list[dict[str, Any]]]:
    """Return how many rollouts there are, and `limit` of them with the beginnings of their texts."""
    if sort not in SORTS:
        raise ValueError(f"rollouts cannot be sorted by {sort!r}: use one of {', '.join(SORTS)}")
    condition, values = _condition(db, where)
    order = "DESC" if desc else "ASC"
    # The index has all columns that conditions and orders name: no row is read that is not shown.
    found = db.execute(
        f"SELECT r.id FROM rollouts r INDEXED BY rollouts_numbers WHERE {condition} ORDER BY r.{sort} {order}, "
        f"r.id {order}",
        values,
    ).fetchall()
    query = (
        f"SELECT {_COLUMNS}, substr(p.text, 1, {MAX_PREVIEW}), r.preview FROM rollouts r JOIN prompts p ON "
        "p.id = r.prompt WHERE r.id = ?"
    )
    rows = [db.execute(query, chosen).fetchone() for chosen in found[offset : offset + limit]]
    # The run may have deleted one since.
    return len(found), [_rollout_row(row) for row in rows if row is not None]


def _condition(db: sqlite3.Connection, where: RolloutFilter) -> tuple[str, list[Any]]:
    terms = {
        "r.source = ?": where.source,
        "r.reward >= ?": where.min_reward,
        "r.reward <= ?": where.max_reward,
        "r.tokens >= ?": where.min_tokens,
        "r.tokens <= ?": where.max_tokens,
        "r.step >= ?": where.step_from,
        "r.step <= ?": where.step_to,
        "EXISTS (SELECT 1 FROM episodes e WHERE e.source = r.source AND e.id = r.episode AND e.state = ?)": where.state,
    }
    chosen = {term: value for term, value in terms.items() if value is not None}
    conditions, values = list(chosen), list(chosen.values())
    if where.text.strip():
        term, texts = _text_condition(db, where.text.strip())
        conditions.append(term)
        values += texts
    return " AND ".join(conditions) or "1", values


def _text_condition(db: sqlite3.Connection, text: str) -> tuple[str, list[str]]:
    has_index = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rollout_search'").fetchone()
    if has_index and re.search(r"\w", text):
        phrase = match_phrase(text)
        term = (
            "(r.id IN (SELECT rowid FROM rollout_search WHERE rollout_search MATCH ?) OR "
            "r.prompt IN (SELECT rowid FROM prompt_search WHERE prompt_search MATCH ?))"
        )
        return term, [phrase, phrase]
    pattern = "%{}%".format(re.sub(r"([%_\\])", r"\\\1", text))
    term = (
        "(r.id IN (SELECT id FROM rollout_data WHERE completion LIKE ? ESCAPE '\\') OR "
        "r.prompt IN (SELECT id FROM prompts WHERE text LIKE ? ESCAPE '\\'))"
    )
    return term, [pattern, pattern]


def _rollout_row(row: Sequence[Any]) -> dict[str, Any]:
    names = (*_ROLLOUT_COLUMNS, "prompt", "completion")
    return dict(zip(names, row, strict=True)) | {"truncated": bool(row[11])}


def read_rollout(
    db: sqlite3.Connection, source: str, episode: int, sample: int, with_tokens: bool = True
) -> dict[str, Any] | None:
    """Return a rollout with whole texts, messages, reward parts and tokens; None if it is not kept."""
    column = "d.record" if with_tokens else "NULL"
    found = db.execute(
        f"SELECT {_COLUMNS}, p.text, d.completion, r.prompt, d.parts, {column} FROM rollouts r JOIN prompts p ON "
        "p.id = r.prompt JOIN rollout_data d ON d.id = r.id WHERE r.source = ? AND r.episode = ? AND r.sample = ?",
        (source, episode, sample),
    ).fetchone()
    if found is None:
        return None
    *row, prompt, parts, blob = found
    (same_prompt,) = db.execute("SELECT COUNT(*) FROM rollouts WHERE prompt = ?", (prompt,)).fetchone()
    tokens, messages = None, None
    if blob is not None:
        try:
            record = TokenRecord.from_bytes(blob)
        except (ValueError, zlib.error):
            record = None
        if record is not None:
            tokens = _token_columns(db, record)
            messages = _messages(tokens["text"], record.versions >= 0)
    more = {"parts": json.loads(parts), "messages": messages, "token_columns": tokens, "same_prompt": same_prompt}
    return _rollout_row(row) | more | {"image_names": _image_names(db, source, episode, sample)}


def _image_names(db: sqlite3.Connection, source: str, episode: int, sample: int) -> list[str]:
    """Return the names of the images of a rollout that were kept; runs of older versions have none."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'rollout_images'").fetchone():
        return []
    found = db.execute(
        "SELECT i.names FROM rollouts r JOIN rollout_images i ON i.id = r.id "
        "WHERE r.source = ? AND r.episode = ? AND r.sample = ?",
        (source, episode, sample),
    ).fetchone()
    return found[0].split() if found else []


def read_group(
    db: sqlite3.Connection, source: str, episode: int, max_tokens: int | None = None
) -> list[dict[str, Any]]:
    """Return all rollouts of one episode, which are the answers to one prompt.

    Those behind the first `max_tokens` tokens are read without tokens and messages.
    """
    query = "SELECT sample, SUM(tokens) OVER (ORDER BY sample) FROM rollouts WHERE source = ? AND episode = ?"
    samples = db.execute(f"{query} ORDER BY sample", (source, episode)).fetchall()
    found = [
        read_rollout(db, source, episode, sample, max_tokens is None or num_tokens <= max_tokens)
        for sample, num_tokens in samples
    ]
    return [rollout for rollout in found if rollout is not None]


def read_same_prompt(
    db: sqlite3.Connection, source: str, episode: int, sample: int, limit: int = 1000
) -> list[dict[str, Any]]:
    """Return the answers of all steps to the prompt of a rollout, the oldest first."""
    query = (
        "SELECT r.step, r.source, r.episode, r.sample, r.reward, d.completion FROM rollouts r JOIN rollout_data d ON "
        "d.id = r.id WHERE r.prompt = (SELECT prompt FROM rollouts WHERE source = ? AND episode = ? AND sample = ?) "
        "ORDER BY r.step, r.id LIMIT ?"
    )
    names = ("step", "source", "episode", "sample", "reward", "completion")
    return [dict(zip(names, row, strict=True)) for row in db.execute(query, (source, episode, sample, limit))]


def _token_columns(db: sqlite3.Connection, record: TokenRecord) -> dict[str, Any]:
    ids = record.ids.tolist()
    wanted = json.dumps(sorted(set(ids)))
    query = "SELECT id, bytes FROM vocabulary WHERE id IN (SELECT value FROM json_each(?))"
    known = dict(db.execute(query, (wanted,)).fetchall())
    return {
        "id": ids,
        "text": join_token_texts(known.get(token, token_bytes(None, token)) for token in ids),
        "trained": record.loss_mask.tolist(),
        "version": record.versions.tolist(),
        "logp": _numbers(record.logprobs),
        "prox_logp": _numbers(record.train_logp),
        "advantage": _numbers(record.advantages),
    }


def _numbers(values: np.ndarray | None) -> list[float | None] | None:
    """Return rounded numbers; None for those that are not finite."""
    if values is None:
        return None
    return [round(v, 5) if abs(v) < 1e9 else None for v in values.tolist()]


def _messages(texts: list[str], is_generated: np.ndarray) -> list[dict[str, str]]:
    """Return the messages of a conversation.

    What was generated is of the assistant. The text before and between is cut where a chat template begins messages;
    text without such a mark is `prompt` at the start and `observation` later.
    """
    bounds = [0, *(np.flatnonzero(np.diff(is_generated.astype(np.int8))) + 1).tolist(), len(texts)]
    messages: list[dict[str, str]] = []
    for start, end in pairwise(bounds):
        text = "".join(texts[start:end])
        if is_generated[start:end].any():
            messages.append({"role": "assistant", "text": _MESSAGE_END.sub("", text)})
        else:
            messages += _observed(text, "prompt" if start == 0 else "observation")
    return messages


def _observed(text: str, unknown_role: str) -> list[dict[str, str]]:
    starts = list(_MESSAGE_START.finditer(text))
    head = text[: starts[0].start()] if starts else text
    found = [(unknown_role, head)] if _MESSAGE_END.sub("", head).strip() else []
    for match, following in zip_longest(starts, starts[1:]):
        role, end = match[2] or match[4], following.start() if following else len(text)
        body = _MESSAGE_END.sub("", text[match.end() : end])
        # The start of the message that the model then writes.
        if following is not None or body.strip():
            found.append((role, body))
    return [{"role": role, "text": body} for role, body in found]


# ------------------------------------------------------------------------------------------------------ whole runs


def read_ages(db: sqlite3.Connection, max_columns: int = 400) -> dict[str, list[Any]]:
    """Return trained samples by step and age; `counts` has a list for each step (or range of steps)."""
    rows = db.execute("SELECT step, age, samples FROM ages ORDER BY step").fetchall()
    if not rows:
        return {"steps": [], "ages": [], "counts": []}
    first, last, oldest = rows[0][0], rows[-1][0], max(row[1] for row in rows)
    width = -(-(last - first + 1) // max_columns)
    counts = np.zeros(((last - first) // width + 1, oldest + 1), np.int64)
    for step, age, samples in rows:
        counts[(step - first) // width, age] += samples
    steps = range(first, last + 1, width)
    return {"steps": list(steps), "ages": list(range(oldest + 1)), "counts": counts.tolist()}


def read_flow(db: sqlite3.Connection, buckets: int = 200) -> dict[str, Any]:
    """Return how many episodes entered and left training, by ranges of steps.

    `admitted` counts by the version at the start, `trained` by the step, others by the version at their start too.
    `buffered` is admitted minus ended so far, and `now` has the totals by state.
    """
    rows = db.execute(
        "SELECT COALESCE(step, start_version, 0), start_version, state, COUNT(*) FROM episodes "
        "WHERE source != 'direct' GROUP BY 1, 2, 3"
    ).fetchall()
    states = ("trained", "stale", "rejected", "failed")
    if not rows:
        return {"steps": [], "admitted": [], "buffered": [], **{state: [] for state in states}, "now": {}}
    last = max(max(row[0], row[1] or 0) for row in rows)
    width = -(-(last + 1) // buckets)
    counts = {name: np.zeros(last // width + 1, np.int64) for name in ("admitted", *states)}
    now: dict[str, int] = {}
    for step, start_version, state, count in rows:
        counts["admitted"][max(0, start_version or 0) // width] += count
        now[state] = now.get(state, 0) + count
        if state in states:
            counts[state][max(0, step) // width] += count
    ended = sum(counts[state] for state in states)
    buffered = np.cumsum(counts["admitted"] - ended)
    flow = {name: column.tolist() for name, column in counts.items()}
    return {"steps": list(range(0, last + 1, width)), **flow, "buffered": buffered.tolist(), "now": now}


def read_servers(
    db: sqlite3.Connection, start: float | None = None, end: float | None = None, max_samples: int = 2000
) -> list[dict[str, Any]]:
    """Return at most `max_samples` samples of each server by time, with rates from its counters."""
    query = "SELECT * FROM servers WHERE time >= ? AND time <= ? ORDER BY time"
    found: dict[str, list[Sequence[Any]]] = {}
    for row in db.execute(query, (start or 0.0, end or 1e18)):
        found.setdefault(row[1], []).append(row)
    return [_server(address, rows[:: -(-len(rows) // max_samples)]) for address, rows in sorted(found.items())]


def _server(address: str, rows: list[Sequence[Any]]) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {name: [] for name in ("prefix_hits", "tokens_per_s", "busy")}
    for before, row in zip([None, *rows], rows, strict=False):
        took_s = 0.0 if before is None else row[0] - before[0]
        prompt, cached, generated, busy_s = (
            None if before is None or None in (before[i], row[i]) or row[i] < before[i] else row[i] - before[i]
            for i in (7, 8, 9, 10)
        )
        columns["prefix_hits"].append(cached / prompt if prompt and cached is not None else None)
        columns["tokens_per_s"].append(generated / took_s if generated is not None and took_s else None)
        columns["busy"].append(min(1.0, busy_s / took_s) if busy_s is not None and took_s else None)
    names = {"time": 0, "version": 2, "is_open": 3, "running": 4, "waiting": 5, "kv_used": 6}
    columns |= {name: [row[i] for row in rows] for name, i in names.items()}
    return {"name": address, "address": address, "version": rows[-1][2], "columns": columns}


def read_events(db: sqlite3.Connection, since: float = 0.0, limit: int = 10_000) -> list[dict[str, Any]]:
    """Return what happened to the run after `since`, the oldest first."""
    query = "SELECT time, kind, text, step, level FROM events WHERE time > ? ORDER BY time LIMIT ?"
    names = ("time", "kind", "text", "step", "level")
    return [dict(zip(names, row, strict=True)) for row in db.execute(query, (since, limit))]
