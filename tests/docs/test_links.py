"""Links in the Markdown files of the repository lead to files and headings that exist; the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmark/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
    if ".venv" not in path.parts
)
CODE = re.compile(r"^(```+|~~~+).*?^\1 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)|<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"")


def anchors(page: Path) -> set[str]:
    """Return the anchors that a code host gives to the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?)(?: +#+)?$", CODE.sub("", page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


def broken_links(page: Path) -> list[str]:
    links = ["".join(match) for match in LINK.findall(CODE.sub("", page.read_text()))]
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if target.is_relative_to(ROOT / "docs" / "reference"):
            # Made when the site is built, which checks these links.
            continue
        known = anchor and target.suffix == ".md" and target.is_file()
        if not target.exists() or (known and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_a_broken_link_and_a_broken_anchor_are_found(tmp_path):
    (tmp_path / "b.md").write_text("# Two words: `code`\n```\n# no heading\n```\n")
    page = tmp_path / "a.md"
    page.write_text("[1](b.md#two-words-code) [2](c.md) [3](b.md#no-heading) [4](https://a.b) ```[5](d.md)```")
    assert broken_links(page) == ["c.md", "b.md#no-heading", "d.md"]


def test_no_page_needs_a_script_from_elsewhere():
    """The theme would load Mermaid from a content delivery network."""
    assert [page.name for page in PAGES if re.search(r"^```+ ?mermaid", page.read_text(), re.MULTILINE)] == []


@pytest.mark.slow
def test_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    build = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*href=\"?(?:https?:)?//"
    )
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert len(pages) > 20
    assert not [match[0] for page in pages for match in [loads.search(page)] if match]
    assert 'class="arithmatex"' not in "".join(pages)
