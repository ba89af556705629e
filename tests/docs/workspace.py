"""Runs the code blocks of Markdown pages in a folder that looks like a clone, with a tiny model and tiny settings.

What is replaced, so that a block that names a real model runs on two cores without a network:

- `REPLACED`: names of models and files in the text of a block.
- `SMALL`: settings that are appended to commands that train.
- `python`, `arealite`, `make` and their paths in `.venv/bin` are those of this test's interpreter and checkout. Modules
  of arealite and scripts are forked from a process that has imported torch (`tests/warm_python.py`).

A comment before a block says how it is tested: `<!-- test: check -->` appends `--dry-run` to each command, because the
block needs GPUs or a cluster; `<!-- test: tests/x/test_y.py -->` names the test that runs it. Other blocks of bash and
Python run. A block whose first line is `# name.py` or `# name.yaml` is written to that file.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from arealite.api.cli_args import GRPOConfig
from arealite.cli.main import MainConfig
from tests import warm_python
from tests.chat_templates import make_chat_tokenizer
from tests.tiny_model import make_model

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"(?:^<!-- test: (?P<test>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
# A first line such as `# my_reward.py` or `# configs/mine.yaml`.
FILE_NAME = re.compile(r"# ([\w./-]+\.(?:py|yaml|sh))\n")
REPLACED = {
    "Qwen/Qwen2.5-0.5B-Instruct": "tiny",
    "Qwen/Qwen2.5-1.5B-Instruct": "tiny",
    "/path/to/model": "tiny",
    "/path/to/gsm8k/": "gsm8k/",
    "reward_fn=reward).train()": "reward_fn=reward, **SMALL).train()",
}
# What `SMALL` is in a block of Python: keys of `GRPOTrainer`.
SMALL_PYTHON = (
    'SMALL = {"total_train_steps": 1, "train_dataset.batch_size": 4, "actor.dtype": "float32", '
    '"gconfig.max_new_tokens": 4, "gconfig.n_samples": 2}\n'
)
# Keys of `arealite train`, by the command's words; those of scripts under a launcher.
SMALL_TRAIN = [
    *("total_train_steps=2", "train_dataset.batch_size=4", "launcher.threads_per_process=1"),
    *("trainer.grpo.gconfig.max_new_tokens=8", "trainer.grpo.gconfig.n_samples=2"),
    *("trainer.grpo.actor.dtype=float32", "trainer.grpo.actor.optimizer.lr=1e-4"),
    *("trainer.sft.model.dtype=float32", "trainer.rw.model.dtype=float32"),
]
SMALL_SCRIPT = [
    *("total_train_steps=2", "train_dataset.batch_size=4", "launcher.threads_per_process=1"),
    *("gconfig.max_new_tokens=8", "gconfig.n_samples=2", "actor.dtype=float32"),
]
SMALL_SFT = ["total_train_steps=2", "train_dataset.batch_size=4", "model.dtype=float32"]


@dataclass(frozen=True)
class Block:
    """A code block of a page, and how it is tested."""

    page: Path
    line: int
    language: str
    text: str
    test: str

    @property
    def file_name(self) -> str | None:
        """The file that the block is, by its first line."""
        match = FILE_NAME.match(self.text)
        return match[1] if match else None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line} ({self.language})"


def blocks_of(page: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start("text")), found["language"], found["text"], found["test"] or "run")
        for found in FENCE.finditer(text)
    ]


class Workspace:
    """A folder in which the blocks of one page run, one after the other.

    Without `is_small` commands have their own settings, without `is_warm` they are started as usual, not forked.
    """

    def __init__(self, folder: Path, is_small: bool = True, is_warm: bool = True) -> None:
        self.folder, self.is_small, self.is_warm = folder, is_small, is_warm
        warm_python.prepare()
        for name in ("examples", "benchmark", "arealite"):
            (folder / name).symlink_to(ROOT / name)
        # Its chat template knows tools.
        tokenizer = make_chat_tokenizer("qwen25")
        make_model(folder / "tiny", tokenizer, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=4096)
        self._write_data()
        self._write_commands()

    def run(self, block: Block, timeout_s: float = 300.0) -> str:
        """Run a block and return its output. Raises AssertionError with the output if it fails."""
        text = self.substitute(block.text)
        command = ["bash", "-euo", "pipefail", "-c", text]
        if block.file_name:
            path = self.write(block)
            if block.language != "python":
                return ""
            command = ["python", "-c", f"import {path.stem}"]
        elif block.language == "python":
            script = self.folder / f"block{block.line}.py"
            script.write_text(SMALL_PYTHON + text)
            command = ["python", script.name]
        return self.execute(command, str(block), block.test == "check", timeout_s)

    def write(self, block: Block) -> Path:
        """Write the file that a block is."""
        path = self.folder / (block.file_name or "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.substitute(block.text))
        return path

    def substitute(self, text: str) -> str:
        """Replace models and files by tiny ones."""
        for name, tiny in REPLACED.items():
            text = text.replace(name, tiny)
        return text

    def environment(self, is_check: bool = False) -> dict[str, str]:
        """Return the environment of commands."""
        return {
            **os.environ,
            "PATH": f"{self.folder / '.venv/bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{self.folder}",
            "PAGE_CHECK": "1" if is_check else "",
            "OMP_NUM_THREADS": "1",
        }

    def execute(self, command: list[str], name: str, is_check: bool = False, timeout_s: float = 300.0) -> str:
        """Run a command in the folder and return its output; raises AssertionError if it fails."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(is_check),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                # The shell and the launcher, which ends what it has started.
                os.killpg(process.pid, signal.SIGTERM)
                process.communicate(timeout=60)
        assert process.returncode == 0, f"{name} ended with {process.returncode}:\n{command[-1]}\n{output[-6000:]}"
        return output

    def _write_data(self) -> None:
        """Write invented rows in the format of GSM8K."""
        for name, count in (("train", 32), ("test", 8)):
            rows = [
                {
                    "question": f"Tom has {i} pens and gets {i + 1}. How many?",
                    "answer": f"{i}+{i + 1}\n#### {2 * i + 1}",
                }
                for i in range(count)
            ]
            path = self.folder / "gsm8k" / f"{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _write_commands(self) -> None:
        """Write `python`, `arealite` and `make`, which append settings to commands that train."""
        folder = self.folder / ".venv" / "bin"
        folder.mkdir(parents=True)
        settings = {"T": SMALL_TRAIN, "S": SMALL_SCRIPT, "F": SMALL_SFT}
        small = {name: " ".join(words) if self.is_small else "" for name, words in settings.items()}
        warm = f"""case "$1 ${{2:-}}" in
    -m\\ arealite.*|-c\\ *|*.py\\ *) exec {sys.executable} -E -S {warm_python.__file__} --run "$@" ;;
esac"""
        shim = f"""#!/usr/bin/env bash
# The words of a command, then small settings. PAGE_CHECK: only check it.
dry=${{PAGE_CHECK:+--dry-run}}
case "$*" in
    -m\\ arealite.cli.main*|-m\\ arealite.cli.entry\\ train*) set -- "$@" {small["T"]} $dry ;;
    -m\\ arealite.launcher.*_sft.py*) set -- "$@" {small["F"]} $dry ;;
    -m\\ arealite.launcher.*|-m\\ arealite.cli.entry\\ launch*) set -- "$@" {small["S"]} $dry ;;
esac
{warm if self.is_warm else ""}
exec {sys.executable} "$@"
"""
        scripts = {
            "python": shim,
            "arealite": f'#!/usr/bin/env bash\nexec {folder / "python"} -m arealite.cli.entry "$@"\n',
            "make": f"#!/usr/bin/env bash\nexec {folder / 'python'} {ROOT}/examples/arealite/$1.py\n",
        }
        for name, text in scripts.items():
            path = folder / name
            path.write_text(text)
            path.chmod(0o755)


def check_yaml(block: Block) -> None:
    """Check keys and types of a block against the configuration of scripts, or of `arealite train`."""
    values = OmegaConf.create(block.text)
    schema = MainConfig if "trainer" in values else GRPOConfig
    OmegaConf.merge(OmegaConf.structured(schema), values)
