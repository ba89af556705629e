"""How fast is the dashboard's page with a large run?

Writes a run of 500 steps and 100,000 rollouts, serves it from a process of its own, and opens the page in Chromium.
Prints the medians of: first paint, curves drawn, and, from the last key to the drawn list, filters and orders of
rollouts. Needs Chromium and the extra `browser`.
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

# Text of the status line changes when the answer has been drawn.
_FILTERS = {
    "search a word that many answers have": ("text", "train speed"),
    "search words that no answer has": ("text", "no answer has these words"),
    "reward of at least 1": ("min_reward", "1"),
    "steps 400 and later": ("step_from", "400"),
    "answers of 200 tokens and more": ("min_tokens", "200"),
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


def measure_filter(page: Any, name: str, value: str, repeats: int) -> float:
    """Return the milliseconds from typing to the drawn list, with the page's pause of 60 ms for further keys."""
    script = """([name, value]) => new Promise((resolve) => {
        const began = performance.now();
        const observer = new MutationObserver(() => { observer.disconnect();
            requestAnimationFrame(() => resolve(performance.now() - began)) });
        observer.observe(document.querySelector('.filters [role=status]'), { childList: true, attributes: true });
        const field = document.querySelector(`[name=${name}]`);
        field.value = value;
        field.dispatchEvent(new Event('input')) })"""
    times = []
    for _ in range(repeats):
        times.append(page.evaluate(script, [name, value]))
        page.evaluate(script, [name, ""])
    return statistics.median(times)


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
                times = measure_paint(browser, url, options.repeats)
                page = browser.new_page()
                page.goto(f"{url}#/rollouts")
                page.locator(".row[data-key]").first.wait_for()
                page.locator("[data-more]").click()
                for title, (name, value) in _FILTERS.items():
                    times[title] = measure_filter(page, name, value, options.repeats)
        finally:
            stop.set()
            server.join(30)
    print_table(["what", "ms"], [[title, f"{ms:.0f}"] for title, ms in times.items()])
    sizes = {"steps": options.steps, "rollouts": options.rollouts}
    print(json.dumps({**sizes, "ms": {title: round(ms, 1) for title, ms in times.items()}, **describe_machine()}))


if __name__ == "__main__":
    main()
