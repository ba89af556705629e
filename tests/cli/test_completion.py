"""Completion of commands, options, keys and values; the scripts in real shells where they are installed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.api.errors import ConfigError
from arealite.cli import completion
from arealite.cli.completion import OPTIONS, complete
from arealite.cli.entry import COMMANDS, run_command


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("arealite tr", ["train"]),
        ("arealite launch s", ["slurm"]),
        ("arealite help com", ["completion"]),
        ("arealite report --ro", ["--rollouts"]),
        ("arealite train trainer.grpo.gc", ["trainer.grpo.gconfig."]),
        ("arealite train trainer.grpo.gconfig.n_", ["trainer.grpo.gconfig.n_samples="]),
        ("arealite eval --config a.yaml --d", ["--dry-run"]),
        ("arealite serve deterministic=", ["deterministic=false", "deterministic=true"]),
        ("arealite launch local s.py actor.dtype=b", ["actor.dtype=bfloat16"]),
        ("arealite launch local s.py rollout.paus", ["rollout.pause_mode="]),
        ("arealite launch local ", []),
        ("arealite train --config ", []),
        ("arealite train --help trainer.grpo.crit", ["trainer.grpo.critic", "trainer.grpo.critic.optimizer"]),
        ("arealite config he", ["help"]),
        ("arealite config help grpo gcon", ["gconfig"]),
        ("arealite config show s", ["saver.", "seed=", "serve", "sft", "stats_logger."]),
        ("arealite completion z", ["zsh"]),
        ("arealite train 'quote", []),
        ("arealite nonsense x", []),
        ("", []),
    ],
)
def test_words(line, expected):
    assert complete(line) == expected


def test_keys_of_a_script_are_those_of_its_class(tmp_path):
    (tmp_path / "sft.py").write_text("load_config(argv, SFTConfig)")
    assert complete(f"arealite launch local {tmp_path}/sft.py model.pa") == ["model.param_dtype=", "model.path="]
    assert complete(f"arealite plan {tmp_path}/none.py actor.pat") == ["actor.path="]


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_those_of_the_help(name, capsys):
    try:
        run_command([*name.split(), "--help"])
    except SystemExit as ended:
        assert not ended.code
    text = capsys.readouterr().out
    usage = text[: text.index("\n\n")] + text.partition("\noptions:\n")[2].partition("\nexamples:")[0]
    if name == "config":
        usage = text.partition("examples:")[0]
    assert set(re.findall(r"--[a-z-]+", usage)) | {"--help"} == set(OPTIONS[name])


@pytest.fixture
def command(tmp_path, monkeypatch) -> Path:
    """A folder with a command `arealite` that is first on PATH."""
    script = tmp_path / "arealite"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m arealite.cli.entry "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path


def run(*argv: str) -> list[str]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words", "expected"),
    [
        ("arealite tra", "arealite tra", ["train"]),
        ("arealite train trainer.gr", "arealite train trainer.gr", ["trainer.grpo."]),
        ("arealite serve deterministic=t", "arealite serve deterministic = t", ["true"]),
    ],
)
def test_bash(command, line, words, expected):
    code = (
        "source <(arealite completion bash); COMP_LINE=$1 COMP_POINT=${#1}; COMP_WORDS=($2); "
        'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _arealite; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    assert run("bash", "--norc", "-c", code, "bash", line, words) == expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_its_script(command):
    code = "autoload -U compinit; compinit -u -D; source <(arealite completion zsh); print $_comps[arealite]"
    assert run("zsh", "-f", "-c", code) == ["_arealite"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish(command):
    code = "arealite completion fish | source; complete -C 'arealite train trainer.gr'"
    assert run("fish", "--no-config", "-c", code) == ["trainer.grpo."]


def test_an_unknown_shell_is_refused():
    with pytest.raises(ConfigError, match="choose from"):
        completion.main(["tcsh"])
