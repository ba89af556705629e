"""A model that cannot be downloaded is refused at once, and a hub that may be reached is left to its library."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import ConfigError
from arealite.dataset import hub, load_tokenizer
from arealite.dataset.hub import check_hub
from arealite.trainer.tasks import find_reward


@pytest.fixture
def without_hub(monkeypatch, tmp_path) -> Path:
    """No host has a name that ends with `.invalid`. Returns the cache."""
    for name in ("all", "http", "https"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name.upper()}_PROXY", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(hub, "_PAUSE_S", 0.0)
    return tmp_path


def test_a_name_that_cannot_be_downloaded_is_refused_before_any_request(without_hub, monkeypatch):
    monkeypatch.setattr(
        "arealite.dataset.sft.AutoTokenizer.from_pretrained", lambda path: pytest.fail("it was asked for")
    )
    message = (
        r"'nobody/nothing' is neither a folder nor a model in the cache .* hub\.invalid cannot be reached .*: correct"
    )
    with pytest.raises(ConfigError, match=message):
        load_tokenizer("nobody/nothing")


def test_a_reward_model_that_is_nowhere_is_refused_before_the_run(without_hub):
    """A mistyped folder looks like a name of the hub."""
    with pytest.raises(ConfigError, match="'runs/rw' is neither a folder nor a model in the cache"):
        find_reward(DatasetConfig(path="mine.jsonl", reward="runs/rw"))


def test_what_may_be_found_is_not_refused(without_hub, monkeypatch):
    check_hub(str(without_hub))
    check_hub("no name of the hub")
    check_hub("x" * 300)
    cached = without_hub / "models--nobody--nothing"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    check_hub("nobody/nothing")
    for change in ("proxy", "offline", "host"):
        with monkeypatch.context() as patch:
            if change == "proxy":
                patch.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
            elif change == "offline":
                patch.setattr(constants, "HF_HUB_OFFLINE", True)
            else:
                patch.setattr(constants, "ENDPOINT", "http://localhost:1")
            check_hub("nobody/other")
    with pytest.raises(ConfigError):
        check_hub("nobody/other")
    monkeypatch.setattr(constants, "ENDPOINT", "https://a..b.invalid")
    with pytest.raises(ConfigError, match="HF_ENDPOINT is not an address"):
        check_hub("nobody/other")
