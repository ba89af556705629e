"""Renders docs/architecture/*.puml to SVG (`make diagrams`).

Needs PlantUML and Graphviz, and a Chinese font to measure text: apt install plantuml graphviz fonts-wqy-microhei
Every SVG ends with the fingerprint of its sources, by which a test finds one that was not rendered again.
"""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "architecture"


def fingerprint(source: Path) -> str:
    """Return a hash of a diagram and of the files that it includes."""
    text = source.read_text()
    included = [(source.parent / name).read_text() for name in re.findall(r"^!include (\S+)", text, re.MULTILINE)]
    return hashlib.sha256("\n".join([text, *included]).encode()).hexdigest()[:16]


def mark(source: Path) -> str:
    """Return the line with which the SVG of a diagram ends."""
    return f"<!-- rendered from {source.name} {fingerprint(source)} -->\n"


def render(source: Path) -> None:
    """Write the SVG beside its source."""
    command = ["plantuml", "-charset", "UTF-8", "-tsvg", "-nometadata", "-failfast2", str(source)]
    subprocess.run(command, check=True, timeout=120)
    target = source.with_suffix(".svg")
    # The comments hold the version of PlantUML, and in some versions the source.
    drawing = re.sub(r"<!--.*?-->", "", target.read_text(), flags=re.DOTALL)
    # Pages may be dark; and an image has to keep its proportions when it is scaled.
    drawing = re.sub(r'preserveAspectRatio="none" style="[^"]*"', 'style="background:#fff"', drawing, count=1)
    target.write_text(f"{drawing.strip()}\n{mark(source)}")


def main() -> None:
    if shutil.which("plantuml") is None:
        sys.exit("PlantUML is not installed: apt install plantuml graphviz fonts-wqy-microhei")
    for source in sorted(FOLDER.glob("*.puml")):
        target = source.with_suffix(".svg")
        if not target.exists() or not target.read_text().endswith(mark(source)):
            print(source.name)
            render(source)


if __name__ == "__main__":
    main()
