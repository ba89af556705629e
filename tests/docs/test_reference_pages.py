"""The generated reference has every configuration key and every public name of the files that it covers."""

from __future__ import annotations

import ast
import re

import pytest

pytest.importorskip("mkdocs", reason="needs the extra docs")

from arealite.api.cli_args import DPOConfig, EvalConfig, RWConfig, SFTConfig
from arealite.utils.config_help import keys_of
from scripts.docs_reference import GROUPS, ROOT, configuration_page, group_page, index_page, items_of

# Functions that a user calls or overrides, and where they are documented.
EXPECTED = {
    "Contracts": {"InferenceEngine", "TrainEngine", "RolloutWorkflow", "Trainer", "Trajectory"},
    "Trainers": {"PPOTrainer", "SFTTrainer", "Run"},
    "Engines": {"FSDPEngine", "FSDPPPOActor", "RemoteSGLangEngine", "EmbeddedEngine"},
    "Workflows": {"RLVRWorkflow", "MultiTurnWorkflow", "ToolWorkflow", "AgenticWorkflow", "AgentWorkflow"},
    "Rewards": {"CombinedReward", "RewardPool"},
    "Losses": {"clip_loss", "gae", "behaviour_weights"},
    "Weights": {"sync_weights"},
}


def documented_keys(page: str) -> set[str]:
    """Return all keys of the page, with the names of their sections."""
    found, prefix = set(), ""
    for line in page.splitlines():
        if line.startswith("##"):
            section = re.match(r"### `([\w.]+)`", line)
            prefix = f"{section[1]}." if section else ""
        elif key := re.match(r"\| `([\w.]+)` \|", line):
            found.add(prefix + key[1])
    return found


def test_configuration_has_every_key_with_its_help():
    page = configuration_page()
    keys = {key.path: key for cls in (EvalConfig, SFTConfig, RWConfig, DPOConfig) for key in keys_of(cls)}
    assert documented_keys(page) == set(keys)
    assert all(key.text for key in keys.values())
    assert "| `eps_clip` | `float = 0.2` | Lower (and upper) clip range of the ratio. |" in page
    assert "| `experiment_name` | `str`, required |" in page


@pytest.fixture(scope="module")
def index() -> str:
    return index_page()


@pytest.mark.parametrize("title", GROUPS)
def test_a_page_of_the_api_has_its_names_with_docstrings(title, index):
    items, page = items_of(title), group_page(title)
    names = [item.node.name for item in items]
    assert EXPECTED.get(title, set()) <= set(names)
    assert all(f"### `{name}`" in page and f"[`{name}`]" in index for name in names)
    assert [item.node.name for item in items if isinstance(item.node, ast.ClassDef) and not item.summary] == []


def test_every_file_pattern_matches_a_file():
    missing = [
        pattern for patterns in GROUPS.values() for pattern in patterns if not list((ROOT / "arealite").glob(pattern))
    ]
    assert missing == []


def test_the_site_shows_every_generated_page():
    nav = (ROOT / "mkdocs.yml").read_text()
    wanted = ["configuration.md", "api.md", *(f"api/{title.lower()}.md" for title in GROUPS)]
    assert [name for name in wanted if f"reference/{name}" not in nav] == []
