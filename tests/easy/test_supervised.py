"""Training on fixed data from Python: rows in TRL's layouts, in this process, without servers."""

import pytest

from arealite import DPOTrainer, RewardTrainer, SFTTrainer
from arealite.api.errors import ConfigError, DatasetError

ROWS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(16)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in ROWS]


@pytest.mark.slow
def test_supervised_trainers(model_path, tmp_path):
    common = {"model": model_path, "output_dir": tmp_path, "max_steps": 3, "learning_rate": 1e-3}
    answers = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
    result = SFTTrainer(train_dataset=answers, eval_dataset=answers[:2], **common).train()
    assert result.history[-1]["loss"] < result.history[1]["loss"] and (result.path / "config.json").exists()
    assert DPOTrainer(train_dataset=PAIRS, **common).train().history[-1]["loss"] < 0.69
    assert RewardTrainer(train_dataset=PAIRS, **common).train().model.config.num_labels == 1


def test_wrong_data_and_models_are_refused_before_anything_is_made(model_path, tmp_path):
    common = {"output_dir": tmp_path / "runs"}
    with pytest.raises(DatasetError, match="only `text`"):
        SFTTrainer(model_path, train_dataset=[{"text": "a"}], **common)
    with pytest.raises(DatasetError, match="lacks rejected"):
        DPOTrainer(model_path, train_dataset=[{"prompt": "a", "chosen": "b"}], **common)
    with pytest.raises(ConfigError, match="does not exist"):
        SFTTrainer(tmp_path / "none", train_dataset=ROWS, **common)
    with pytest.raises(ConfigError, match="there is no train_dataset"):
        SFTTrainer(model_path, **common)
    assert not (tmp_path / "runs").exists()
