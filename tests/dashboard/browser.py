"""A real Chromium and a real dashboard for tests of the page."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from arealite.dashboard.app import make_app

DESKTOP, PHONE = (1440, 900), (390, 844)
# Answers of the API that a test does not ask for are logged by Chromium too.
_START_S = 30


@contextmanager
def serve(*roots: Path) -> Iterator[str]:
    """Serve the runs below `roots` from a thread; yields the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="dashboard")
    thread.start()

    async def start() -> tuple[web.AppRunner, int]:
        runner = web.AppRunner(make_app(list(roots)), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, runner.addresses[0][1]

    runner, port = asyncio.run_coroutine_threadsafe(start(), loop).result(_START_S)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(_START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_START_S)
        loop.close()


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium; yields Playwright's browser."""
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox does not work for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class Pages:
    """Opens pages and collects what goes wrong in them: uncaught errors, errors in the console, outside requests."""

    def __init__(self, browser: Any, address: str):
        self._browser, self._address = browser, address
        self._contexts: list[Any] = []
        self.problems: list[str] = []

    def open(self, link: str = "", size: tuple[int, int] = DESKTOP, dark: bool = False) -> Any:
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            has_touch=size == PHONE,
        )
        self._contexts.append(context)
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("request", lambda request: self._note_request(request.url))
        page.goto(self._address + link)
        return page

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(f"{kind}: {text}")

    def _note_request(self, url: str) -> None:
        if not url.startswith((self._address, "data:", "blob:")):
            self.problems.append(f"request to another server: {url}")

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def link(page: Any, name: str, view: str, query: str = "") -> str:
    """Return the hash of a view of the run with this name."""
    found = page.evaluate("async () => (await (await fetch('api/runs')).json()).runs")
    return f"#/{view}/{next(run['id'] for run in found if run['name'].endswith(name))}{query}"


def visit(pages: Pages, name: str, view: str, query: str = "", **options: Any) -> Any:
    page = pages.open(**options)
    page.goto(page.url.split("#")[0] + link(page, name, view, query))
    return page
