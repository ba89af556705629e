"""Makes the README that a package index shows; everything else of the build is in pyproject.toml.

Relative links work in a checkout and lead nowhere on an index. With AREALITE_REPOSITORY=https://HOST/OWNER/NAME they
lead to the files of this version there. Without it, the text of links stays and images are left out.
"""

import os
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# The exclamation mark of an image, the text, and a target that is no address.
_RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:)([^)\s]+)\)")


def index_readme(text: str, repository: str, version: str) -> str:
    """Return a README whose links do not depend on where it is shown."""

    def link(match: re.Match[str]) -> str:
        mark, label, path = match.groups()
        if not repository:
            return "" if mark else label
        return f"{mark}[{label}]({repository.rstrip('/')}/{'raw' if mark else 'blob'}/v{version}/{path})"

    return _RELATIVE_LINK.sub(link, text)


if __name__ == "__main__":
    url = os.environ.get("AREALITE_REPOSITORY", "")
    source = ROOT.joinpath("arealite", "__init__.py").read_text(encoding="utf-8")
    number = re.findall(r'__version__ = "([^"]+)"', source)[0]
    setup(
        long_description=index_readme(ROOT.joinpath("README.md").read_text(encoding="utf-8"), url, number),
        long_description_content_type="text/markdown",
        project_urls={"Source": url} if url else {},
    )
