"""Prints predictions: one layout in full, a table of the best ones, a sweep as table and plot."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arealite.api.errors import ConfigError
from arealite.plan.layouts import Memory
from arealite.plan.search import Candidate
from arealite.plan.simulate import Prediction

_BAR = 30


def describe(prediction: Prediction, memory: Memory | None = None) -> str:
    """Return a prediction as text."""
    found = prediction
    parts = f"waiting {found.mean('wait_s'):.2f}, training {found.mean('train_s'):.2f}"
    lines = [
        f"step           {found.step_s:.2f} s: {parts}, weight update {found.mean('update_s'):.2f}",
        f"tokens/s       {found.tokens_per_s:,.0f} trained, {found.answer_tokens_per_s:,.0f} generated",
        f"idle           trainers {found.trainer_idle:.0%}, servers {found.server_idle:.0%}",
        f"servers        {found.mean_running:.0f} sequences each while busy, {found.num_preemptions} preemptions",
        f"episodes       at most {found.most_in_flight:,} in flight, {found.counts['stale']:.0f} stale",
        f"staleness      mean {found.mean_age:.2f} versions of the oldest token of a sample",
    ]
    for age, share in found.sample_ages.items():
        lines.append(f"  {age:>3}          {'#' * max(1, round(share * _BAR)):<{_BAR}} {share:.1%}")
    if memory is not None:
        of = f"of {memory.device_gib:.0f} GiB"
        sizes = memory.sizes
        recomputed = ", activations recomputed" if sizes.gradient_checkpointing else ""
        lines.append(
            f"memory         server {memory.server_gib:.0f} {of} ({memory.cache_tokens:,.0f} tokens of KV cache); "
            f"trainer {memory.trainer_gib:.0f} {of} (micro-batches of {sizes.max_tokens_per_mb:,} tokens{recomputed})"
        )
    return "\n".join(lines)


def describe_best(candidates: Sequence[Candidate]) -> str:
    """Return a table of layouts with what limits each of them."""
    width = max(len(c.layout.name) for c in candidates)
    lines = [
        f"{'layout':<{width}}  {'tokens/s':>10}  {'s/step':>8}  {'staleness':>9}  {'server GiB':>10}  "
        f"{'trainer GiB':>11}  why"
    ]
    for c in candidates:
        found = c.prediction
        lines.append(
            f"{c.layout.name:<{width}}  {c.tokens_per_s:>10,.0f}  {found.step_s:>8.2f}  {found.mean_age:>9.2f}  "
            f"{c.memory.server_gib:>10.0f}  {c.memory.trainer_gib:>11.0f}  {c.reason()}"
        )
    return "\n".join(lines)


def describe_sweep(key: str, values: Sequence[str], predictions: Sequence[Prediction]) -> str:
    """Return a table with a row for each value of the swept option."""
    lines = [f"{key:>12}  {'tokens/s':>10}  {'s/step':>8}  {'trainer idle':>12}  {'server idle':>11}  {'staleness':>9}"]
    for value, found in zip(values, predictions, strict=True):
        lines.append(
            f"{value:>12}  {found.tokens_per_s:>10,.0f}  {found.step_s:>8.2f}  {found.trainer_idle:>12.0%}  "
            f"{found.server_idle:>11.0%}  {found.mean_age:>9.2f}"
        )
    return "\n".join(lines)


def plot_sweep(path: Path, key: str, values: Sequence[str], predictions: Sequence[Prediction]) -> None:
    """Draw tokens/s, idle shares and staleness over the values, as PNG."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib, or leave --plot out") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    axes[0].bar(values, [found.tokens_per_s for found in predictions])
    axes[0].set_title("trained tokens/s")
    axes[1].plot(values, [found.trainer_idle for found in predictions], marker="o", label="trainers")
    axes[1].plot(values, [found.server_idle for found in predictions], marker="o", label="servers")
    axes[1].set_title("idle share")
    axes[1].set_ylim(0, 1)
    axes[1].legend()
    axes[2].plot(values, [found.mean_age for found in predictions], marker="o")
    axes[2].set_title("mean staleness in versions")
    for axis in axes:
        axis.set_xlabel(key)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def save_sweep(
    run_dir: Path, key: str, values: Sequence[str], predictions: Sequence[Prediction], title: str
) -> Path:  # fmt: skip
    """Write a sweep into a run directory, where the dashboard finds it; returns its path."""
    path = run_dir / "sweeps" / f"{key}.json"
    saved = {"key": key, "title": title, "values": list(values), "predictions": [as_json(p) for p in predictions]}
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(saved))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    return path


def as_json(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON."""
    found = prediction
    return {
        "tokens_per_s": found.tokens_per_s,
        "answer_tokens_per_s": found.answer_tokens_per_s,
        "step_s": found.step_s,
        "wait_s": found.mean("wait_s"),
        "train_s": found.mean("train_s"),
        "update_s": found.mean("update_s"),
        "trainer_idle": found.trainer_idle,
        "server_idle": found.server_idle,
        "mean_running": found.mean_running,
        "preemptions": found.num_preemptions,
        "most_in_flight": found.most_in_flight,
        "staleness_mean": found.mean_age,
        "sample_ages": found.sample_ages,
        "token_ages": found.token_ages,
        "close_leads": found.close_leads,
    }
