"""How fast is the dashboard's page with a large run?

Writes a run of 500 steps and 100,000 rollouts, serves it from a process of its own, and opens the page in Chromium.
Prints the medians of: first paint, curves drawn, and, from the last key on, the time until the first rollouts of a
filter are drawn and until all of them are counted. Needs Chromium and the extra `browser`.
    python benchmark/dashboard.py [--steps 500] [--rollouts 100000] [--repeats 5]
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import describe_machine, print_table

from tests.dashboard.browser import chromium, serve
from tests.dashboard.make_run import make_run

# Field and what is typed into it. Each text is searched once: its matches are kept then.
_FILTERS = {
    "search a word that most answers have": ("text", ["the", "sum", "both", "sides", "equal"]),
    "search a letter": ("text", ["t", "s", "a", "e", "m"]),
    "search two words": ("text", ["train speed", "second apples", "total number", "price each", "check again"]),
    "search words that no answer has": ("text", ["no answer has this", "nor this"]),
    "reward of at least 1": ("min_reward", ["1"]),
    "steps 400 and later": ("step_from", ["400"]),
    "answers of 200 tokens and more": ("min_tokens", ["200"]),
}


def serve_until_told(folder: Path, address: Any, stop: Any) -> None:
    with serve(folder) as url:
        address.put(url)
        stop.wait()


def measure_paint(browser: Any, url: str, repeats: int) -> dict[str, float]:
    """Return the first paint, and the time until the first curves are drawn, in milliseconds."""
    paints, curves = [], []
    for _ in range(repeats):
        page = browser.new_page()
        page.goto(url)
        page.locator(".chart-card .readout b").first.wait_for()
        curves.append(page.evaluate("performance.now()"))
        entries = "performance.getEntriesByType('paint').find((e) => e.name === 'first-contentful-paint').startTime"
        paints.append(page.evaluate(entries))
        page.close()
    return {"first paint": statistics.median(paints), "curves drawn": statistics.median(curves)}


def measure_filter(page: Any, name: str, values: list[str], repeats: int) -> tuple[float, float]:
    """Return the milliseconds until the first rows are drawn, and until all are counted.

    Both begin with the last key, so they have the page's pause of 60 ms for further keys.
    """
    script = """([name, value]) => new Promise((resolve) => {
        const began = performance.now(), status = document.querySelector('.filters [role=status]');
        let first = null;
        const observer = new MutationObserver(() => requestAnimationFrame(() => {
            first ??= performance.now() - began;
            if (status.textContent.includes('searching')) return;
            observer.disconnect();
            resolve([first, performance.now() - began]) }));
        observer.observe(status, { childList: true, attributes: true });
        const field = document.querySelector(`[name=${name}]`);
        field.value = value;
        field.dispatchEvent(new Event('input')) })"""
    times = []
    for value in values if len(values) > 1 else values * repeats:
        times.append(page.evaluate(script, [name, value]))
        page.evaluate(script, [name, ""])
    return statistics.median(first for first, _ in times), statistics.median(last for _, last in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder) / "benchmark" / "large", options.steps, options.rollouts)
        address, stop = context.Queue(), context.Event()
        server = context.Process(target=serve_until_told, args=(Path(folder), address, stop))
        server.start()
        try:
            url = address.get(timeout=120)
            with chromium() as browser:
                times = {title: (ms, ms) for title, ms in measure_paint(browser, url, options.repeats).items()}
                page = browser.new_page()
                page.goto(f"{url}#/rollouts")
                page.locator(".row[data-key]").first.wait_for()
                page.locator("[data-more]").click()
                for title, (name, values) in _FILTERS.items():
                    times[title] = measure_filter(page, name, values, options.repeats)
        finally:
            stop.set()
            server.join(30)
    rows = [[title, f"{first:.0f}", f"{last:.0f}"] for title, (first, last) in times.items()]
    print_table(["what", "first rows, ms", "all, ms"], rows)
    sizes = {"steps": options.steps, "rollouts": options.rollouts}
    print(
        json.dumps(
            {
                **sizes,
                "ms": {title: [round(each, 1) for each in pair] for title, pair in times.items()},
                **describe_machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
