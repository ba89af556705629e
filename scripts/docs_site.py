"""Hooks of mkdocs (mkdocs.yml): pages for linked files of the repository, formulas as MathML.

Pages of docs/ link to files elsewhere in the repository, so that the links also work on a code host. The site gets a
page under `repository/` for each file that is linked, and the links point to it.
"""

import html
import os
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# The target of a Markdown link or image, without its anchor.
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[)#])")
IMAGES = {".png", ".svg", ".jpg"}
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".jsonl": "json"}
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Give headings the anchors that they have on a code host."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add a page or image for every file outside of docs/ that a page links to, also over several links."""
    todo = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen: set[Path] = set()
    while todo:
        source = todo.pop()
        for target in repository_links(source, source.read_text()) - seen:
            seen.add(target)
            files.append(file_of(target, config))
            if target.suffix == ".md":
                todo.append(target)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace links to files of the repository by links to their pages on the site."""
    source = source_of(page.file.src_uri)
    here = os.path.dirname(page.file.src_uri)

    def replace(match: re.Match[str]) -> str:
        target = resolve(source, match[1])
        known = target is not None and (is_outside(target) or is_outside(source))
        return os.path.relpath(site_uri(target), here or ".") if known and target else match[1]

    return LINK.sub(replace, markdown)


def on_page_content(content: str, **_: object) -> str:
    """Replace formulas by MathML, which browsers draw without a script."""

    def replace(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]), display=display)

    return FORMULA.sub(replace, content)


def repository_links(source: Path, markdown: str) -> set[Path]:
    """Return the existing files and folders outside of docs/ that `markdown` links to."""
    targets = {resolve(source, link) for link in LINK.findall(markdown)}
    return {target for target in targets if target and is_outside(target)}


def resolve(source: Path, link: str) -> Path | None:
    """Return the path that a link of the file `source` leads to, None if there is none in the repository."""
    path = (source.parent / link).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def is_outside(path: Path) -> bool:
    """Return whether `path` is not a page of docs/."""
    return not path.is_relative_to(DOCS)


def site_uri(target: Path) -> str:
    """Return the source address on the site of a path of the repository."""
    if not is_outside(target):
        return target.relative_to(DOCS).as_posix()
    name = f"repository/{target.relative_to(ROOT).as_posix()}"
    if target.is_dir():
        return f"{name}/index.md"
    return name if target.suffix in IMAGES | {".md"} else f"{name}.md"


def source_of(src_uri: str) -> Path:
    """Return the file of the repository from which a page of the site was made."""
    prefix, _, rest = src_uri.partition("/")
    return ROOT / rest if prefix == "repository" else DOCS / src_uri


def file_of(target: Path, config: MkDocsConfig) -> File:
    """Return the page or image that shows a path of the repository."""
    uri = site_uri(target)
    if target.suffix in IMAGES:
        return File.generated(config, uri, abs_src_path=str(target))
    title = target.relative_to(ROOT).as_posix()
    if target.suffix == ".md":
        body = target.read_text()
    elif target.is_dir():
        body = f"# {title}/\n\n" + "\n".join(f"- `{path.name}`" for path in sorted(target.iterdir()))
    else:
        body = f"# {title}\n\n````{LANGUAGES.get(target.suffix, 'text')}\n{target.read_text()}\n````\n"
    head = f"---\ntitle: {target.name}\nsearch: {{exclude: true}}\n---\n\n"
    return File.generated(config, uri, content=head + body)
