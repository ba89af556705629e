"""Every code block of README, the quickstart and the tutorials runs, or is checked as far as this machine allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.workspace import ROOT, Workspace, blocks_of, check_yaml

PAGES = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
# Languages that are not code: trees, tables and output of commands.
PLAIN = {"", "text", "json"}


def names(pages: list[Path]) -> list[str]:
    return [page.stem for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_has_a_test(page):
    for block in blocks_of(page):
        assert block.language in {"python", "bash", "yaml", *PLAIN}, f"{block} has a language that nothing runs"
        if block.test not in ("run", "check"):
            assert (ROOT / block.test).is_file(), f"{block} names the test {block.test}, which does not exist"
        if block.language == "python":
            compile(block.text, str(block), "exec")
        if block.language == "yaml":
            check_yaml(block)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_blocks_run(page, tmp_path):
    workspace = Workspace(tmp_path)
    for block in blocks_of(page):
        is_code = block.language in ("python", "bash") or block.file_name
        if is_code and block.test in ("run", "check"):
            workspace.run(block)


def test_requests_of_curl_say_that_they_are_json():
    """Servers answer other requests with 415: a page of another site could send those."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    requests = [
        command
        for page in pages
        for block in blocks_of(page)
        for command in block.text.replace("\\\n", " ").splitlines()
        if "curl" in command and " -d " in command
    ]
    assert requests and all("Content-Type: application/json" in command for command in requests), requests
