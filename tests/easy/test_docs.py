"""The Python blocks of the pages about this interface run; those that download a model are compiled."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["python-api.md", "from-trl.md", "from-verl.md", "from-areal.md"])
def test_blocks(name):
    for block in re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.DOTALL | re.MULTILINE):
        code = compile(block, name, "exec")
        if ".train()" not in block:
            exec(code, {})
