"""docs/rewards.md is true: its examples run, and it lists the rewards that ship."""

import re
from pathlib import Path

from arealite.trainer.tasks import REWARDS

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def test_the_examples_run():
    # Fences of examples begin a line; those inside texts do not.
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    names: dict = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "rewards.md", "exec"), names)


def test_all_names_are_listed():
    table = "".join(line for line in PAGE.splitlines() if line.startswith("| `"))
    assert set(REWARDS) <= set(re.findall(r"`(\w+)`", table))


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((\.\./[^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).exists(), target
