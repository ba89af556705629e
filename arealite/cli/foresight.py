"""The part of `arealite report` that explains waits and predicts other settings."""

from typing import Any

from arealite.core.foresee.critical_path import describe_path, find_critical_path
from arealite.core.foresee.off_policy import predict, read_drift
from arealite.core.foresee.recording import Recording, RecordingError, read_recording
from arealite.core.foresee.what_if import Answer, WhatIf, describe_settings, parse_question
from arealite.trainer.stats_logger import read_stats
from arealite.utils.rundir import RunDir
from arealite.utils.yaml_reader import read_yaml

# Chains and changes that a report shows.
_MAX_CHAINS, _MAX_ADVICE = 3, 4


def _read(run_dir: RunDir) -> Recording:
    return read_recording(run_dir.path, read_stats(run_dir))


def analyse(run_dir: RunDir, question: list[str] | None) -> dict[str, Any]:
    """Return waits and predictions for programs; raises `RecordingError` if the run does not tell."""
    recording = _read(run_dir)
    path, what_if = find_critical_path(recording), WhatIf(recording)
    result: dict[str, Any] = {
        "run": str(run_dir.path),
        "settings": describe_settings(recording.settings),
        "critical_path": path.to_json(),
        "recorded_step_s": what_if.recorded_step_s,
        "rerun_step_s": what_if.base.step_s,
        "advice": [answer.to_json() for answer in what_if.advise()],
    }
    scenario, name = parse_question(question or [], recording.settings)
    result["notes"] = [*path.notes, *what_if.notes(scenario)]
    if question:
        answer = what_if.ask(scenario, name)
        result["notes"] += what_if.lead_notes(scenario, answer.rerun)
        result["what_if"] = answer.to_json() | {"off_policy": predict(_drift(run_dir), answer.rerun.ages)}
    return result


def wait_lines(run_dir: RunDir, steps: list[dict[str, Any]]) -> list[str]:
    """Return what the trainer waited for, the chains of the longest waits, and what would have helped."""
    if not any("wait_s" in step for step in steps):
        # Supervised training has no episodes.
        return []
    try:
        recording = _read(run_dir)
        path, what_if = find_critical_path(recording), WhatIf(recording)
    except RecordingError as error:
        return [f"what the trainer waited for is not known: {error}"]
    longest = sorted(path.paths, key=lambda each: -each.waited_s)[:_MAX_CHAINS]
    chains = [f"  {describe_path(each)}" for each in longest if each.waited_s > 0.01 * path.total_s]
    advice = [answer.text() for answer in what_if.advise()[:_MAX_ADVICE]]
    helps = f"predicted time of a step: {'; '.join(advice)}" if advice else "no single change would save 1% of a step"
    return [path.sentence(), *chains, helps, *(f"  note: {note}" for note in (*path.notes, *what_if.notes()))]


def answer_lines(run_dir: RunDir, question: list[str]) -> list[str]:
    """Return the answer to an explicit question."""
    recording = _read(run_dir)
    what_if = WhatIf(recording)
    base = what_if.ask(*parse_question([], recording.settings))
    scenario, name = parse_question(question, recording.settings)
    answer = what_if.ask(scenario, name)
    drift = _drift(run_dir)
    lines = [f"recorded: {what_if.recorded_step_s:.2f} s a step", f"what if {answer.text()}"]
    for title, each in (("as recorded, re-run", base), (answer.question, answer)):
        lines += [f"{title}:", *(f"  {line}" for line in _describe(each, predict(drift, each.rerun.ages)))]
    notes = [*what_if.notes(scenario), *what_if.lead_notes(scenario, answer.rerun)]
    return [*lines, *(f"note: {note}" for note in notes)]


def _describe(answer: Answer, found: dict[str, Any]) -> list[str]:
    rerun, total = answer.rerun, max(1, answer.rerun.ages.total())
    ages = ", ".join(f"{age}: {number / total:.0%}" for age, number in sorted(rerun.ages.items()))
    lines = [
        f"{rerun.step_s:.2f} s a step, the trainer waits {rerun.wait_share:.0%}",
        f"samples by age: {ages}; mean {rerun.mean_age:.2f}; {rerun.num_stale} episodes dropped as stale",
    ]
    if "problem" in found:
        return [*lines, f"importance weights are not known: {found['problem']}"]
    ages = ", ".join(map(str, found["extrapolated_ages"]))
    return [
        *lines,
        f"log-ratio (rms) {found['log_ratio_rms']:.4f}, effective sample size {found['ess']:.3f}, outside of the clip "
        f"range {found['clip_share']:.2%}" + (f" (age {ages} extrapolated)" if ages else ""),
    ]


def _drift(run_dir: RunDir) -> Any:
    config = read_yaml((run_dir.path / "config.yaml").read_text(), None)
    actor = config.get("actor") or {}
    return read_drift(run_dir.db_path, actor.get("eps_clip") or 0.2, actor.get("eps_clip_higher"))
