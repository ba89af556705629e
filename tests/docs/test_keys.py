"""Configuration keys, SQL and commands that the documentation names exist."""

from __future__ import annotations

import re
import sqlite3
import typing
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any

import pytest

from arealite.api.cli_args import DPOConfig, EvalConfig, GRPOConfig, RWConfig, ServerConfig, SFTConfig
from arealite.cli.entry import COMMANDS
from arealite.cli.main import MainConfig
from arealite.core.ledger.database import Database
from tests.docs.workspace import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGS = (MainConfig, GRPOConfig, SFTConfig, RWConfig, DPOConfig, EvalConfig, ServerConfig)
# `actor.optimizer.lr=1e-5`: at least two words before the sign, in code.
KEY = re.compile(r"(?<![\w.\"'(/-])([a-z_]+(?:\.[a-zA-Z_]+)+)=(?!=)")


def has_key(config: Any, words: list[str]) -> bool:
    """Whether a configuration class has a key; what is behind a dict may be anything."""
    options = typing.get_args(config) if typing.get_origin(config) in (UnionType, typing.Union) else (config,)
    if not words or any(typing.get_origin(option) is dict or option is dict for option in options):
        return True
    for option in options:
        if is_dataclass(option) and words[0] in {field.name for field in fields(option)}:
            return has_key(typing.get_type_hints(option)[words[0]], words[1:])
    return False


# Keys of other projects on the pages about moving from them.
FOREIGN = {"actor.importance_sampling_level", "stats_logger.wandb.mode", "algorithm.norm_adv_by_std_in_grpo"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_keys_of_a_page_exist(page):
    code = re.findall(r"^```.*?^```$|`[^`\n]+`", page.read_text(), re.DOTALL | re.MULTILINE)
    keys = {key for text in code for key in KEY.findall(text)} - FOREIGN
    assert sorted(key for key in keys if not any(has_key(config, key.split(".")) for config in CONFIGS)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page):
    named = set(
        re.findall(r"(?<![\w/=])arealite ([a-z]+)(?= |$|`)", " ".join(re.findall(r"`[^`\n]+`", page.read_text())))
    )
    assert named <= {name.split()[0] for name in COMMANDS}


def test_a_key_that_does_not_exist_is_found():
    assert has_key(MainConfig, ["trainer", "grpo", "actor", "optimizer", "lr"]) and has_key(GRPOConfig, ["sglang", "x"])
    assert not has_key(MainConfig, ["trainer", "grpo", "actor", "optimizer", "rate"])
    assert KEY.findall("`actor.path=x` x.y==1 f(a.b=1)") == ["actor.path"]


def test_sql_of_the_debugging_page_runs(tmp_path):
    path = tmp_path / "run.sqlite"
    Database(path).close()
    queries = re.findall(r'sqlite3 RUN_DIR/run.sqlite "(.*?)"', (ROOT / "docs" / "debugging.md").read_text())
    with sqlite3.connect(path) as ledger:
        assert [ledger.execute(query).fetchall() for query in queries] == [[]] * 3
