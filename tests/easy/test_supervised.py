"""Training on fixed data from Python: rows in TRL's layouts, in this process, without servers."""

import pytest
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForSequenceClassification

from arealite import DPOTrainer, RewardTrainer, SFTTrainer
from arealite.api.errors import ConfigError, DatasetError

ROWS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(16)]
ANSWERS = [{"prompt": row["prompt"], "completion": row["answer"]} for row in ROWS]
LABELED = [
    {"prompt": row["prompt"], "completion": row["answer"] if i % 2 else "no", "label": bool(i % 2)}
    for i, row in enumerate(ROWS)
]
PAIRS = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in ROWS]


@pytest.mark.slow
def test_supervised_trainers(model_path, tmp_path):
    common = {"model": model_path, "output_dir": tmp_path, "max_steps": 3, "learning_rate": 1e-3}
    trainer = SFTTrainer(train_dataset=ANSWERS, eval_dataset=ANSWERS[:2], **common)
    result = trainer.train()
    trainer.save_model()
    assert (tmp_path / "config.json").exists()
    assert result.history[-1]["loss"] < result.history[1]["loss"] and (result.path / "config.json").exists()
    assert DPOTrainer(train_dataset=PAIRS, **common).train().history[-1]["loss"] < 0.69
    kto = DPOTrainer(train_dataset=LABELED, eval_dataset=LABELED[:4], loss_type="kto", **common).train()
    assert kto.history[-1]["loss"] < 0.49 and kto.history[-1]["eval/valid/loss"] < 0.49
    assert RewardTrainer(train_dataset=PAIRS, **common).train().model.config.num_labels == 1
    adapted = RewardTrainer(train_dataset=PAIRS, peft_config=LoraConfig(r=4), **common).train()
    assert (adapted.path / "adapter_config.json").exists() and adapted.model.config.num_labels == 1
    whole = [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + "no"} for row in PAIRS]
    assert RewardTrainer(train_dataset=whole, **common).train().history[-1]["accuracy"] == 1.0
    chats = [
        {side: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
         for side in ("chosen", "rejected")}
        for row in PAIRS
    ]  # fmt: skip
    assert DPOTrainer(train_dataset=chats, **common).train().history[-1]["loss"] < 0.69
    assert RewardTrainer(train_dataset=chats, **common).train().history[-1]["accuracy"] == 1.0


@pytest.mark.slow
def test_a_resumed_run_continues_the_earlier_one_of_its_name(model_path, tmp_path):
    common = {"model": model_path, "train_dataset": ANSWERS, "output_dir": tmp_path, "trial_name": "mine"}
    SFTTrainer(**common, max_steps=2, recover={"mode": "auto", "freq_steps": 1}).train()
    result = SFTTrainer(**common, max_steps=3).train(resume_from_checkpoint=True)
    assert [row["step"] for row in result.history if row["step"] >= 0] == [0, 1, 2]
    assert not list(tmp_path.rglob("earlier"))
    # There is nothing to do: the checkpoint is behind the last step that is asked for.
    shorter = SFTTrainer(**common, max_steps=1).train(resume_from_checkpoint=True)
    assert shorter.path.name == "step000002" and (shorter.path / "config.json").exists()


def test_wrong_data_and_models_are_refused_before_anything_is_made(model_path, tmp_path):
    common = {"output_dir": tmp_path / "runs"}
    with pytest.raises(DatasetError, match="only `text`"):
        SFTTrainer(model_path, train_dataset=[{"text": "a"}], **common)
    with pytest.raises(DatasetError, match="lacks rejected"):
        DPOTrainer(model_path, train_dataset=[{"prompt": "a", "chosen": "b"}], **common)
    with pytest.raises(DatasetError, match=r"train_dataset, row 1: .*`label`, and model\.loss=dpo compares two"):
        DPOTrainer(model_path, train_dataset=LABELED, **common)
    with pytest.raises(DatasetError, match=r"train_dataset, row 1: .*`label`, and a reward model compares two"):
        RewardTrainer(model_path, train_dataset=LABELED, **common)
    with pytest.raises(ConfigError, match="does not exist"):
        SFTTrainer(tmp_path / "none", train_dataset=ROWS, **common)
    with pytest.raises(ConfigError, match=r"config.json' does not exist or is a file: give a folder"):
        SFTTrainer(model_path / "config.json", train_dataset=ROWS, **common)
    with pytest.raises(ConfigError, match="optimizers has no counterpart: set learning_rate"):
        SFTTrainer(model_path, train_dataset=ANSWERS, optimizers=("optimizer", None), **common)
    with pytest.raises(ConfigError, match=r"quantization_config has no counterpart: set model\.frozen_weight_dtype"):
        SFTTrainer(model_path, train_dataset=ANSWERS, quantization_config="config", **common)
    SFTTrainer(model_path, train_dataset=ANSWERS, optimizers=(None, None), callbacks=[], data_collator=None, **common)
    with pytest.raises(ConfigError, match="train_datasets is not read here: pass the rows of all sets"):
        SFTTrainer(model_path, config={"train_datasets": {"a": {"path": "a.jsonl"}}}, **common)
    with pytest.raises(ConfigError, match="there is no train_dataset"):
        SFTTrainer(model_path, **common)
    with pytest.raises(ConfigError, match=r"processing_class is str: give a tokenizer object, or .* as tokenizer_path"):
        SFTTrainer(model_path, train_dataset=ANSWERS, processing_class=str(model_path), **common)
    with pytest.raises(DatasetError, match=r"valid has 1 rows.* model\.loss=kto compares the answers of different"):
        DPOTrainer(model_path, train_dataset=PAIRS, eval_dataset=PAIRS[:1], **{"model.loss": "kto"}, **common)
    for rows in (PAIRS, LABELED):
        with pytest.raises(DatasetError, match=r"train_dataset has 1 rows, and model\.loss=kto, .* needs 2 or more"):
            DPOTrainer(model_path, train_dataset=rows[:1], **{"model.loss": "kto"}, **common)
    classifier = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(model_path, num_labels=3))
    with pytest.raises(ConfigError, match=r"the model is a reward model or critic \(\w+\), which generates no text"):
        DPOTrainer(classifier, train_dataset=PAIRS, **common)
    with pytest.raises(ConfigError, match="with 3 labels, and a reward model or critic has one"):
        RewardTrainer(classifier, train_dataset=PAIRS, **common)
    assert not (tmp_path / "runs").exists()


def test_validation_sets_have_the_names_of_the_caller(model_path):
    sets = {"gsm8k.test": ANSWERS[:2], "v1.0": ANSWERS[:3], "valid": ANSWERS[:4]}
    trainer = SFTTrainer(model_path, train_dataset=ANSWERS, eval_dataset=sets)
    assert {name: len(rows) for name, rows in trainer.valid_rows.items()} == {"valid": 4, "gsm8k.test": 2, "v1.0": 3}
    settings = {"valid_datasets": {"a.b": {"max_length": 400}}}
    trainer = SFTTrainer(model_path, train_dataset=ANSWERS, eval_dataset={"a.b": [ANSWERS[0]] * 2}, config=settings)
    own = trainer.config.valid_datasets["a.b"]
    assert (own.path, own.max_length) == ("eval_dataset", 400)
    with pytest.raises(ConfigError, match="'my set', which becomes a file name"):
        SFTTrainer(model_path, train_dataset=ANSWERS, eval_dataset={"my set": ANSWERS})


def test_an_output_dir_that_cannot_be_made_is_named(model_path, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"cannot make a run directory in .*file/sft: Not a directory; .*set output_dir"
    ):
        SFTTrainer(model_path, train_dataset=ANSWERS, output_dir=tmp_path / "file").train()
