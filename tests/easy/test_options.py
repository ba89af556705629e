"""The configuration of a Python caller: defaults, keyword arguments, and TRL's arguments."""

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from arealite.api.cli_args import DPOConfig, GRPOConfig, RWConfig, SFTConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.easy.grpo import GRPOTrainer
from arealite.easy.options import fit_to_rows, make_config, read_given

DATA = {"train_dataset.path": "train_dataset"}


class Schedule(StrEnum):
    COSINE = "cosine"


@dataclass
class LikeTRL:
    """Some fields of TRL's GRPOConfig with their defaults."""

    output_dir: str = "out"
    learning_rate: float = 1e-6
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    max_completion_length: int = 512
    temperature: float = 1.0
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    num_iterations: int = 1
    max_steps: int = -1
    num_train_epochs: float = 3.0
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    lr_scheduler_type: Any = Schedule.COSINE
    warmup_steps: float = 0
    save_strategy: str = "steps"
    save_steps: int = 500
    eval_strategy: str = "steps"
    eval_steps: int = 10
    mask_truncated_completions: bool = False
    logging_steps: int = 10
    use_vllm: bool = False
    brand_new: bool = False


def make(cls=GRPOConfig, args=None, config=None, peft_config=None, num_rows=1000, data=DATA, **options):
    given = read_given(cls, args, config, options, peft_config)
    return fit_to_rows(make_config(cls, given, "org/model", data), given, num_rows)


def test_defaults_of_a_cpu():
    config = make()
    assert (config.actor.path, config.actor.dtype, config.train_dataset.batch_size) == ("org/model", "float32", 8)
    assert config.rollout.max_head_offpolicyness == 2 and config.allocation_mode.startswith("embedded.")


def test_defaults_of_a_gpu_are_those_of_the_gsm8k_config(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = make()
    assert (config.actor.dtype, config.train_dataset.batch_size, config.gconfig.n_samples) == ("bfloat16", 64, 8)
    assert config.rollout.weight_update == "auto" and config.actor.optimizer.beta2 == 0.999
    assert make(**{"actor.device": "cpu"}).actor.dtype == "float32"
    assert config.actor.prox_logp == "interpolate"
    # Other objectives have been measured with exact proximal log-probs; M2PO needs them.
    for options in ({"actor.algorithm": "m2po"}, {"loss_type": "cispo", "epsilon_high": 2.0}):
        assert make(**options).actor.prox_logp == "first_pass"


def test_keys_by_dotted_name_nested_dict_and_file(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("actor: {eps_clip: 0.3}\nseed: 4\n")
    config = make(config=file, seed=5, gconfig={"top_p": 0.9}, **{"actor.optimizer.lr": 1e-3})
    assert (config.actor.eps_clip, config.seed, config.gconfig.top_p, config.actor.optimizer.lr) == (0.3, 5, 0.9, 1e-3)
    assert make(config={"actor": {"eps_clip": 0.1}}).actor.eps_clip == 0.1
    assert make(args=config).actor.eps_clip == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actor.lr": 1e-3}, r"unknown key 'actor.lr' in the keyword arguments: did you mean actor.optimizer.lr"),
        ({"sed": 1}, "did you mean seed"),
        ({"learning_rat": 1e-3}, r"unknown argument 'learning_rat': did you mean learning_rate"),
        ({"reward_function": len}, "did you mean reward_f"),
        ({"max_newtokens": 5}, r"did you mean gconfig\.max_new_tokens"),
        ({"seed": "x"}, "seed in the keyword arguments"),
        ({"allocation_mode": "embedded.d1+d2"}, "several trainers"),
        ({"num_iterations": 2}, "steps_per_generation"),
        ({"loss_type": "vespo"}, "use one of grpo"),
        ({"router_aux_loss_coef": 1e-3}, r"set actor\.router_aux_loss_coef .* times the experts per token"),
        ({"optim": "sgd"}, "use one of adamw_torch"),
        ({"per_device_train_batch_size": 4}, "not divisible by num_generations=8"),
        ({"model_init_kwargs": {"dtype": "x"}}, "set actor.dtype"),
        ({"report_to": "mlflow"}, "report_to='mlflow' has no counterpart: use none or tensorboard, wandb"),
        ({"loss_type": "cispo", "epsilon": 0.2}, "epsilon_high=0.2: set one above 1"),
        ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, "has no sequence level"),
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            "16 completions, which is not divisible by the 32 of an optimizer step",
        ),
        ({"num_train_epochs": 0}, "num_train_epochs=0 must be a finite number above 0; or set max_steps"),
        ({"num_train_epochs": -1.0}, "num_train_epochs=-1.0 must be a finite number above 0"),
        ({"num_train_epochs": float("nan")}, "num_train_epochs=nan must be a finite number above 0"),
        ({"total_train_steps": 0}, "total_train_steps must be a number from 1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be 1 or more"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be 1 or more"),
        ({"gradient_accumulation_steps": 4}, "=4 multiplies per_device_train_batch_size, which is not given: set both"),
        ({"args": {"steps_per_generation": 2}}, "steps_per_generation=2 multiplies per_device_train_batch_size"),
        ({"cls": SFTConfig, "gradient_accumulation_steps": 2}, "=2 multiplies per_device_train_batch_size"),
        ({"warmup_steps": -5}, "warmup_steps=-5 must be 0 or more"),
        ({"max_steps": "many"}, "max_steps='many' is str: give a number"),
        ({"cls": SFTConfig, "completion_only_loss": False}, "the loss is on the `completion` of a row"),
        ({"cls": SFTConfig, "valid_dataset": {"path": "x", "few_shot": 2}}, "few_shot is for prompts"),
        (
            {"cls": DPOConfig, "model.loss": "kto", "per_device_train_batch_size": 1},
            "batch_size=1 is one row for each .* rank, and model.loss=kto compares rows: set it to 2 or more",
        ),
        ({"cls": DPOConfig, "desirable_weight": 2.0}, "desirable_weight=2.0 is of loss=kto only, not of dpo"),
        ({"desirable_weight": 2.0}, "unknown argument 'desirable_weight'"),
        ({"load_best_model_at_end": True}, "unknown key 'load_best_model_at_end'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_a_warm_up_that_is_longer_than_the_run_gives_a_warning():
    with pytest.warns(UserWarning, match=r"warmup_steps=500 is more than the 10 steps of the run"):
        config = make(warmup_steps=500, max_steps=10)
    assert config.actor.optimizer.warmup_steps_proportion == 1.0
    # As in TRL, max_steps decides.
    assert make(max_steps=10, num_train_epochs=0, warmup_steps=10).total_train_steps == 10


@pytest.mark.parametrize("cls", [GRPOConfig, SFTConfig])
def test_a_batch_of_more_rows_than_there_are_is_refused_if_it_was_given(cls):
    assert make(cls, num_rows=3).train_dataset.batch_size == 3
    with pytest.raises(DatasetError, match="train_dataset has 3 rows, fewer than one batch: lower batch_size=4"):
        make(cls, num_rows=3, **{"train_dataset.batch_size": 4})


def test_arguments_of_trl():
    args = LikeTRL(gradient_accumulation_steps=4, beta=0.04, temperature=0.7, epsilon_high=0.28, max_steps=20,
                   warmup_steps=5, scale_rewards=False)  # fmt: skip
    config = make(args=args)
    assert (config.train_dataset.batch_size, config.gconfig.n_samples, config.actor.ppo_n_minibatches) == (4, 8, 1)
    assert (config.actor.kl_loss_coef, config.ref.path) == (0.04, "org/model")
    assert config.gconfig.temperature == config.actor.temperature == 0.7
    assert (config.actor.loss, config.actor.loss_mean, config.actor.reward_norm.std_level) == ("clip", "token", "none")
    assert (config.actor.optimizer.lr, config.actor.optimizer.lr_scheduler_type) == (1e-6, "cosine")
    assert config.actor.optimizer.warmup_steps_proportion == 0.25
    assert (config.total_train_steps, config.total_train_epochs, config.cluster.fileroot) == (20, 1, "out")
    # There is no validation set, so that evaluations are left out.
    assert config.saver.freq_steps == 500 and not config.evaluator.is_set
    assert make(args=args, data=DATA | {"valid_dataset.path": "eval_dataset"}).evaluator.freq_steps == 10
    assert make(args=args, data=DATA | {"valid_datasets.sums.path": "eval_dataset"}).evaluator.freq_steps == 10


def test_keyword_arguments_win_over_args_and_config():
    config = make(args=LikeTRL(), config={"gconfig": {"max_new_tokens": 64}}, learning_rate=1e-4, num_generations=4)
    assert (config.actor.optimizer.lr, config.gconfig.max_new_tokens, config.gconfig.n_samples) == (1e-4, 64, 4)
    # Eight completions are two groups of four.
    assert config.train_dataset.batch_size == 2


def test_fields_without_counterpart():
    with pytest.raises(ConfigError, match=r"mask_truncated_completions=True has no counterpart: use actor.overlong"):
        make(args=LikeTRL(mask_truncated_completions=True))
    given = read_given(GRPOConfig, LikeTRL(brand_new=True, use_vllm=True), None, {}, None)
    assert given.warnings == ["arguments without counterpart here are ignored: brand_new=True"]
    with pytest.raises(ConfigError, match="args is int"):
        make(args=3)


@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo"])
@pytest.mark.parametrize("scale", [True, False, "group", "batch", "none"])
def test_every_loss_of_trl_is_a_valid_objective(kind, scale):
    config = make(args=LikeTRL(loss_type=kind, scale_rewards=scale, epsilon_high=5.0 if kind == "cispo" else None))
    assert config.actor.algorithm == "custom"


def test_ratios_of_sequences_are_gspo():
    assert make(importance_sampling_level="sequence").actor.loss == "gspo"
    for kind, mean in (("grpo", "sequence"), ("dapo", "token"), ("bnpo", "token"), ("dr_grpo", "constant")):
        objective = make(importance_sampling_level="sequence", loss_type=kind).actor
        assert (objective.loss, objective.loss_mean) == ("gspo", mean), kind


@pytest.mark.parametrize(
    ("name", "value"), [("tensorboard", True), ("wandb", "online"), ("swanlab", "online"), ("trackio", "local")]
)
def test_services_of_trl(name, value):
    config = make(report_to=[name])
    assert getattr(config.stats_logger, name) == value
    assert make(report_to="none").stats_logger.wandb == "off"


def test_steps_of_trl_are_optimizer_steps():
    config = make(
        args={"per_device_train_batch_size": 8, "steps_per_generation": 4, "max_steps": 100, "save_steps": 50},
        warmup_steps=20,
    )
    assert (config.train_dataset.batch_size, config.actor.ppo_n_minibatches) == (4, 4)
    # 25 generation batches are 100 optimizer steps.
    assert (config.total_train_steps, config.saver.freq_steps) == (25, 13)
    assert config.actor.optimizer.warmup_steps_proportion == 0.2


def test_the_best_model_of_trl_needs_evaluations():
    data = {**DATA, "valid_dataset.path": "eval"}
    config = make(args={"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 5}, data=data)
    assert config.saver.keep_best and not config.saver.is_set and config.evaluator.freq_steps == 5
    with pytest.warns(UserWarning, match="there is no eval_dataset: only the last model is saved"):
        make(save_strategy="best")
    for name, words in (("save", "no, steps, epoch, best"), ("eval", "no, steps, epoch")):
        with pytest.raises(ConfigError, match=f"{name}_strategy='always' has no counterpart: use {words}"):
            make(args={f"{name}_strategy": "always"})


def test_the_largest_weight_of_cispo():
    config = make(loss_type="cispo", epsilon_high=5.0)
    assert (config.actor.loss, config.actor.eps_clip, config.actor.eps_clip_higher) == ("cispo", 1.0, 4.0)


def test_fields_that_change_the_result_are_never_ignored_silently():
    @dataclass
    class Args:
        load_best_model_at_end: bool = False
        label_smoothing_factor: float = 0.0
        optim_args: str = ""
        sapo_temperature_neg: float = 1.05
        use_bias_correction_kl: bool = False
        loss_weights: list[float] | None = None
        logging_steps: int = 10

    given = read_given(GRPOConfig, Args(True, 0.1, "x", 2.0, True, [0.8, 0.2], 1), None, {}, None)
    (text,) = given.warnings
    assert all(field.name in text for field in dataclasses.fields(Args) if field.name != "logging_steps")
    assert "logging_steps" not in text


@pytest.mark.parametrize("as_args", [True, False])
def test_fields_about_how_trl_runs_are_ignored_with_one_warning(as_args):
    fields = {"logging_steps": 1, "use_vllm": True, "max_steps": 3, "eval_gconfig.max_new_tokens": 7}
    given = read_given(GRPOConfig, fields if as_args else None, None, {} if as_args else fields, None)
    assert given.warnings == ["arguments without counterpart here are ignored: logging_steps=1, use_vllm=True"]
    config = make_config(GRPOConfig, given, "org/model", DATA)
    assert (config.total_train_steps, config.eval_gconfig.max_new_tokens) == (3, 7)


def test_the_length_of_prompts_is_that_of_rows_in_reinforcement_learning_only():
    assert make(max_prompt_length=512).train_dataset.max_length == 512
    given = read_given(DPOConfig, {"max_length": 1024, "max_prompt_length": 512}, None, {}, None)
    assert given.warnings == ["arguments without counterpart here are ignored: max_prompt_length=512"]
    assert make_config(DPOConfig, given, "org/model", DATA).train_dataset.max_length == 1024


def test_a_dict_may_mix_fields_and_keys():
    config = make(args={"learning_rate": 1e-3, "rollout.max_head_offpolicyness": 0, "seed": 7})
    assert (config.actor.optimizer.lr, config.rollout.max_head_offpolicyness, config.seed) == (1e-3, 0, 7)


def test_small_datasets_and_steps():
    assert make(num_rows=3).train_dataset.batch_size == 3
    config = make(num_rows=16, total_train_steps=5)
    assert (config.train_dataset.batch_size, config.total_train_epochs) == (8, 3)
    assert make(num_rows=16, total_train_steps=5, total_train_epochs=1).total_train_epochs == 1


def test_lora():
    peft = SimpleNamespace(r=8, lora_alpha=16, target_modules={"v_proj", "q_proj"}, lora_dropout=0.0)
    actor = make(peft_config=peft).actor
    assert (actor.lora_rank, actor.lora_alpha, actor.lora_targets) == (8, 16, ["q_proj", "v_proj"])
    with pytest.raises(ConfigError, match="lora_dropout"):
        make(peft_config=SimpleNamespace(r=8, lora_dropout=0.1))
    with pytest.raises(ConfigError, match="LoraConfig"):
        make(peft_config=SimpleNamespace())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"use_rslora": True}, r"use_rslora=True of peft_config .*set lora_alpha to alpha \* sqrt\(r\)"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] of peft_config has no counterpart"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern=.* leave it out"),
        ({"layers_to_transform": [0]}, r"layers_to_transform=\[0\]"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": False}, "init_lora_weights=False"),
        ({"exclude_modules": ["q_proj"]}, r"exclude_modules=.* in target_modules"),
    ],
)
def test_settings_of_adapters_are_never_left_out_silently(setting, message):
    with pytest.raises(ConfigError, match=message):
        make(peft_config=LoraConfig(r=8, **setting))


def test_settings_of_adapters_that_are_off_or_always_so_are_accepted():
    off = LoraConfig(r=8, use_rslora=False, rank_pattern={}, modules_to_save=[], task_type="CAUSAL_LM")
    assert make(peft_config=off).actor.lora_rank == 8
    head = LoraConfig(r=8, lora_alpha=16, task_type="SEQ_CLS", modules_to_save=["score"], target_modules="all-linear")
    assert make(RWConfig, peft_config=head).model.lora_alpha == 16


@pytest.mark.parametrize(
    "given", [{"workflow": "game:Workflow"}, {"config": {"workflow": "game:Workflow"}}, {"workflow": LikeTRL}]
)
def test_a_workflow_of_ones_own_is_refused_and_not_ignored(given):
    with pytest.raises(ConfigError, match=r"given: (game:Workflow|LikeTRL)\. Run it with `arealite train workflow="):
        GRPOTrainer("model", reward_fn=len, train_dataset=[{"prompt": "a"}], **given)


@pytest.mark.parametrize("as_args", [True, False])
@pytest.mark.parametrize("field", [{"chat_template_kwargs": {"enable_thinking": False}}, {"scale_rewards": "batch"}])
def test_fields_of_reinforcement_learning_are_unknown_to_supervised_trainers(field, as_args):
    with pytest.raises(ConfigError, match=f"unknown argument '{next(iter(field))}': it is one of GRPOTrainer"):
        make(SFTConfig, field) if as_args else make(SFTConfig, **field)


def test_other_models_have_the_type_and_device_of_the_trained_one():
    cases = [
        (make(DPOConfig, ref={"path": "org/other"}), "ref"),
        (make(beta=0.1, ref={"path": "org/other"}), "ref"),
        (make(config={"teacher": {"path": "org/other"}, "actor": {"distill_coef": 1.0}}), "teacher"),
        (make(**{"critic.path": "org/other", "actor.algorithm": "ppo"}), "critic"),
    ]
    for config, name in cases:
        trained = config.model if isinstance(config, DPOConfig) else config.actor
        assert getattr(config, name).dtype == trained.dtype == ("bfloat16" if torch.cuda.is_available() else "float32")
    config = make(DPOConfig, {"use_cpu": True, "ref": {"path": "org/other"}})
    assert (config.ref.path, config.ref.device, config.ref.dtype) == ("org/other", "cpu", "float32")
    config = make(DPOConfig, **{"model.dtype": "float32", "ref.path": "org/other", "ref.dtype": "bfloat16"})
    assert (config.model.dtype, config.ref.dtype) == ("float32", "bfloat16")
    assert make(DPOConfig, ref=None).ref.path == "org/model" and make(ref=None).ref is None


@pytest.mark.parametrize("kinds", [["sigmoid", "bco_pair", "sft"], ("ipo", "sft")])
def test_several_losses_of_preferences_are_refused_and_not_trained_as_one(kinds):
    with pytest.raises(
        ConfigError, match=r"loss_type=\['\w+', .*'sft'\] adds several losses, .* one of sigmoid, ipo, kto"
    ):
        make(DPOConfig, loss_type=kinds)
    assert make(DPOConfig, loss_type=("ipo",)).model.loss == "ipo"
    assert make(DPOConfig, loss_type=[]).model.loss == "dpo"


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"eos_token": "<|im_end|>"}, "set tokenizer.eos_token, and pass the tokenizer as processing_class"),
        ({"chat_template_path": "org/model"}, "set tokenizer.chat_template"),
        ({"push_to_hub": True}, r"result\.model\.push_to_hub"),
        ({"loss_type": "dft"}, "use nll for SFTTrainer"),
        ({"tokenizer": "object"}, "unknown argument 'tokenizer': pass the object as processing_class"),
    ],
)
def test_arguments_of_supervised_trainers_that_change_the_result_are_refused(field, message):
    with pytest.raises(ConfigError, match=message):
        make(SFTConfig, field)


def test_supervised_arguments():
    config = make(
        SFTConfig, {"learning_rate": 1e-4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    )
    assert (config.model.optimizer.lr, config.train_dataset.batch_size, config.model.path) == (1e-4, 8, "org/model")
    config = make(DPOConfig, beta=0.2, loss_type=["ipo"])
    assert (config.model.beta, config.model.loss, config.ref.path) == (0.2, "ipo", "org/model")
    assert make(DPOConfig, **{"model.loss": "simpo"}).ref is None
    model = make(DPOConfig, {"loss_type": "kto", "desirable_weight": 1.5, "undesirable_weight": 0.5}).model
    assert (model.loss, model.desirable_weight, model.undesirable_weight) == ("kto", 1.5, 0.5)
    config = make(SFTConfig, learning_rate=np.float64(0.5), seed=np.int64(3), per_device_train_batch_size=np.int64(4))
    assert (config.model.optimizer.lr, config.seed, config.train_dataset.batch_size) == (0.5, 3, 4)
    # What is trained on without them.
    given = read_given(SFTConfig, {"assistant_only_loss": True, "completion_only_loss": True}, None, {}, None)
    assert not given.warnings


def recorded_arguments() -> Any:
    """Return TRL's `GRPOConfig(output_dir="out", use_cpu=True, bf16=False)`, whose fields were recorded.

    TRL needs many packages, and its import takes eight seconds.
    """
    recorded = json.loads(Path(__file__).with_name("trl_grpo_config.json").read_text())["fields"]
    fields = [(name, Any, field(default_factory=object)) for name in recorded]
    for number, (name, values) in enumerate(recorded.items()):
        if "default" in values:
            fields[number] = (name, Any, field(default=values["default"]))
    cls = dataclasses.make_dataclass("RecordedGRPOConfig", fields)
    return cls(**{name: values["value"] for name, values in recorded.items()})


def test_the_real_arguments_of_trl_are_read_without_warnings():
    args = recorded_arguments()
    given = read_given(GRPOConfig, args, None, {}, None)
    assert given.warnings == []
    config = make(args=args)
    assert config.train_dataset.batch_size == 1 and dataclasses.is_dataclass(config)
