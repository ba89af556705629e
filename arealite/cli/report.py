"""Summarizes a run: `arealite report RUN_DIR [--steps N] [--rollouts N] [--what-if KEY=VALUE …]`.

Shows a sample of the steps, the time per phase, what the trainer waited for, all evaluations, the outcome of the
episodes, and a few rollouts as text. `--what-if servers=2` predicts the run with other settings, from its recorded
durations; `--json` prints waits and predictions for programs. Of a run without a finished step it says what
`arealite doctor` finds. Changes nothing in the run directory.
"""

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator
from functools import partial
from typing import Any

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from arealite.api.errors import CheckpointError, ConfigError
from arealite.cli.arguments import ArgumentParser
from arealite.cli.foresight import analyse, answer_lines, wait_lines
from arealite.core.ledger.reading import open_ledger
from arealite.doctor.collect import collect
from arealite.doctor.evidence import read_evidence
from arealite.doctor.rules import diagnose
from arealite.trainer.output.eval_report import evaluation_table, set_names
from arealite.trainer.stats_logger import SUPERVISED_COLUMNS, read_stats
from arealite.utils.config import print_to_pipe, run_main
from arealite.utils.console import COLUMNS, clock, step_table
from arealite.utils.rundir import RunDir
from arealite.utils.text import clean
from arealite.utils.trace.trace_file import Lane, read_trace

_MAX_TEXT = 400
_MAX_ALARMS = 20
# Of a run without a finished step: most lines of evidence, and the wait of a process that counts as a hang.
_MAX_EVIDENCE, _PATIENCE_S = 8, 60.0
_STARTUP = "time/startup/"
_right = partial(rich_table.Column, justify="right")


def main(argv: list[str]) -> None:
    parser = ArgumentParser("report", __doc__, "arealite report runs/demo/reverse --steps 30 --rollouts 0")
    parser.add_argument("run_dir", help="the run directory, such as runs/demo/reverse")
    parser.add_argument("--steps", type=int, default=15, help="rows of the table of steps (default: 15)")
    parser.add_argument("--rollouts", type=int, default=3, help="rollouts shown as text (default: 3)")
    parser.add_argument(
        "--what-if", nargs="+", metavar="KEY=VALUE", help="predict the run with other settings, such as servers=2"
    )
    parser.add_argument("--json", action="store_true", help="print what each step waited for as JSON, and nothing else")
    options = parser.parse_args(argv)
    for name in ("steps", "rollouts"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name} is {getattr(options, name)}: give 0 or more")
    run_dir = RunDir(options.run_dir)
    run_dir.check()
    if options.json:
        return print_to_pipe(json.dumps(analyse(run_dir, options.what_if)))
    if options.what_if:
        return print_to_pipe("\n".join(answer_lines(run_dir, options.what_if)))
    console = Console()
    console.print(f"run {run_dir.path}", soft_wrap=True)
    every = read_stats(run_dir)
    # The evaluation before the first step is no step.
    steps = [step for step in every if step["step"] >= 0]
    if steps:
        console.print(steps_table(steps, options.steps, console.width))
        for line in startup_lines(steps):
            console.print(line, markup=False, soft_wrap=True)
        console.print(time_table(steps))
        if waits := wait_seconds(read_trace(run_dir.trace_path)):
            console.print(waits_table(waits))
        for line in wait_lines(run_dir, steps):
            console.print(line, markup=False, soft_wrap=True, highlight=False)
        for line in alarm_texts(run_dir) or alarm_lines(steps):
            console.print(line, markup=False, soft_wrap=True, highlight=False)
    evaluations = [(step["step"], step) for step in every if set_names(step)]
    if evaluations:
        console.print(evaluation_table(evaluations))
    if not steps:
        for line in no_step_lines(run_dir, is_evaluated=bool(evaluations)):
            console.print(line, markup=False, soft_wrap=True, highlight=False)
    if run_dir.db_path.exists():
        _print_episodes(console, run_dir, options.rollouts)


def no_step_lines(run_dir: RunDir, is_evaluated: bool = False) -> list[str]:
    """Say why a run has no finished step, the evidence for it, and what to do."""
    case = collect(run_dir.path, _PATIENCE_S, with_stacks=False)
    read_evidence(case)
    finding = diagnose(case)[0]
    is_over = not any(process.is_running for process in case.processes)
    if finding.kind == "finished" and is_evaluated:
        return []
    if finding.kind == "healthy" or (not case.processes and run_dir.is_in_use()):
        return [f"no step is finished yet: the run goes on; {run_dir.logs} shows what it does"]
    verdict, remedy = finding.verdict, f"{finding.remedy}. `arealite doctor {run_dir.path}` shows more"
    if finding.kind == "finished":
        verdict += " without an error"
        remedy = f"see {run_dir.logs}, and check total_train_steps"
    elif finding.kind == "no_status" and run_dir.logs.is_dir() and any(run_dir.logs.iterdir()):
        verdict = "the run has ended, or was made by another version: no process of it has left a status"
        remedy = f"see {run_dir.logs}, and start the run again with recover.mode=auto"
    elif finding.kind == "no_status":
        verdict, remedy = "nothing has run here: there are no logs", "start the run, or give the folder of another"
    lines = [f"no step is finished{'' if is_over else ' yet'}: {verdict}"]
    lines += [f"  - {text}" for text in finding.evidence[:_MAX_EVIDENCE]]
    return [clean(line) for line in (*lines, f"what to do: {remedy}")]


def steps_table(steps: list[dict[str, Any]], num_rows: int, width: int) -> Table:
    """Tabulate at most `num_rows` evenly spaced steps, with the first and the last."""
    columns = COLUMNS if any("reward" in step for step in steps) else SUPERVISED_COLUMNS
    shown = [column for column in columns if any(column.key in step for step in steps)]
    count = max(2, min(num_rows, len(steps)))
    sample = [steps[i] for i in sorted({round(i * (len(steps) - 1) / (count - 1)) for i in range(count)})]
    return step_table(shown, [(step["step"] + 1, step) for step in sample], width, f"{len(steps)} steps")


def alarm_texts(run_dir: RunDir) -> list[str]:
    """Return what alarms said, by the ledger; the newest ones of many."""
    if not run_dir.db_path.exists():
        return []
    query = "SELECT step, text FROM events WHERE level = 'alarm' ORDER BY time DESC"
    with _ledger_of(run_dir) as database:
        found = database.execute(query).fetchall()
    lines = [f"alarm after step {(step or 0) + 1}: {clean(text)}" for step, text in reversed(found[:_MAX_ALARMS])]
    left = len(found) - len(lines)
    return [f"{left} earlier alarms are in run.sqlite, table events", *lines] if left else lines


def alarm_lines(steps: list[dict[str, Any]]) -> list[str]:
    """Return a line for each step that raised alarms, for runs without a ledger."""
    prefix, lines = "alarm/", []
    for step in steps:
        names = [key.removeprefix(prefix) for key in step if key.startswith(prefix)]
        if names:
            lines.append(f"alarms after step {step['step'] + 1}: {', '.join(names)}")
    return lines


def startup_lines(steps: list[dict[str, Any]]) -> list[str]:
    """Return a line for each start of the run: the time until its first update, and its parts."""
    lines = []
    for step in steps:
        seconds = {k.removeprefix(_STARTUP): v for k, v in step.items() if k.startswith(_STARTUP) and v is not None}
        if seconds:
            total_s, parts = seconds.pop("total", sum(seconds.values())), sorted(seconds.items(), key=lambda i: -i[1])
            text = ", ".join(f"{name} {took_s:.1f}" for name, took_s in parts)
            lines.append(f"start before step {step['step'] + 1}: {total_s:.1f} s until its update ({text})")
    return lines


def time_table(steps: list[dict[str, Any]]) -> Table:
    """Tabulate seconds and share of each phase over the whole run."""
    total_s = sum(step.get("time/step") or 0.0 for step in steps)
    keys = {key for step in steps for key in step if key.startswith("time/") and not key.startswith(_STARTUP)}
    names = sorted(keys - {"time/step"})
    seconds = {name: sum(step.get(name) or 0.0 for step in steps) for name in names}
    table = Table("phase", _right("seconds"), _right("share"), title=f"time per phase ({clock(total_s)} in all)")
    seconds["other"] = max(0.0, total_s - sum(seconds.values()))
    for name, spent_s in sorted(seconds.items(), key=lambda item: -item[1]):
        share = spent_s / total_s if total_s else 0.0
        table.add_row(name.removeprefix("time/"), f"{spent_s:.1f}", f"{share:.0%}")
    return table


def wait_seconds(lanes: list[Lane]) -> dict[tuple[str, str], float]:
    """Return the seconds of each kind of wait and of weight updates in the trace, by lane and name."""
    seconds: dict[tuple[str, str], float] = {}
    for lane in lanes:
        for _, took_s, name, _ in lane.spans:
            if took_s is not None and (name.startswith("wait:") or lane.group == "weights"):
                # Without the version of an update.
                key = lane.name, re.sub(r" v\d+$", "", name)
                seconds[key] = seconds.get(key, 0.0) + took_s
    return seconds


def waits_table(seconds: dict[tuple[str, str], float]) -> Table:
    """Tabulate who waited for what, from the trace."""
    table = Table("lane", "waits and weight updates", _right("seconds"), title="from the trace")
    for (lane, name), took_s in sorted(seconds.items(), key=lambda item: -item[1])[:12]:
        table.add_row(escape(lane), escape(name), f"{took_s:.1f}")
    return table


def _print_episodes(console: Console, run_dir: RunDir, num_rollouts: int) -> None:
    """Print the outcomes of the episodes, and the newest rollouts. A run on fixed data has none."""
    with _ledger_of(run_dir) as database:
        table = episodes_table(database)
        if table.row_count:
            console.print(table)
        _print_rollouts(console, database, num_rollouts)


@contextlib.contextmanager
def _ledger_of(run_dir: RunDir) -> Iterator[sqlite3.Connection]:
    """Open the ledger to read it; raises `CheckpointError` for a damaged one."""
    try:
        with contextlib.closing(open_ledger(run_dir.db_path)) as database:
            yield database
    except sqlite3.Error as error:
        raise CheckpointError(
            f"cannot read the ledger {run_dir.db_path}: {error}. It is damaged or of another arealite version"
        ) from error


def episodes_table(database: sqlite3.Connection) -> Table:
    """Tabulate the outcomes of the episodes, from the ledger."""
    table = Table("outcome", "reason", _right("count"), title="episodes")
    query = "SELECT state, COALESCE(reason, ''), COUNT(*) FROM episodes GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 20"
    for state, reason, count in database.execute(query):
        table.add_row(state, escape(_cut(reason)), str(count))
    return table


def _print_rollouts(console: Console, database: sqlite3.Connection, count: int) -> None:
    """Print the newest rollouts, one per prompt, as plain text: what a model writes is never markup."""
    query = (
        "SELECT r.source, r.step, r.reward, r.oldest_version, r.newest_version, r.tokens, p.text, d.completion FROM "
        "rollouts r JOIN prompts p ON p.id = r.prompt JOIN rollout_data d ON d.id = r.id WHERE r.sample = 0 "
        "ORDER BY r.step DESC, r.episode DESC LIMIT ?"
    )
    for source, step, reward, oldest, newest, tokens, *texts in database.execute(query, (count,)):
        versions = f"versions {oldest}–{newest}"
        where = f"evaluation of version {step}" if source == "direct" else f"step {step + 1}"
        console.rule(f"{where}, reward {reward:g}, {tokens} tokens, {versions}")
        for text, style in zip(texts, ("dim", None), strict=True):
            console.print(_cut(text), markup=False, highlight=False, style=style)


def _cut(text: str) -> str:
    printable = clean(text)
    return printable if len(printable) <= _MAX_TEXT else f"{printable[:_MAX_TEXT]} …"


if __name__ == "__main__":
    run_main(main)
