"""The dashboard's page in a real Chromium: every view, hostile text, filters, live runs, a phone, both themes."""

import csv
import io
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arealite.dashboard.app import STATIC
from tests.dashboard.browser import PHONE, Pages, serve, visit
from tests.dashboard.make_run import HOSTILE, make_run

pytestmark = pytest.mark.browser
VIEWS = {
    "curves": ".chart-card",
    "timeline": ".lanes canvas",
    "rollouts": ".row[data-key]",
    "events": ".event",
    "config": ".yaml div",
    "logs": ".line",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one that ended before its first step, and one of supervised training."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    make_run(folder / "first", steps=60, rollouts=2_400)
    make_run(folder / "second", steps=30, rollouts=480, seed=1)
    (folder / "empty" / "logs").mkdir(parents=True)
    (folder / "empty" / "config.yaml").write_text("experiment_name: sums\ntrial_name: empty\n")
    (folder / "supervised" / "logs").mkdir(parents=True)
    (folder / "supervised" / "config.yaml").write_text("model: {path: m}\n")
    lines = (json.dumps({"step": step, "time": 1.7e9 + step, "nll": 3 - step / 10, "loss": 3.0}) for step in range(9))
    (folder / "supervised" / "stats.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with serve(runs) as found:
        yield found


def is_untouched(page: Any) -> bool:
    """Say whether no script came out of text: neither ran nor stands in the page."""
    return page.evaluate(
        """() => window.pwned === undefined && !document.querySelector('#view script, #view svg[onload], img[src="x"]')
        && [...document.querySelectorAll('#view *')].every((node) =>
            [...node.attributes].every((attribute) => !attribute.name.startsWith('on')))"""
    )


@pytest.mark.parametrize("view", VIEWS)
def test_view_shows_a_run_and_text_stays_text(pages: Pages, view: str):
    page = visit(pages, "first", view)
    page.locator(VIEWS[view]).first.wait_for()
    page.locator(f"#tabs a[aria-selected=true]:has-text('{view.capitalize()}')").wait_for()
    assert is_untouched(page)


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_an_empty_run_says_what_is_missing(pages: Pages, view: str):
    page = visit(pages, "empty", view)
    text = page.locator(".yaml" if view == "config" else ".empty").first.inner_text()
    assert len(text) > 20


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_never_scrolls_sideways(pages: Pages, view: str, dark: bool):
    page = visit(pages, "first", view, size=PHONE, dark=dark)
    page.locator(VIEWS[view]).first.wait_for()
    wide = """() => ['html', 'body', 'main', '.list', '.detail-pane'].filter((name) => {
        const node = document.querySelector(name); return node && node.scrollWidth > node.clientWidth + 1 })"""
    assert page.evaluate(wide) == []
    if view == "rollouts":
        page.locator(".row[data-key]").first.click()
        page.locator(".message").first.wait_for()
        assert page.evaluate(wide) == []
        page.locator(".back").click()
        page.locator(".row[data-key]").first.wait_for()


def test_conversations_show_calls_and_results_of_tools(pages: Pages):
    page = visit(pages, "first", "rollouts", "?sel=stream/7/0")
    page.locator(".message.assistant .tool-call:has-text('tool call: calculator')").wait_for()
    page.locator(".message.user .tool-call:has-text('84')").wait_for()
    assert page.locator(".message.assistant").count() == 2


def test_conversations_show_images_and_how_many_were_not_recorded(pages: Pages, runs: Path):
    with sqlite3.connect(runs / "first" / "run.sqlite") as db:
        (episode,) = db.execute("SELECT episode FROM rollouts WHERE images = 1 LIMIT 1").fetchone()
    page = visit(pages, "first", "rollouts", f"?sel=stream/{episode}/0")
    image = page.locator(".message.user img.picture")
    image.wait_for()
    page.wait_for_function("() => document.querySelector('img.picture').complete")
    assert image.evaluate("(node) => [node.naturalWidth, node.naturalHeight]") == [24, 16]
    page = visit(pages, "first", "rollouts", f"?sel=stream/{episode}/5")
    page.locator(".pictures:has-text('1 image was not recorded')").wait_for()
    assert page.locator("img.picture").count() == 0


def test_supervised_runs_have_curves_and_no_rollouts(pages: Pages):
    page = visit(pages, "supervised", "rollouts")
    page.locator(".chart-card h3:has-text('Negative log-likelihood')").wait_for()
    assert "#/curves/" in page.url and page.locator("#tabs a").count() == 5
    page.keyboard.press("2")
    page.locator(".section-title:has-text('Who waits')").wait_for()
    assert page.locator(".section-title").count() == 1


def test_theme_follows_the_system_and_the_switch(pages: Pages):
    page = pages.open(dark=True)
    background = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.locator("#theme").click()
    light = page.evaluate(background)
    assert light != dark
    page.reload()
    assert page.evaluate(background) == light


def test_curves_find_a_statistic_zoom_and_export(pages: Pages, runs: Path):
    page = visit(pages, "first", "curves", "?x=time&log=1")
    page.locator(".chart-card").first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("grad_norm")
    # The page may still follow the typing.
    page.locator(".chart-card").nth(1).wait_for(state="detached")
    page.locator(".chart-card h3:text-is('grad_norm')").wait_for()
    page.wait_for_url(re.compile("find=grad_norm"))
    with page.expect_download() as saved:
        page.locator("[aria-label='Save as CSV: grad_norm']").click()
    rows = (runs / "first" / "stats.jsonl").read_text().splitlines()
    assert len(Path(saved.value.path()).read_text().splitlines()) == len(rows) + 1
    with page.expect_download() as saved:
        page.locator("[aria-label='Save as PNG: grad_norm']").click()
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")
    box = page.locator(".chart").first.bounding_box()
    page.mouse.move(box["x"] + 120, box["y"] + 60)
    page.locator("#tip:has-text('grad_norm')").wait_for()
    page.mouse.down()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.up()
    page.locator("text=Reset zoom").click()
    page.locator("text=Reset zoom").wait_for(state="hidden")


def test_two_runs_are_overlaid_and_their_settings_compared(pages: Pages):
    page = visit(pages, "first", "curves")
    page.locator("[aria-label='Overlay second']").check()
    page.locator(".legend .chip:has-text('second')").wait_for()
    page.locator("#tabs a:has-text('Config')").click()
    page.locator(".diff-table th:text-is('actor.optimizer.lr')").wait_for()


def test_timeline_zooms_and_keeps_its_window_in_the_link(pages: Pages):
    page = visit(pages, "first", "timeline")
    page.locator(".wait-row").first.wait_for()
    page.keyboard.press("w")
    page.keyboard.press("w")
    page.wait_for_url(re.compile("start="))
    page.locator(".flow").wait_for()
    page.locator(".age-map canvas").wait_for()
    page.reload()
    page.wait_for_function("() => /^\\d.*from [1-9]/.test(document.querySelector('.toolbar .num')?.textContent)")
    page.keyboard.press("0")
    page.wait_for_function("() => !location.hash.includes('start=')")


def rows_on(page: Any) -> list[str]:
    return page.locator(".row[data-key]").evaluate_all("(nodes) => nodes.map((node) => node.textContent)")


def test_filters_choose_rollouts_and_stay_in_the_link(pages: Pages):
    page = visit(pages, "first", "rollouts")
    page.locator(".row[data-key]").first.wait_for()
    status = page.locator(".filters [role=status]")
    before = status.inner_text()
    page.locator("[data-more]").click()
    page.locator("[name=min_reward]").fill("1")
    page.locator("[name=step_to]").fill("9")
    page.wait_for_url(re.compile("step_to=9"))
    page.wait_for_function(
        """(before) => ![before, ''].includes(document.querySelector('.filters [role=status]').textContent)
        && [...document.querySelectorAll('.row-side')].every((node) => node.textContent.match(/step \\d$/))""",
        arg=before,
    )
    found = int(status.inner_text().split()[0].replace(",", ""))
    assert 0 < found < 400
    rows = page.evaluate("async () => (await fetch(document.querySelector('a[download]').href)).text()")
    assert len(list(csv.DictReader(io.StringIO(rows)))) == found
    page.reload()
    page.locator(".filters [role=status]", has_text=re.compile(f"^{found} ")).wait_for()
    page.locator("[name=text]").fill("no answer has these words")
    page.locator("text=No rollout matches").wait_for()


def test_the_list_is_virtual_and_keys_move_through_it(pages: Pages):
    page = visit(pages, "first", "rollouts")
    page.locator(".row[data-key]").first.wait_for()
    assert len(rows_on(page)) < 60
    total = page.locator(".list").get_attribute("aria-rowcount")
    assert int(total) >= 2_400
    page.locator(".list").evaluate("(node) => { node.scrollTop = node.scrollHeight }")
    page.locator(f".row[data-key][aria-rowindex='{total}']").wait_for()
    assert len(rows_on(page)) < 60
    page.locator(".list").evaluate("(node) => { node.scrollTop = 0 }")
    page.locator(".row[aria-rowindex='1']").click()
    for _ in range(3):
        page.keyboard.press("j")
    page.locator(".row[aria-rowindex='4'][aria-selected=true]").wait_for()


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_is_shown_as_it_is(pages: Pages, runs: Path, text: str):
    ledger = sqlite3.connect(runs / "first" / "run.sqlite")
    with ledger:
        query = """SELECT source, episode, sample FROM rollouts JOIN rollout_data USING(id)
            WHERE instr(completion, ?) LIMIT 1"""
        key = "/".join(map(str, ledger.execute(query, (text,)).fetchone()))
    ledger.close()
    page = visit(pages, "first", "rollouts", f"?sel={key}")
    page.locator(".message").last.wait_for()
    shown = page.locator(".message .text").evaluate_all("(nodes) => nodes.map((node) => node.textContent).join(' ')")
    # The ledger escapes overrides of the writing direction; the page names what it finds.
    for hidden, name in {"\u202e": "\\u202e", "\u202c": "\\u202c", "\u200b": "ZWSP", "\ufeff": "BOM"}.items():
        text = text.replace(hidden, name)
    # The run has the tokens of the first 2,000 characters.
    assert text[:1_000] in shown
    for tab in ("Tokens", "Group", "Across steps"):
        page.locator(f".detail-tabs button:has-text('{tab}')").click()
        page.locator(".detail-body > *").first.wait_for()
        assert is_untouched(page)


def test_characters_that_hide_or_reorder_text_are_named(pages: Pages):
    page = pages.open()
    script = "async (text) => (await import('/static/text.js')).longText(text).textContent"
    shown = {"a\u202eb": "aRLOb", "\u200b\u2066\x00\x1b[31m": "ZWSPLRI␀␛[31m", "x\u0085\U000e0041": "xU+0085U+E0041"}
    assert {text: page.evaluate(script, text) for text in shown} == shown
    assert page.evaluate(script, "👩\u200d👧 \U0001f1e9 café\n\tok") == "👩\u200d👧 \U0001f1e9 café\n\tok"


def test_ten_megabytes_of_text_are_shown_in_parts(pages: Pages):
    page = visit(pages, "first", "rollouts")
    size = page.evaluate(
        """async () => {
        const { longText } = await import('/static/text.js');
        const box = longText('0123456789'.repeat(1_000_000));
        document.getElementById('view').replaceChildren(box);
        return box.textContent.length }"""
    )
    assert 10_000 < size < 100_000


def test_differences_of_texts_put_both_together_again(pages: Pages):
    page = pages.open()
    pairs = [
        ["", ""],
        ["", "new"],
        ["a b c", "a c b"],
        ["one\ntwo three", "one\n2 three four"],
        ["x" * 50, "y " * 4000],
    ]
    for before, after in pairs:
        parts = page.evaluate("async ([a, b]) => (await import('/static/diff.js')).diffWords(a, b)", [before, after])
        assert "".join(text for kind, text in parts if kind != "added") == before
        assert "".join(text for kind, text in parts if kind != "removed") == after


def test_shortcuts_lead_to_every_view_and_are_listed(pages: Pages):
    page = visit(pages, "first", "curves")
    page.locator(".chart-card").first.wait_for()
    for number, view in enumerate(VIEWS, start=1):
        page.keyboard.press(str(number))
        page.locator(f"main[data-view={view}]").wait_for()
    page.keyboard.press("?")
    page.locator("dialog[open] kbd:text-is('?')").wait_for()
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="hidden")


def test_every_control_has_a_name(pages: Pages):
    for view in VIEWS:
        page = visit(pages, "first", view)
        page.locator(VIEWS[view]).first.wait_for()
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, a[href], [tabindex="0"]')].filter((node) =>
            !node.hidden && !node.ariaLabel && !node.textContent.trim() && !node.labels?.length && !node.title)
            .map((node) => node.outerHTML.slice(0, 200))"""
        )
        assert nameless == []


@pytest.fixture
def live(tmp_path: Path, browser: Any) -> Iterator[tuple[Pages, Path, Callable[[int, float], None]]]:
    """A run that is still written to: pages, its folder, and a function that writes one row of statistics."""
    run = make_run(tmp_path / "live" / "now", steps=5, rollouts=80)

    def write(step: int, reward: float) -> None:
        row = json.loads(run.stats_path.read_text().splitlines()[-1])
        with run.stats_path.open("a") as file:
            file.write(json.dumps({**row, "step": step, "time": row["time"] + 1, "reward": reward}) + "\n")

    with run.lock(), serve(tmp_path / "live") as address:
        pages = Pages(browser, address)
        yield pages, run.path, write
        pages.close()
        assert pages.problems == []


def test_a_live_run_updates_without_new_nodes(live: tuple[Pages, Path, Callable[[int, float], None]]):
    pages, _, write = live
    page = pages.open("#/curves")
    card = page.locator(".chart-card:has(h3:text-is('Reward'))")
    card.wait_for()
    card.evaluate("(node) => { node.dataset.seen = 'yes' }")
    page.locator("[aria-label='Smoothing']").fill("0")
    write(5, 123.0)
    page.locator(".chart-card[data-seen=yes] .readout b:text-is('123')").wait_for()


def test_a_log_of_a_live_run_is_followed(live: tuple[Pages, Path, Callable[[int, float], None]]):
    pages, run, _ = live
    (run / "logs" / "a.log").write_text("\x1b[31mfirst\x1b[0m\n")
    page = pages.open("#/logs")
    page.locator(".line:text-is('first')").wait_for()
    for text, shown in (("\x1b[32msecond\x1b[0m é", "second é"), ("10%\r20%", "20%"), ("last", "last")):
        with (run / "logs" / "a.log").open("a") as file:
            file.write(text + "\n")
        page.locator(".line").nth(-1).filter(has_text=shown).wait_for()
    assert page.locator(".line").count() == 4


def test_every_module_is_loaded_ahead_of_time():
    page = (STATIC / "index.html").read_text()
    modules = {file.name for file in STATIC.glob("*.js")} - {"theme.js", "main.js"}
    assert set(re.findall(r'modulepreload" href="static/([^"]+)"', page)) == modules


def test_timeline_shows_chains_advice_and_sweeps(pages: Pages, runs: Path):
    folder = runs / "first" / "sweeps"
    folder.mkdir(exist_ok=True)
    predicted = {"step_s": 9.0, "trainer_idle": 0.1, "server_idle": 0.4, "staleness_mean": 1.0}
    saved = {"key": "eta", "title": HOSTILE[1], "values": ["0", "4"]}
    saved["predictions"] = [{"tokens_per_s": rate, **predicted} for rate in (1e5, 2e5)]
    (folder / "eta.json").write_text(json.dumps(saved))
    (folder / "damaged.json").write_text('{"values": 3}')
    page = visit(pages, "first", "timeline")
    assert "The trainer waited" in page.locator(".foresee-sentence").inner_text()
    assert page.locator(".foresee-waits .wait-row").count() == 8
    assert "generation of episode" in page.locator(".foresee-waits").inner_text()
    assert page.locator(".foresee-helps .foresee-chart canvas").count() == 4
    assert page.locator(".foresee-sweeps .foresee-chart").count() == 3, "the damaged file is left out"
    assert "200k" in page.locator(".foresee-sweeps .chart").first.get_attribute("aria-label")
    assert is_untouched(page)
