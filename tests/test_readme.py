"""The code and the package layout that README shows are those of the package; README.zh.md says the same in Chinese."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, PPOActorConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sglang_remote import RemoteSGLangEngine
from tests.server_process import server_process

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh.md").read_text()


def python_blocks(page: str = README) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_workflow_of_readme_runs_episodes(model_path, tokenizer):
    (block,) = [b for b in python_blocks() if "class SecondChance" in b]
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=6)
    workflow = names["SecondChance"](gconfig, tokenizer)
    rows = [{"prompt": "one: ", "answer": ""}, {"prompt": "two: ", "answer": "never said"}]
    with server_process(model_path) as server:
        rollout = RemoteSGLangEngine(InferenceEngineConfig())
        rollout.initialize([server.address], train_batch_size=2)
        batch = rollout.rollout_batch(rows, workflow)
        rollout.destroy()
    assert batch["rewards"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert len(batch["group_ids"].unique()) == 2
    # The second row was asked twice. The hint between the two answers is not trained on.
    trained = batch["loss_mask"].sum(dim=1)
    assert 1 <= trained[0] <= 6 and 2 <= trained[2] <= 12
    assert torch.equal(batch["loss_mask"] == 1, batch["versions"] >= 0)


def test_loss_of_the_tutorial_trains(model_path):
    page = (ROOT / "docs" / "tutorials" / "own-workflow.md").read_text()
    (block,) = [b for b in python_blocks(page) if "def reinforce" in b]
    torch.manual_seed(1)
    actor = FSDPPPOActor(PPOActorConfig(path=str(model_path), dtype="float32", device="cpu"))
    actor.initialize(FinetuneSpec(1, 8, 4))
    ids = torch.randint(3, 20, (4, 9))
    ones = torch.ones_like(ids)
    names: dict = {"actor": actor, "batch": {"input_ids": ids, "attention_mask": ones}}
    names["batch"] |= {"loss_mask": ones, "advantages": torch.ones(4, 9)}
    exec(compile(block, "own-workflow.md", "exec"), names)
    actor.destroy()
    assert names["stats"]["loss"] > 0 and names["stats"]["grad_norm"] > 0


def test_readme_lists_every_folder_of_the_package():
    (tree,) = re.findall(r"```\w*\n(arealite/\n.*?)```", README, re.DOTALL)
    root = ROOT / "arealite"
    folders = sorted(path.parent.name for path in root.glob("*/__init__.py"))
    assert [name for name in folders if f"  {name}/" not in tree] == []


def test_line_counts_in_readme_are_true():
    root = ROOT / "arealite"

    def count(*rooms: str) -> int:
        return sum(f.read_text().count("\n") for room in rooms for f in (root / room).rglob("*.py"))

    core, total = (int(n.replace(",", "")) for n in re.findall(r"about ([\d,]+) lines", README))
    assert abs(count("algo", "core", "workflow", "trainer") - core) < 0.03 * core
    assert abs(count(".") - total) < 0.03 * total


def test_readme_is_short():
    assert README.count("\n") <= 150


def test_both_languages_say_the_same():
    """The same headings in the same order, identical code, names, links and numbers of the results."""
    code = re.compile(r"^(?:<!-- test: .*? -->\n)?```.*?^```$", re.DOTALL | re.MULTILINE)
    assert code.findall(README) == code.findall(CHINESE)
    english, chinese = (code.sub("", page) for page in (README, CHINESE))
    names = [set(re.findall(r"`[^`\n]+`", page)) for page in (english, chinese)]
    assert names[0] == names[1]
    levels = [re.findall(r"^(#+) ", page, re.MULTILINE) for page in (english, chinese)]
    assert levels[0] == levels[1]
    assert re.findall(r"about ([\d,]+) lines", english) == re.findall(r"约 ([\d,]+) 行", chinese)
    links = [re.findall(r"\]\(([^)]+)\)", page) for page in (english, chinese)]
    assert [link for link in links[0] if "README" not in link] == [link for link in links[1] if "README" not in link]
    rows = [re.findall(r"^\|.*\|$", page, re.MULTILINE) for page in (english, chinese)]
    for ours, theirs in zip(*rows, strict=True):
        assert sorted(re.findall(r"\d+(?:\.\d+)?", ours)) == sorted(re.findall(r"\d+(?:\.\d+)?", theirs)), theirs
