"""The counting task with images: rows, reward, both models, and that the scripts learn."""

import importlib
import json
from pathlib import Path

import pytest

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError
from arealite.dataset.vision import collate_vision_sft
from arealite.utils.images.encoded import decode_image
from arealite.utils.vision import VisionProcessor
from tests import warm_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "arealite"


@pytest.fixture
def task(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("clevr_count")


def count_reward(task, completion, answer):
    return task.count_reward("", completion, [], [], answer=answer)


def test_the_reward_compares_the_last_number(task):
    assert count_reward(task, "3", "3") == count_reward(task, "1 and 2 are 3.", "<answer> 3 </answer>") == 1.0
    assert count_reward(task, "4", "3") == count_reward(task, "", "3") == count_reward(task, "9" * 5000, "3") == 0.0


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_generated_rows_become_batches(task, tmp_path, kind):
    task.make_model(tmp_path, kind)
    rows = task.make_rows(6, seed=1)
    assert rows == task.make_rows(6, seed=1) and rows[0].keys() == {"images", "problem", "answer"}
    assert decode_image(rows[0]["images"][0]).size == (32, 32)
    processor = VisionProcessor.load(str(tmp_path))
    batch = collate_vision_sft(rows, processor)
    assert batch["image_index"].tolist() == list(range(6))
    assert batch["loss_mask"].sum(1).tolist() == [len(row["answer"]) + 1 for row in rows]
    assert (batch["input_ids"] == processor.image_token_id).sum(1).tolist() == [16] * 6


def test_a_dataset_with_the_same_columns_is_read(task, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    made = task.make_rows(3, seed=2)
    stored = [{**row, "images": [{"bytes": image, "path": "a.png"} for image in row["images"]]} for row in made]
    parquet.write_table(pyarrow.Table.from_pylist(stored), tmp_path / "train.parquet")
    rows = task.load_rows(DatasetConfig(path=str(tmp_path / "train.parquet")), seed=1)
    task.make_model(tmp_path / "model", "llava")
    processor = VisionProcessor.load(str(tmp_path / "model"))
    for row, own in zip(rows, made, strict=True):
        assert processor.encode_row(row).images == own["images"]
    (tmp_path / "other.jsonl").write_text('{"question": "?", "answer": "1"}\n')
    with pytest.raises(DatasetError, match="lacks images, problem"):
        task.load_rows(DatasetConfig(path=str(tmp_path / "other.jsonl")), seed=1)


def launch(script: str, root: Path, *overrides: str) -> list[dict]:
    config = EXAMPLES / "configs" / f"{script}.yaml"
    command = ["-m", "arealite.launcher.local", str(EXAMPLES / f"{script}.py"), "--config", str(config)]
    command += [f"cluster.fileroot={root}", "stats_logger.tensorboard=false", *overrides]
    done = warm_python.run(command, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = root / script.replace("_", "-") / "trial0"
    return [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_both_scripts_run_through_the_launcher(task, tmp_path, kind):
    task.make_model(tmp_path / "model", kind)
    few = ["train_dataset.batch_size=8"]
    launch("clevr_count_sft", tmp_path, f"model.path={tmp_path}/model", "total_train_steps=3", *few)
    trained = tmp_path / "clevr-count-sft" / "trial0" / "checkpoints" / "step000003"
    # With `in_place` an answer that goes on under new weights keeps the cache of the old ones.
    few += ["rollout.pause_mode=abort"]
    steps = launch("clevr_count_grpo", tmp_path, f"actor.path={trained}", "total_train_steps=3", *few)
    # Server and trainer agree on the log-probs of answers to images.
    assert len(steps) == 3 and all(step["behav_kl/fresh"] < 1e-5 for step in steps if "behav_kl/fresh" in step)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_grpo_learns_to_count(task, tmp_path):
    task.make_model(tmp_path / "model")
    launch("clevr_count_sft", tmp_path, f"model.path={tmp_path}/model")
    trained = tmp_path / "clevr-count-sft" / "trial0" / "checkpoints" / "step000050"
    rewards = [step["reward"] for step in launch("clevr_count_grpo", tmp_path, f"actor.path={trained}")]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.2
