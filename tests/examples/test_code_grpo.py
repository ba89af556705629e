"""The code example runs through the launcher on a tiny model, with its parts in the statistics."""

import json

import pytest

from tests.examples.test_scripts import EXAMPLES, NUM_STEPS, common, grpo_overrides, run, stats_of


@pytest.mark.slow
def test_code_is_trained_on_a_local_file(model_path, tmp_path):
    data = tmp_path / "mbpp.jsonl"
    rows = [
        dict(text=f"Add {i}.", code="", task_id=i, test_setup_code="", test_list=[f"assert add(1) == {i + 1}"])
        for i in range(8)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    output = run(
        *("-m", "arealite.launcher.local", str(EXAMPLES / "code_grpo.py")),
        *("--config", str(EXAMPLES / "configs" / "code_grpo.yaml")),
        *(*common(tmp_path, data), *grpo_overrides(model_path), "train_dataset.split=null"),
        *(f"{key}={{path: {data}, split: null}}" for key in ("valid_dataset", "valid_datasets.other")),
        *("evaluator.freq_steps=1", "allocation_mode=embedded.d1p1t1+d1p1t1"),
    )
    assert "isolation of the code that the model writes: " in output
    steps = stats_of(tmp_path / "code-grpo" / "trial0")
    assert [s["step"] for s in steps if "reward" in s] == list(range(NUM_STEPS))
    assert steps[-1]["eval/valid/num_questions"] == steps[-1]["eval/other/num_questions"] == len(rows)
    assert all(s["rollout/tests"] == s["rollout/block"] == 0.0 for s in steps if "reward" in s)
