"""Help of configurations: essentials, parts, words, widths, defaults as they are."""

from dataclasses import dataclass

import pytest

from arealite.api.cli_args import GRPOConfig, ServerConfig, SFTConfig
from arealite.api.config_field import help_field
from arealite.api.errors import ConfigError
from arealite.cli.main import MainConfig
from arealite.utils.config_help import CommandHelp, help_text, keys_of, parts_of


@dataclass
class Mine(GRPOConfig):
    """My run."""

    horizon: int = help_field("Steps to look ahead.", 3)


def paths(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2] != " "]


def test_essentials_come_first_then_parts():
    text = help_text(GRPOConfig)
    head, _, parts = text.partition("parts, with their number of keys:")
    for key in ("actor.path", "train_dataset.path", "gconfig.max_new_tokens", "actor.optimizer.lr", "allocation_mode"):
        assert f"\n  {key} " in head
    assert "actor.eps_clip" not in text and "\n  actor " in parts and "\n  run " in parts
    assert "model.optimizer.lr" in help_text(SFTConfig)
    assert len(text.splitlines()) < 80


def test_a_part_has_its_keys_only():
    found = paths(help_text(GRPOConfig, "gconfig"))
    assert found == [key.path for key in keys_of(GRPOConfig) if key.path.startswith("gconfig.")]
    assert all("." not in path or ".NAME" in path for path in paths(help_text(GRPOConfig, "run")))
    # By the end of its path, in a nested tree.
    assert "trainer.grpo.gconfig.n_samples" in paths(help_text(MainConfig, "gconfig"))


def test_all_parts_together_have_every_key():
    everything = paths(help_text(GRPOConfig, "all"))
    assert everything == [key.path for key in keys_of(GRPOConfig)]
    shown = set(paths(help_text(GRPOConfig, "run")))
    for part, *_ in parts_of(GRPOConfig):
        shown |= set(paths(help_text(GRPOConfig, part)))
    # An optional part is a key too: it may be null.
    assert set(everything) - shown <= {"valid_dataset", "critic", "ref", "teacher", "actor.optimizer"}


def test_a_word_finds_keys_anywhere():
    assert paths(help_text(GRPOConfig, "clip_h")) == ["actor.eps_clip_higher"]
    with pytest.raises(ConfigError, match="no part and no key is named 'gconfg': did you mean gconfig"):
        help_text(GRPOConfig, "gconfg")


def test_keys_of_a_class_of_ones_own_are_shown_first():
    text = help_text(Mine)
    assert text.index("horizon") < text.index("actor.path") and "My run." in text


def test_defaults_are_those_of_the_tree():
    defaults = {key.path: key.default for key in keys_of(MainConfig)}
    assert defaults["train_dataset.path"] == "openai/gsm8k"
    assert defaults["trainer.grpo.gconfig.n_samples"] == "8"
    assert {key.path: key.default for key in keys_of(GRPOConfig)}["actor.path"] == "(required)"


@pytest.mark.parametrize("columns", [50, 79, 140])
def test_lines_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    about = CommandHelp("arealite serve", "Serve a model " * 20, (("arealite serve", "now"),))
    for text in (help_text(ServerConfig, "", about), help_text(GRPOConfig, "gconfig")):
        assert max(map(len, text.splitlines())) <= columns


def test_help_stands_below_keys_where_a_column_would_be_narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    lines = help_text(MainConfig, "all").splitlines()
    key = next(i for i, line in enumerate(lines) if line.startswith("  trainer.grpo.actor.optimizer.eps "))
    assert lines[key + 1] == "      AdamW epsilon." and lines[key + 2].startswith("  trainer.grpo.")
    assert any(" = 1.0 " in line and line.endswith(".") for line in help_text(GRPOConfig, "gconfig").splitlines())


def test_defaults_of_a_section_are_those_of_the_tree_around_it():
    lines = {line.split()[0]: line for line in help_text(MainConfig, "actor").splitlines() if line.startswith("  ")}
    defaults = {key.path: key.default for key in keys_of(MainConfig)}
    for name in ("path", "ppo_n_minibatches"):
        key = f"trainer.grpo.actor.{name}"
        assert defaults[key] in lines[key] and "(required)" not in lines[key]
