"""`Recording`: the durations of a run, read from its ledger, its statistics and its configuration.

`read_recording` is the one place that knows where each number comes from. The critical path, the re-run under other
settings and the planner take a `Recording`, so tests make one by hand. All times are unix seconds. A run that cannot be
analysed raises `RecordingError` with the reason and what to do.
"""

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from arealite.api.alloc_mode import AllocationMode
from arealite.api.errors import AReaLiteError
from arealite.api.generation_args import FEW_RUNNING, MOST_RUNNING
from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.foresee.resources import ServerUse, core_use, read_server_use
from arealite.core.ledger.reading import open_ledger
from arealite.utils.trace.episode_clock import GENERATE, WORKFLOW
from arealite.utils.yaml_reader import read_yaml

# Phases after the weight update; all others come before it.
_AFTER_UPDATE = ("rollout", "evaluate", "save")
_STARTUP = "time/startup/"
# A restart of the clock, or an episode that a checkpoint restored.
_MAX_EPISODE_S = 30 * 86_400.0
# The address of an engine in the trainer's process.
_OWN_ENGINE = "embedded"


class RecordingError(AReaLiteError):
    """The run directory does not hold what an analysis needs."""


class PlayedEpisode(NamedTuple):
    """One episode; `parts` are `(kind, seconds)` in order, `step` is the one that trained it."""

    number: int
    state: str
    start_version: int
    step: int | None
    samples: int
    tokens: int
    started_at: float
    finished_at: float
    parts: tuple[tuple[str, float], ...]
    # Tokens of the answers that each part that generates has returned; empty if they were not recorded.
    answers: tuple[tuple[int, ...], ...] = ()

    @property
    def seconds(self) -> float:
        return self.finished_at - self.started_at

    @property
    def sample_tokens(self) -> float:
        """Mean tokens of a sample, with the prompt."""
        return self.tokens / max(1, self.samples)


class PlayedStep(NamedTuple):
    """One step: waits `waited_s` until its batch is there at `ready_at`, then works.

    The new weights are in use `update_s` after `ready_at`; the wait for the next batch begins `work_s` after it.
    """

    number: int
    ready_at: float
    waited_s: float
    update_s: float
    work_s: float


class ServerRate(NamedTuple):
    """What a server did between two samples: sequences that ran at once, tokens generated."""

    began: float
    seconds: float
    running: float
    tokens: float


class ServerLoad(NamedTuple):
    """Sequences that a server decoded, and that waited there, at a time."""

    time: float
    running: int
    waiting: int


@dataclass(frozen=True)
class Settings:
    """What decides how episodes and steps follow each other.

    `lead` None: adaptive. `max_running_requests` of a server, None: as recorded.
    """

    batch_size: int
    max_head_offpolicyness: int = 0
    lead: int | None = None
    max_concurrent_rollouts: int | None = None
    servers: int = 1
    max_running_requests: int | None = None


@dataclass(frozen=True)
class Recording:
    """Steps and episodes of the training stream in order of their number, of the last start."""

    settings: Settings
    steps: Sequence[PlayedStep]
    episodes: Sequence[PlayedEpisode]
    rates: Sequence[ServerRate] = ()
    # What the servers' steps took, and what all needed of the cores that they shared; None if that is not known.
    server_use: ServerUse = ServerUse((), None)
    cores: CoreUse | None = None
    # Samples of the servers' loads, and how many sequences one decodes at once; None if that is not known.
    loads: Sequence[ServerLoad] = ()
    max_running: int | None = None
    # Whether servers and trainer work on the same GPU.
    shares_gpu: bool = False
    # Episodes that still ran at the end, as if they had ended then. Without them long ones would be missing.
    unfinished: Sequence[PlayedEpisode] = ()
    # What is missing, for the reader of a report.
    notes: list[str] = field(default_factory=list)
    # Tokens of the longest answer of episodes whose text is kept, by number.
    longest: Mapping[int, int] = field(default_factory=dict)
    # When a run that was resumed began again; 0 for others.
    began: float = 0.0

    @property
    def started(self) -> list[PlayedEpisode]:
        """All episodes, also unfinished ones, in order of their number."""
        return sorted((*self.episodes, *self.unfinished), key=lambda episode: episode.number)

    @property
    def seconds(self) -> float:
        """From the first batch to the last: the time that shares refer to."""
        return self.steps[-1].ready_at - self.steps[0].ready_at

    def batch(self, step: int) -> list[PlayedEpisode]:
        """Return the episodes that a step trained."""
        return [episode for episode in self.episodes if episode.step == step]


def read_recording(folder: Path, stats: Iterable[Mapping[str, Any]]) -> Recording:
    """Read the run in `folder`, whose lines of stats.jsonl are `stats`."""
    path = folder / "run.sqlite"
    if not path.exists():
        raise RecordingError(f"{folder} has no run.sqlite: the run has not started, or it trains without rollouts")
    timed = [line for line in stats if line.get("time/step") is not None]
    lines = {int(line["step"]): line for line in timed if line.get("step", -1) >= 0}
    try:
        with contextlib.closing(open_ledger(path)) as db:
            episodes = _read_episodes(db, path)
            running = db.execute(_RUNNING_QUERY).fetchall()
            steps, notes = _make_steps(lines, dict(db.execute(_READY_QUERY).fetchall()), episodes)
            # Servers of an earlier start are others; between the two starts there may be days.
            (began,) = db.execute(_RESUMED_QUERY, (steps[0].ready_at,)).fetchone()
            samples = db.execute(_SERVERS_QUERY, (began,)).fetchall()
            server_use = read_server_use(db, began)
            longest = dict(db.execute(_LONGEST_QUERY).fetchall())
    except sqlite3.Error as error:
        raise RecordingError(
            f"cannot read the ledger {path}: {error}. It is damaged or of another arealite version"
        ) from error
    batches = Counter(episode.step for episode in episodes)
    batch_size = max(batches[step.number] for step in steps)
    config = _read_config(folder / "config.yaml")
    settings = _settings(config["rollout"], batch_size, _count_servers(samples))
    used = [lines[step.number] for step in steps]
    # What is played again must be of the same start as its steps.
    first = steps[0].number
    played = [e for e in episodes if (e.finished_at >= began if e.step is None else e.step >= first)]
    return Recording(
        settings,
        steps,
        played,
        _server_rates(samples),
        server_use,
        _cores(config, server_use, used),
        [ServerLoad(at, running, waiting) for at, _, running, _, waiting in samples if None not in (running, waiting)],
        _max_running(config, server_use.cpu_s is None) if server_use.steps else None,
        any(line.get("gpu/shared") for line in used) or any(address == _OWN_ENGINE for _, address, *_ in samples),
        _unfinished(running, steps, episodes),
        notes,
        longest,
        began,
    )


# Rows of trained episodes are written when their batch is complete.
_READY_QUERY = (
    "SELECT step, MAX(ended_at) FROM episodes WHERE source != 'direct' AND state = 'trained' AND step IS NOT NULL "
    "GROUP BY step"
)
_LONGEST_QUERY = "SELECT episode, MAX(answer_tokens) FROM rollouts WHERE source != 'direct' GROUP BY episode"
_RESUMED_QUERY = "SELECT COALESCE(MAX(time), 0) FROM events WHERE kind = 'recover' AND time <= ?"
_SERVERS_QUERY = "SELECT time, address, running, generated_tokens, waiting FROM servers WHERE time >= ? ORDER BY time"


_RUNNING_QUERY = (
    "SELECT id, COALESCE(start_version, 0), started_at FROM episodes WHERE source != 'direct' AND state = 'running' "
    "AND started_at IS NOT NULL ORDER BY id"
)


def _read_episodes(db: sqlite3.Connection, path: Path) -> list[PlayedEpisode]:
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'episode_times'").fetchone():
        raise RecordingError(
            f"{path} was written by an older version of arealite, which did not record when episodes ended: what steps "
            "waited for is known for new runs only"
        )
    query = (
        "SELECT e.id, e.state, COALESCE(e.start_version, 0), e.step, COALESCE(e.samples, 0), COALESCE(e.tokens, 0), "
        "e.started_at, t.finished_at, t.parts FROM episodes e JOIN episode_times t ON t.source = e.source AND "
        "t.id = e.id WHERE e.source != 'direct' ORDER BY e.source, e.id"
    )
    found = []
    for *row, started_at, finished_at, parts in db.execute(query):
        if started_at is None or not 0 <= finished_at - started_at < _MAX_EPISODE_S:
            # Restored from a checkpoint: its start is not known.
            started_at = finished_at
        read = json.loads(parts)
        # Older versions did not count tokens.
        answers = tuple(tuple(part[2]) if len(part) > 2 else () for part in read if part[0] == GENERATE)
        fitted = _fit_parts(read, finished_at - started_at)
        found.append(PlayedEpisode._make((*row, started_at, finished_at, fitted, answers)))
    if not found:
        raise RecordingError(
            f"{path} has no finished episode: the run trains on fixed data (SFT, DPO, reward models), or has just begun"
        )
    return found


def _unfinished(
    rows: Iterable[tuple[int, int, float]], steps: Sequence[PlayedStep], episodes: Sequence[PlayedEpisode]
) -> list[PlayedEpisode]:
    """Return the episodes that still ran when the last step ended, or the last episode."""
    samples = Counter(episode.samples for episode in episodes).most_common(1)[0][0]
    end = max(steps[-1].ready_at + steps[-1].work_s, max(episode.finished_at for episode in episodes))
    return [
        PlayedEpisode(number, "running", version, None, samples, 0, began, end, (("generate", end - began),))
        for number, version, began in rows
        if 0 <= end - began < _MAX_EPISODE_S
    ]


def _fit_parts(read: Sequence[Sequence[Any]], seconds: float) -> tuple[tuple[str, float], ...]:
    """Return the parts of an episode so that their sum is its duration."""
    parts = [(str(kind), float(took_s)) for kind, took_s, *_ in read]
    missing_s = seconds - sum(took_s for _, took_s in parts)
    if not parts or missing_s > 0:
        parts.insert(0, (WORKFLOW, max(0.0, missing_s)))
    elif missing_s < 0:
        scale = seconds / (seconds - missing_s)
        parts = [(kind, took_s * scale) for kind, took_s in parts]
    return tuple(parts)


def _make_steps(
    lines: Mapping[int, Mapping[str, Any]], ready: Mapping[int, float], episodes: Sequence[PlayedEpisode]
) -> tuple[list[PlayedStep], list[str]]:
    """Return the steps of the last start of the run that both files know."""
    numbers = sorted(lines.keys() & ready.keys())
    notes = []
    starts = [n for n in numbers if any(key.startswith(_STARTUP) for key in lines[n])]
    if starts and starts[-1] != numbers[0]:
        notes.append(f"the run was resumed: only steps from {starts[-1] + 1} on are analysed")
        numbers = [n for n in numbers if n >= starts[-1]]
    # A step that has no statistics yet, or a ledger of which a part is lost, ends the analysis.
    while numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
        gap = next(n for n in range(numbers[0], numbers[-1]) if n not in numbers)
        notes.append(f"step {gap + 1} is missing in stats.jsonl or run.sqlite: steps before it are left out")
        numbers = [n for n in numbers if n > gap]
    if len(numbers) < 2:
        raise RecordingError(f"{len(numbers)} finished steps with episodes are recorded: an analysis needs two or more")
    first_starts: dict[int, float] = {}
    for episode in episodes:
        at = first_starts.get(episode.start_version, episode.started_at)
        first_starts[episode.start_version] = min(at, episode.started_at)
    steps = []
    for number in numbers:
        ready_at, following = ready[number], lines.get(number + 1)
        waited_s = float(lines[number].get("wait_s") or 0.0)
        phases_s = sum(
            value or 0.0
            for key, value in lines[number].items()
            if key.startswith("time/") and key.count("/") == 1 and key[5:] not in (*_AFTER_UPDATE, "step")
        )
        if following is not None and number + 1 in ready:
            work_s = max(0.0, ready[number + 1] - float(following.get("wait_s") or 0.0) - ready_at)
        else:
            work_s = phases_s
        # A loop without phases: the first episode under the new weights has started by then.
        update_s = phases_s if phases_s > 0 else first_starts.get(number + 1, ready_at + work_s) - ready_at
        steps.append(PlayedStep(number, ready_at, waited_s, min(max(0.0, update_s), work_s), work_s))
    return steps, notes


def _read_config(path: Path) -> dict[str, Any]:
    """Read what the run was configured with."""
    try:
        config = read_yaml(path.read_text(), None)
    except (OSError, ValueError) as error:
        raise RecordingError(
            f"cannot read {path}: {error}. It says which limits the run had; a run that a launcher or "
            "`arealite train` started has one"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("rollout"), dict):
        raise RecordingError(f"{path} has no section `rollout`: the run trains without rollouts")
    return config


def _settings(rollout: Mapping[str, Any], batch_size: int, servers: int) -> Settings:
    eta = int(rollout.get("max_head_offpolicyness") or 0)
    return Settings(
        batch_size,
        eta,
        None if rollout.get("adaptive_lead", True) else eta,
        rollout.get("max_concurrent_rollouts"),
        servers,
    )


def _cores(config: Mapping[str, Any], use: ServerUse, lines: Sequence[Mapping[str, Any]]) -> CoreUse | None:
    """Return how a run on one machine uses its cores; None if that is not known."""
    if ((config.get("cluster") or {}).get("n_nodes") or 1) > 1:
        return None
    mode = config.get("allocation_mode")
    return core_use(use, lines, max(1, AllocationMode.from_str(mode).train_world_size) if mode else 1)


def _max_running(config: Mapping[str, Any], on_gpu: bool) -> int:
    set_by_user = (config.get("server") or {}).get("max_running_requests")
    return int(set_by_user or (MOST_RUNNING if on_gpu else FEW_RUNNING))


def _count_servers(samples: Sequence[tuple[float, str, Any, Any, Any]]) -> int:
    """Return how many servers ran at once, most of the time."""
    lives: dict[str, list[float]] = {}
    for at, address, *_ in samples:
        life = lives.setdefault(address, [at, at])
        life[1] = at
    total_s = samples[-1][0] - samples[0][0] if samples else 0.0
    if total_s <= 0:
        return max(1, len(lives))
    return max(1, round(sum(end - began for began, end in lives.values()) / total_s))


def _server_rates(samples: Sequence[tuple[float, str, Any, Any, Any]]) -> list[ServerRate]:
    """Return what each server generated between two samples; empty if servers do not tell."""
    rates, last = [], {}
    for at, address, running, tokens, _ in samples:
        if running is None or tokens is None:
            continue
        if address in last:
            began, was_running, had = last[address]
            if at - began > 0.1 and tokens > had:
                rates.append(ServerRate(began, at - began, (running + was_running) / 2, tokens - had))
        last[address] = at, running, tokens
    return rates
