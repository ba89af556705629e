"""A real Chromium for all tests of the page."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.dashboard.browser import Pages, chromium, find_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    missing = "playwright (extra browser)" if find_spec("playwright") is None else None
    missing = missing or (None if find_chromium() else "Chromium")
    if missing:
        assert "CI" not in os.environ, f"{missing} must be installed in CI"
        pytest.skip(f"{missing} is not installed")
    with chromium() as started:
        yield started


@pytest.fixture
def pages(browser: Any, address: str) -> Iterator[Pages]:
    """Opens pages; at the end of the test none may have had an error, and no text may have become script."""
    opened = Pages(browser, address)
    yield opened
    opened.close()
    assert opened.problems == []
