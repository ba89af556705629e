"""Draws the figures of docs/concepts.md from recorded runs and from benchmark/results.

    python scripts/docs_figures.py                               draw again from runs.json and benchmark/results
    python scripts/docs_figures.py --record SYNC ASYNC DEMO      take runs.json from three run directories first

SYNC and ASYNC are `examples/arealite/demo.py total_train_steps=40` with `rollout.max_head_offpolicyness=0` and `=2`,
one after the other on the same machine; DEMO is the whole demo with 2. runs.json keeps what the trainer did in a window
of some seconds and how many episodes were in flight, and of DEMO how old episodes were when they were trained on.
"""

import argparse
import contextlib
import json
import re
import sqlite3
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmark" / "results"
RECORDED = FIGURES / "runs.json"
# Step after which the pipeline has filled, synchronous steps that are shown, and moments at which episodes are counted.
FIRST_STEP, NUM_STEPS, NUM_MOMENTS = 15, 4, 300
COLOURS = {"rollout": "#d0d3da", "logp": "#d0d3da", "update": "#4063d8", "weights": "#e8833a", "save": "#389826"}
LABELS = {"rollout": "waits for samples", "update": "updates the model", "weights": "publishes weights"}


def window_of(run: Path) -> float:
    """Return how long the shown steps of a run took, in seconds."""
    times = [json.loads(line)["time"] for line in (run / "stats.jsonl").read_text().splitlines()]
    return times[FIRST_STEP + NUM_STEPS] - times[FIRST_STEP]


def record_window(run: Path, window_s: float) -> dict[str, Any]:
    """Return phases of the trainer and episodes in flight during a window."""
    trace = json.loads((run / "trace.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    phases = [event for event in events if event["ph"] == "X" and event["name"] in COLOURS]
    steps = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    # Spans count from the start of the trainer; a step's statistics are written when its last span ends.
    ends = [(event["ts"] + event["dur"]) / 1e6 for event in phases if event["name"] == "save"]
    offset = statistics.median(step["time"] - end for step, end in zip(steps, ends, strict=True))
    start = steps[FIRST_STEP]["time"]
    spans = [(e["name"], e["ts"] / 1e6 + offset - start, e["dur"] / 1e6) for e in phases]
    times = query(run, "SELECT started_at, ended_at FROM episodes WHERE source = 'stream'")
    moments = [start + i * window_s / NUM_MOMENTS for i in range(NUM_MOMENTS)]
    return {
        "window_s": window_s,
        "phases": [(n, round(t, 4), round(d, 4)) for n, t, d in spans if t + d > 0 and t < window_s],
        "in_flight": [sum(begin <= now < (end or now + 1) for begin, end in times) for now in moments],
    }


def record_ages(run: Path) -> dict[str, Any]:
    """Return how many trained episodes had which age at each step, and how many versions samples span."""
    ages = query(
        run, "SELECT step, step - oldest_version, count(*) FROM episodes WHERE state = 'trained' GROUP BY 1, 2"
    )
    spans = query(run, "SELECT newest_version - oldest_version, count(*) FROM rollouts GROUP BY 1")
    return {"ages": ages, "versions_spanned": dict(spans)}


def query(run: Path, sql: str) -> list[tuple[Any, ...]]:
    """Return rows of a run's ledger."""
    with contextlib.closing(sqlite3.connect(f"file:{run / 'run.sqlite'}?mode=ro", uri=True)) as ledger:
        return ledger.execute(sql).fetchall()


def draw_timeline(runs: dict[str, Any], out: Path) -> None:
    """Draw trainer and generation of both runs over the same seconds."""
    figure, axes = plt.subplots(4, 1, figsize=(9, 4.6), sharex=True, height_ratios=[1, 2, 1, 2])
    for i, (name, title) in enumerate((("sync", "synchronous, η = 0"), ("async", "asynchronous, η = 2"))):
        trainer, server, window_s = axes[2 * i], axes[2 * i + 1], runs[name]["window_s"]
        for phase, start, length in runs[name]["phases"]:
            trainer.barh(0, length, left=start, color=COLOURS[phase], height=1, linewidth=0)
        trainer.set(yticks=[0], yticklabels=["trainer"], ylim=(-0.5, 0.5), xlim=(0, window_s))
        trainer.set_title(title, loc="left", fontsize=10)
        counts = runs[name]["in_flight"]
        moments = [j * window_s / NUM_MOMENTS for j in range(NUM_MOMENTS)]
        server.fill_between(moments, counts, step="post", color="#9558b2", alpha=0.6)
        server.set(
            ylabel="episodes\nin flight", ylim=(0, 1.05 * max(max(runs[n]["in_flight"]) for n in ("sync", "async")))
        )
    axes[-1].set_xlabel("seconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in LABELS]
    figure.legend(handles, LABELS.values(), loc="upper right", ncols=3, fontsize=9, frameon=False)
    save(figure, out)


def draw_ages(runs: dict[str, Any], out: Path) -> None:
    """Draw how old the episodes of each batch were."""
    ages = runs["demo"]["ages"]
    steps, kinds = range(1 + max(step for step, _, _ in ages)), sorted({age for _, age, _ in ages})
    counts = Counter({(step, age): count for step, age, count in ages})
    figure, axis = plt.subplots(figsize=(9, 2.4))
    axis.stackplot(
        steps,
        *([counts[step, age] for step in steps] for age in kinds),
        step="post",
        colors=["#389826", "#4063d8", "#e8833a"],
        labels=[f"{age} version{'' if age == 1 else 's'} old" for age in kinds],
    )
    axis.set(xlabel="step", ylabel="episodes of the batch", xlim=(0, max(steps)))
    axis.legend(loc="lower right", fontsize=9)
    save(figure, out)


def draw_staleness(text: str, out: Path) -> None:
    """Draw the final reward by forced staleness, from the table of the benchmark."""
    table = text.partition("Forced (`--forced`)")[2].partition("Forced, with")[0]
    rows = re.findall(r"^\| (\d+) \| [\d.]+ \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    figure, axis = plt.subplots(figsize=(6, 3))
    for column, name, colour in ((1, "decoupled objective", "#4063d8"), (2, "plain PPO ratio", "#cb3c33")):
        seeds = [[float(value) for value in re.findall(r"0\.\d+", row[column].partition("(")[0])] for row in rows]
        eta = [int(row[0]) for row in rows]
        axis.plot(eta, [statistics.mean(each) for each in seeds], marker="o", color=colour, label=name)
        for e, each in zip(eta, seeds, strict=True):
            axis.scatter([e] * len(each), each, s=9, color=colour)
    axis.set(xlabel="age of every sample, in versions", ylabel="final reward", xticks=eta)
    axis.legend(fontsize=9, frameon=False)
    save(figure, out)


def draw_speed(texts: dict[str, str], out: Path) -> None:
    """Draw seconds per step of synchronous and asynchronous training, by what the trainer did."""
    cases = {
        "two cores,\nlog-normal lengths": "lognormal",
        "two cores,\nslow rewards": "slow_reward",
        "one H200": "one_gpu",
    }
    figure, axes = plt.subplots(1, len(cases), figsize=(9, 2.8))
    for axis, (title, case) in zip(axes, cases.items(), strict=True):
        lines = [json.loads(line) for text in texts.values() for line in text.splitlines() if line.startswith("{")]
        measured = next(line["measured"][case] for line in lines if case in line["measured"])
        for x, side in enumerate(("synchronous", "asynchronous")):
            run, bottom = measured[side][0], 0.0
            for phase in ("rollout", "update", "weights"):
                axis.bar(x, run[f"{phase}_s"], bottom=bottom, color=COLOURS[phase], width=0.6)
                bottom += run[f"{phase}_s"]
        axis.set(xticks=[0, 1], xticklabels=["sync", "async"], title=title)
        axis.title.set_fontsize(10)
    axes[0].set_ylabel("seconds per step")
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in LABELS]
    axes[1].legend(handles, LABELS.values(), fontsize=8, frameon=False, loc="upper right")
    save(figure, out)


def save(figure: Any, out: Path) -> None:
    """Write a figure as SVG without a date, so that equal figures are equal files."""
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs=3, type=Path, metavar=("SYNC", "ASYNC", "DEMO"), help="run directories")
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of the figures")
    options = parser.parse_args()
    if options.record:
        window_s = window_of(options.record[0])
        sync, asynchronous = (record_window(run, window_s) for run in options.record[:2])
        recorded = {"sync": sync, "async": asynchronous, "demo": record_ages(options.record[2])}
        RECORDED.write_text(json.dumps(recorded) + "\n")
    runs = json.loads(RECORDED.read_text())
    plt.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "arealite", "axes.spines.top": False, "axes.spines.right": False}
    )
    draw_timeline(runs, options.out / "timeline.svg")
    draw_ages(runs, options.out / "ages.svg")
    draw_staleness((RESULTS / "staleness_cpu.md").read_text(), options.out / "staleness.svg")
    names = ("async_vs_sync_cpu.md", "async_vs_sync_h200.md")
    draw_speed({name: (RESULTS / name).read_text() for name in names}, options.out / "speed.svg")


if __name__ == "__main__":
    main()
