"""The page counts training steps from 1, as the console and `arealite report` do; files count from 0."""

import csv
import io
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.browser import Pages, serve, visit
from tests.dashboard.make_run import make_run

pytestmark = pytest.mark.browser
STEPS = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps with an evaluation before the first, and an alarm at the stored step 57."""
    path = make_run(tmp_path_factory.mktemp("runs") / "sums" / "counted", steps=STEPS, rollouts=1_200).path
    before = {"step": -1, "time": 1.7e9, "eval/gsm8k/pass@1": 0.1}
    lines = (path / "stats.jsonl").read_text()
    (path / "stats.jsonl").write_text(json.dumps(before) + "\n" + lines)
    return path


@pytest.fixture(scope="module")
def late(run: Path) -> None:
    """The statistics of the same run, and results that `arealite evaluate` has added after its end."""
    path = run.parent / "late"
    path.mkdir()
    path.joinpath("config.yaml").write_text(f"total_train_steps: {STEPS}\n")
    lines = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    added = [
        {"step": step, "time": lines[-1]["time"] + step, "eval/gsm8k/pass@1": 0.25, "eval/gsm8k/sampling/top_p": 1.0}
        for step in (9, 19, 29)
    ]
    path.joinpath("stats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, *added]))


@pytest.fixture(scope="module")
def address(run: Path, late: None) -> Iterator[str]:
    with serve(run.parent) as found:
        yield found


def saved_csv(page: Any, button: str) -> list[dict[str, str]]:
    with page.expect_download() as saved:
        page.locator(button).click()
    return list(csv.DictReader(io.StringIO(Path(saved.value.path()).read_text())))


def test_curves_count_steps_from_1(pages: Pages):
    page = visit(pages, "counted", "curves", "?find=grad_norm")
    page.locator(".chart-card h3:text-is('grad_norm')").wait_for()
    assert page.locator(".kpi:has-text('Step') .kpi-value").first.inner_text() == f"{STEPS} / {STEPS}"
    rows = saved_csv(page, "[aria-label='Save as CSV: grad_norm']")
    trained = [int(row["step"]) for row in rows if row["grad_norm"]]
    assert (trained[0], trained[-1]) == (1, STEPS)
    box = page.locator(".chart").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 60)
    page.locator(f"#tip strong:text-is('step {STEPS}')").wait_for()


def test_evaluations_are_drawn_after_the_step_that_they_follow(pages: Pages):
    """As in the table of `arealite report`: 0 is the evaluation before the first step."""
    page = visit(pages, "counted", "curves")
    rows = saved_csv(page, "[aria-label='Save as CSV: pass@1']")
    steps = [int(row["step"]) for row in rows if any(value for name, value in row.items() if name != "step")]
    assert steps == [0, 20, 40, 60]


@pytest.mark.parametrize("axis", ["step", "time"])
def test_results_of_earlier_checkpoints_hide_no_later_step(pages: Pages, run: Path, axis: str):
    page = visit(pages, "late", "curves", f"?find=grad_norm&x={axis}&smooth=0")
    page.locator(".chart-card h3:text-is('grad_norm')").wait_for()
    assert page.locator(".kpi:has-text('Step') .kpi-value").first.inner_text() == f"{STEPS} / {STEPS}"
    assert page.locator(".kpi-bar").first.evaluate("(node) => node.style.width") == "100%"
    lines = [json.loads(line) for line in (run / "stats.jsonl").read_text().splitlines()]
    values = {line["step"]: line["grad_norm"] for line in lines if "grad_norm" in line}
    times = {line["step"]: line["time"] - lines[0]["time"] for line in lines}
    # What the page reads off at each of the last steps.
    script = """async ([xs]) => {
        const { nearest } = await import('/static/series.js');
        const { scale, data: { series: [{ x, y }] } } = document.querySelector('.chart').chart;
        return [scale.x1 >= xs.at(-1), xs.map((at) => y[nearest(x, y, at)])] }"""
    page.wait_for_function("() => document.querySelector('.chart').chart.scale")
    last = range(STEPS - 15, STEPS)
    xs = [step + 1 if axis == "step" else times[step] for step in last]
    assert page.evaluate(script, [xs]) == [True, [values[step] for step in last]]


def test_an_alarm_leads_to_the_rollouts_of_its_step(pages: Pages, run: Path):
    page = visit(pages, "counted", "events", "?level=alarm")
    page.locator(".event .badge:text-is('step 58')").wait_for()
    page.locator(".event .badge:text-is('rollouts')").click()
    page.wait_for_url(re.compile("step_from=58.*step_to=58"))
    page.locator(".row[data-key]").first.wait_for()
    labels = page.locator(".row-side .muted").evaluate_all("(nodes) => nodes.map((node) => node.textContent)")
    assert set(labels) == {"step 58"}
    with sqlite3.connect(run / "run.sqlite") as db:
        (stored,) = db.execute("SELECT COUNT(*) FROM rollouts WHERE step = 57").fetchone()
    page.locator(".filters [role=status]", has_text=re.compile(f"^{stored} ")).wait_for()
    page.locator(".fact:has-text('step') b:text-is('58')").wait_for()
    rows = page.evaluate("async () => (await fetch(document.querySelector('a[download]').href)).text()")
    assert {row["step"] for row in csv.DictReader(io.StringIO(rows))} == {"58"}


def test_evaluated_rollouts_show_their_version(pages: Pages):
    page = visit(pages, "counted", "rollouts", "?source=direct&desc=0&sel=direct/1/0")
    page.locator(".row[data-key]").first.wait_for()
    labels = page.locator(".row-side .muted").evaluate_all("(nodes) => nodes.map((node) => node.textContent)")
    assert labels == [f"version {version}" for version in range(0, STEPS + 1, 12)]
    page.locator(".fact:has-text('version') b:text-is('12')").first.wait_for()


def test_ages_and_flow_count_steps_from_1(pages: Pages):
    page = visit(pages, "counted", "timeline")
    # Panels move until those above them are filled.
    for name in (".foresee-waits .wait-row", ".foresee-helps canvas", ".lanes canvas", ".flow"):
        page.locator(name).first.wait_for()
    ages = page.locator(".age-map canvas")
    ages.hover(position={"x": 36, "y": 20})
    page.locator("#tip strong:text-is('step 1')").wait_for()
    ages.hover(position={"x": ages.bounding_box()["width"] - 8, "y": 20})
    page.locator(f"#tip strong:text-is('step {STEPS}')").wait_for()
    page.locator("[aria-label^='Episodes by step']").focus()
    for _ in range(STEPS // 20 + 1):
        page.keyboard.press("PageUp")
    page.locator("#tip strong:text-is('step 1')").wait_for()


def test_numbers_that_are_typed(pages: Pages):
    page = pages.open()
    script = (
        "async (texts) => { const { storedStep } = await import('/static/steps.js'); return texts.map(storedStep) }"
    )
    assert page.evaluate(script, ["1", "58", "", "x", None]) == [0, 57, "", "x", None]
