"""Asks a recording what other settings would have done.

Used by `arealite report RUN_DIR --what-if key=value …` and the dashboard.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from arealite.api.errors import ConfigError
from arealite.core.foresee.recording import Recording, Settings
from arealite.core.foresee.rerun import Rerun, Scenario, Simulation

_SPEEDS = {
    "generation_speed": "generate",
    "reward_speed": "reward",
    "tool_speed": "tool",
    "environment_speed": "environment",
    "workflow_speed": "workflow",
    "trainer_speed": "trainer",
}
_SETTINGS = ("max_head_offpolicyness", "lead", "max_concurrent_rollouts", "servers", "max_running_requests")
KEYS = (*_SETTINGS, *_SPEEDS)
# Other names that people have for a key.
_ALSO = {"eta": "max_head_offpolicyness", "η": "max_head_offpolicyness"}
# A gain below it is not worth a line.
_MIN_GAIN = 0.01
# A re-run of the recording that differs by more than this from it makes predictions doubtful.
_MAX_ERROR = 0.1
# Steps of servers that take so many times their CPU seconds, beyond what the run itself explains, had no core.
_MAX_SLOWER = 1.15
# Only the last steps of a long run are played again.
_MAX_STEPS, _MAX_EPISODES = 200, 20_000


@dataclass(frozen=True)
class Answer:
    """What a scenario would have done; `change` of the step time is relative to a plain re-run."""

    question: str
    rerun: Rerun
    change: float

    def text(self) -> str:
        return f"{self.question}: {self.change:+.0%}".replace("-", "−")

    def to_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "change": self.change,
            "step_s": self.rerun.step_s,
            "wait_share": self.rerun.wait_share,
            "mean_age": self.rerun.mean_age,
            "ages": {str(age): number for age, number in sorted(self.rerun.ages.items())},
            "stale": self.rerun.num_stale,
        }


class WhatIf:
    """Re-runs one recording under any scenario."""

    def __init__(self, recording: Recording, max_steps: int = _MAX_STEPS):
        self.recording = _last_steps(recording, max_steps)
        self.simulation = Simulation(self.recording)
        self.base = self.simulation.run(Scenario(self.recording.settings))

    @property
    def recorded_step_s(self) -> float:
        return self.recording.seconds / (len(self.recording.steps) - 1)

    def notes(self, scenario: Scenario | None = None) -> list[str]:
        """Say what makes the predictions doubtful, and what of a scenario cannot change anything."""
        found, error = [], self.base.step_s / max(self.recorded_step_s, 1e-9) - 1
        kinds = {kind for episode in self.recording.episodes for kind, _ in episode.parts} | {"trainer"}
        for key, kind in _SPEEDS.items():
            if scenario and kind in scenario.speeds and kind not in kinds:
                found.append(f"{key} changes nothing: no episode of the run has a part of that kind")
        if abs(error) > _MAX_ERROR:
            found.append(
                f"a re-run as recorded takes {self.base.step_s:.2f} s a step, the run took {self.recorded_step_s:.2f}: "
                "take the predictions as rough"
            )
        found += [note] if (note := describe_load(self.recording)) else []
        if not self.simulation.speed.is_known:
            found.append(
                "the servers' counters say too little about their speed under other loads: generation is assumed to "
                "take as long with any number of episodes at once"
            )
        return found

    def lead_notes(self, scenario: Scenario, rerun: Rerun) -> list[str]:
        """Describe both leads of a trial whose margin is so small that a run may take either."""
        if rerun.close_leads is None:
            return []
        fixed = {lead: replace(scenario, settings=replace(scenario.settings, lead=lead)) for lead in rerun.close_leads}
        found = {lead: self.simulation.run(each) for lead, each in fixed.items()}
        return [describe_leads({lead: (each.step_s, each.mean_age) for lead, each in found.items()})]

    def ask(self, scenario: Scenario, question: str) -> Answer:
        """Return what a scenario would have done."""
        rerun = self.simulation.run(scenario)
        return Answer(question, rerun, rerun.step_s / max(self.base.step_s, 1e-9) - 1)

    def advise(self) -> list[Answer]:
        """Return the changes that would have made the run faster, the best first."""
        settings, answers = self.recording.settings, []
        eta = settings.max_head_offpolicyness
        more = replace(settings, servers=settings.servers + 1)
        candidates = [
            (Scenario(_with_eta(settings, eta + 1)), f"max_head_offpolicyness {eta} → {eta + 1}"),
            (Scenario(more), "one more server"),
            (Scenario(settings, {"trainer": 2.0}), "training twice as fast"),
            (Scenario(settings, {"generate": 2.0}), "generation twice as fast"),
        ]
        limit = settings.max_concurrent_rollouts
        if limit is not None:
            twice = replace(settings, max_concurrent_rollouts=2 * limit)
            candidates.append((Scenario(twice), f"max_concurrent_rollouts {limit} → {2 * limit}"))
        running = self.recording.max_running
        if running is not None:
            twice = replace(settings, max_running_requests=2 * running)
            candidates.append((Scenario(twice), f"server.max_running_requests {running} → {2 * running}"))
        kinds = {kind for episode in self.recording.episodes for kind, _ in episode.parts}
        for kind, name in (("reward", "rewards"), ("tool", "tools"), ("environment", "environments")):
            if kind in kinds:
                candidates.append((Scenario(settings, {kind: 2.0}), f"{name} twice as fast"))
        answers = [self.ask(*candidate) for candidate in candidates]
        return sorted((a for a in answers if a.change < -_MIN_GAIN), key=lambda answer: answer.change)


def describe_leads(found: Mapping[int, tuple[float, float]]) -> str:
    """Say that a run may take any of these leads, with their seconds per step and mean age of samples."""
    each = [f"with {lead}, {step_s:.2f} s a step and a mean age of {age:.2f}" for lead, (step_s, age) in found.items()]
    leads = " and ".join(map(str, found))
    return f"adaptive leads of {leads} batches are nearly as good here, and a run may take either: {'; '.join(each)}"


def describe_load(recording: Recording) -> str:
    """Say that other processes used the cores of the run; empty if they did not."""
    slower = _slower_than_cpu(recording)
    if slower <= _MAX_SLOWER:
        return ""
    return (
        f"decode steps took {slower:.1f} times as long as the run itself explains: other processes used the cores. "
        "Predictions are for a machine with the same load"
    )


def _slower_than_cpu(recording: Recording) -> float:
    """Return by how much steps of servers were slower than on cores that only the run uses."""
    use, cores = recording.server_use, recording.cores
    cpu_s = sum(row.cpu_s for row in use.steps)
    if use.cpu_s is None or cores is None or cpu_s <= 0:
        return 1.0
    # Servers and ranks, all at once.
    need = cores.server * recording.settings.servers + cores.trainer * cores.num_ranks
    return sum(row.seconds for row in use.steps) / cpu_s / max(1.0, need / cores.cores)


def parse_question(words: Sequence[str], settings: Settings) -> tuple[Scenario, str]:
    """Return the scenario that `key=value` words describe, and how to name it; raises `ConfigError`."""
    values: dict[str, Any] = {}
    speeds: dict[str, float] = {}
    for word in words:
        key, _, text = word.partition("=")
        key = key.removeprefix("rollout.").removeprefix("server.")
        if key not in KEYS:
            near = [_ALSO[key]] if key in _ALSO else difflib.get_close_matches(key, KEYS, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(f"--what-if does not know {key!r}{hint} It takes {', '.join(KEYS)}")
        if key in values or _SPEEDS.get(key) in speeds:
            raise ConfigError(f"--what-if has {key} twice: {' '.join(words)}. Ask for one value at a time")
        value = _parse_value(key, text)
        if key in _SPEEDS:
            speeds[_SPEEDS[key]] = value
        else:
            values[key] = value
    if "max_head_offpolicyness" in values:
        settings = _with_eta(settings, values["max_head_offpolicyness"])
    settings = replace(settings, **values)
    lead, eta = settings.lead, settings.max_head_offpolicyness
    if lead is not None and lead > eta:
        raise ConfigError(
            f"--what-if lead={lead} is above max_head_offpolicyness={eta}, which limits it: ask for both, "
            f"lead={lead} max_head_offpolicyness={lead}"
        )
    return Scenario(settings, speeds), " ".join(words)


def _parse_value(key: str, text: str) -> Any:
    if (key, text) == ("lead", "adaptive") or (key, text) == ("max_concurrent_rollouts", "null"):
        return None
    kind, least = (float, 0.0) if key in _SPEEDS else (int, 0 if key in ("max_head_offpolicyness", "lead") else 1)
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value < least or not value < 1e6 or (key in _SPEEDS and value == 0):
        expected = "a factor above 0, such as 2" if key in _SPEEDS else f"a whole number from {least}"
        raise ConfigError(f"--what-if {key}={text!r}: expected {expected}")
    return value


def _with_eta(settings: Settings, eta: int) -> Settings:
    """Return the settings with another staleness limit; a lead that does not adapt is the limit itself."""
    return replace(settings, max_head_offpolicyness=eta, lead=None if settings.lead is None else eta)


def _last_steps(recording: Recording, max_steps: int) -> Recording:
    keep = min(max_steps, max(2, _MAX_EPISODES // max(1, recording.settings.batch_size)))
    if len(recording.steps) <= keep:
        return recording
    steps = recording.steps[-keep:]
    began = steps[0].ready_at - steps[0].waited_s
    episodes = [episode for episode in recording.episodes if episode.finished_at > began]
    return replace(recording, steps=steps, episodes=episodes)


def describe_settings(settings: Settings) -> Mapping[str, Any]:
    """Return the settings of a recording for programs."""
    return asdict(settings)
