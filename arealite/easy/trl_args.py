"""Translates arguments of TRL's trainers (`args=GRPOConfig(…)`) into configuration keys.

Reads attributes only: TRL is not imported. What changes the result of training and has no counterpart is refused with
what to use instead; what has none and changes nothing that was asked for is named in a warning.
"""

import dataclasses
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from arealite.api.errors import ConfigError

# Fields with a key of the same meaning. `{model}` is the section of the trained model.
_SAME = {
    "learning_rate": "{model}.optimizer.lr",
    "weight_decay": "{model}.optimizer.weight_decay",
    "adam_beta1": "{model}.optimizer.beta1",
    "adam_beta2": "{model}.optimizer.beta2",
    "adam_epsilon": "{model}.optimizer.eps",
    "max_grad_norm": "{model}.optimizer.gradient_clipping",
    "warmup_ratio": "{model}.optimizer.warmup_steps_proportion",
    "gradient_checkpointing": "{model}.gradient_checkpointing",
    "seed": "seed",
    "output_dir": "cluster.fileroot",
    "max_length": "train_dataset.max_length",
    "shuffle_dataset": "train_dataset.shuffle",
}
_SAME_RL = {
    "max_prompt_length": "train_dataset.max_length",
    "num_generations": "gconfig.n_samples",
    "max_completion_length": "gconfig.max_new_tokens",
    "temperature": "gconfig.temperature",
    "top_p": "gconfig.top_p",
    "top_k": "gconfig.top_k",
    "min_p": "gconfig.min_p",
    "repetition_penalty": "gconfig.repetition_penalty",
    "beta": "actor.kl_loss_coef",
    "entropy_coef": "actor.entropy_coef",
}
_SAME_PREFERENCES = {
    "beta": "model.beta",
    "desirable_weight": "model.desirable_weight",
    "undesirable_weight": "model.undesirable_weight",
}
# Fields that other fields decide about, or that are translated by a function below.
_READ = {
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs", "warmup_steps",
    "lr_scheduler_type", "optim", "bf16", "fp16", "use_cpu", "save_strategy", "save_steps", "eval_strategy",
    "eval_steps", "report_to", "loss_type", "beta",
    # Already so for rows with `messages`.
    "assistant_only_loss",
}  # fmt: skip
_READ_RL = {
    "generation_batch_size", "steps_per_generation", "scale_rewards", "importance_sampling_level", "epsilon",
    "epsilon_high", "delta", "reward_weights", "chat_template_kwargs", "num_generations_eval",
}  # fmt: skip
# Fields that must keep this value, and what to use instead.
_REFUSED: dict[str, tuple[Any, str]] = {
    "num_iterations": (1, "each batch is used once: take more optimizer steps with steps_per_generation"),
    "sync_ref_model": (False, "the reference stays as it is: leave beta at 0, or start from a later checkpoint"),
    "mask_truncated_completions": (False, "use actor.overlong_buffer, which lowers the reward of long answers"),
    "top_entropy_quantile": (1.0, "all tokens are trained: leave it out"),
    "use_adaptive_entropy": (False, "set entropy_coef"),
    "off_policy_mask_threshold": (None, "set actor.algorithm=m2po, or actor.behav_imp_weight_mode"),
    "multi_objective_aggregation": ("sum_then_normalize", "add the rewards in a function of your own"),
    "generation_kwargs": (None, "set keys of gconfig"),
    "max_tool_calling_iterations": (None, "use a workflow with tools (docs/workflows.md)"),
    "router_aux_loss_coef": (
        None,
        "set actor.router_aux_loss_coef (SFT and others: model.router_aux_loss_coef) to it times the experts per token",
    ),
    "lr_scheduler_kwargs": (None, "set actor.optimizer.min_lr_ratio"),
    "model_init_kwargs": (None, "set actor.dtype and actor.param_dtype"),
    "auto_find_batch_size": (False, "micro-batches fit themselves to the memory: leave it out"),
    "neftune_noise_alpha": (None, "there is no such noise: leave it out"),
    "deepspeed": (None, "use the launcher with an allocation_mode (docs/launching.md)"),
    "label_smoothing": (0.0, "preferences count as they are: leave it out"),
    "precompute_ref_log_probs": (False, "leave it out"),
    "packing": (False, "rows are always packed, without mixing them: leave it out"),
    "eos_token": (None, "set tokenizer.eos_token, and pass the tokenizer as processing_class"),
    "chat_template_path": (None, "set tokenizer.chat_template, and pass the tokenizer as processing_class"),
    "push_to_hub": (False, "upload the trained model when train() has returned: result.model.push_to_hub(…)"),
    "completion_only_loss": (True, "the loss is on the `completion` of a row: leave it out, or leave the prompt empty"),
}  # fmt: skip
# Fields that change nothing here: how TRL runs, logs and shows; what `__post_init__` fills in.
_IGNORED = (
    "logging_", "log_", "dataloader_", "ddp_", "vllm_", "hub_", "push_to_hub", "eval_", "save_", "fsdp", "torch_",
    "do_", "per_device_eval", "label_names", "_", "tf32", "disable_", "remove_unused", "ds3_", "pad_", "cast_lm",
    "num_completions", "accelerator_config", "parallelism_config", "average_tokens", "local_rank", "project",
    "trackio_", "include_", "skip_memory", "length_column", "train_sampling", "prediction_loss", "batch_eval",
    "jit_mode", "full_determinism", "data_seed", "ignore_data_skip", "restore_callback", "greater_is", "metric_for",
    "debug", "deepspeed_plugin", "gradient_checkpointing_kwargs", "group_by", "past_index", "mp_parameters", "run_name",
    "use_legacy", "use_liger", "trust_remote", "ref_model_", "cache_", "entropy_", "use_transformers",
    "transformers_", "use_vllm", "dataset_", "model_adapter",
    "ref_adapter", "overwrite_", "tpu_", "xpu_", "no_cuda", "half_precision", "enable_jit",
    "neftune", "liger", "distributed_", "resume_from", "warmup_", "lr_scheduler", "bf16_", "fp16_",
)  # fmt: skip
_OPTIMIZERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw")
_OPTIMIZERS |= dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit")
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
# Loss and its mean, by `loss_type`.
_LOSSES = {"grpo": ("clip", "sequence"), "bnpo": ("clip", "token"), "dapo": ("clip", "token"),
           "dr_grpo": ("clip", "constant"), "cispo": ("cispo", "token"), "sapo": ("sapo", "sequence")}  # fmt: skip
_SCALES = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}
# Values of `stats_logger`, by `report_to`.
_SERVICES = {"tensorboard": True, "wandb": "online", "swanlab": "online", "trackio": "local"}
_STRATEGIES = {"save": ("no", "steps", "epoch", "best"), "eval": ("no", "steps", "epoch")}
_PREFERENCES = {"sigmoid": "dpo", "ipo": "ipo", "kto": "kto"}
# Fields that are compared or computed with here, and those of them that are 1 or more. The configuration checks the
# others.
_NUMBERS = (
    "max_steps", "num_train_epochs", "warmup_steps", "save_steps", "eval_steps", "logging_steps",
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_generations", "num_generations_eval", "epsilon", "epsilon_high",
)  # fmt: skip

_COUNTS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_generations",
)  # fmt: skip

Fields = Mapping[str, Any]
Keys = dict[str, Any]


def field_names(is_rl: bool = True) -> set[str]:
    """Return the fields of TRL's arguments that are translated or refused."""
    return _SAME.keys() | _READ | _REFUSED.keys() | (_SAME_RL.keys() | _READ_RL if is_rl else _SAME_PREFERENCES.keys())


def is_field(name: str, is_rl: bool = True) -> bool:
    """Whether a keyword argument is a field of TRL's arguments that is translated or refused."""
    return name in field_names(is_rl)


def is_ignored(name: str, is_rl: bool) -> bool:
    """Whether a field of TRL's arguments changes nothing here."""
    # TRL cuts prompts of supervised rows at a length of their own; here `max_length` is that of the whole row.
    return name.startswith(_IGNORED) or (name == "max_prompt_length" and not is_rl)


def read_fields(args: Any) -> dict[str, Any]:
    """Return the fields of TRL's arguments, or of a dict of them, as plain values."""
    if isinstance(args, Mapping):
        values = dict(args)
    elif dataclasses.is_dataclass(args) and not isinstance(args, type):
        values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    elif hasattr(args, "__dict__") and not isinstance(args, type):
        values = dict(vars(args))
    else:
        raise ConfigError(f"args is {type(args).__name__}: give TRL's arguments, a dict, or keyword arguments")
    # Enums become their words.
    return {name: getattr(value, "value", value) for name, value in values.items()}


def unknown_fields(args: Any, fields: Fields, is_rl: bool) -> list[str]:
    """Return fields without counterpart that differ from their default."""
    if isinstance(args, Mapping) or not dataclasses.is_dataclass(args):
        return []
    found = []
    for field in dataclasses.fields(args):
        value, name = fields[field.name], field.name
        is_plain = field.default is not dataclasses.MISSING and isinstance(value, bool | int | float | str | list)
        if (
            is_plain
            and not is_field(name, is_rl)
            and not name.startswith(_IGNORED)
            and value not in (field.default, [])
        ):
            found.append(f"{name}={value!r}")
    return found


def translate(fields: Fields, section: str, on_gpu: bool) -> Keys:
    """Return keys of the configuration with `section` (actor or model) for the trained model.

    The key `warmup_steps` is left: it depends on the number of steps.
    """
    is_rl = section == "actor"
    for name, (allowed, advice) in _REFUSED.items():
        if name in fields and fields[name] not in (allowed, None, "", {}):
            raise ConfigError(f"{name}={fields[name]!r} has no counterpart: {advice}")
    _check_numbers(fields)
    same = _SAME | _SAME_RL if is_rl else _SAME
    found = {key.format(model=section): fields[name] for name, key in same.items() if fields.get(name) is not None}
    found |= _steps(fields) | _optimizer(fields, section) | _precision(fields, section, on_gpu)
    found |= _frequencies(fields) | _loggers(fields)
    found |= _rl_batch(fields) | _objective(fields) if is_rl else _batch(fields) | _preference(fields)
    # TRL counts optimizer steps; a step here is a whole generation batch.
    updates = found.get("actor.ppo_n_minibatches", 1)
    for key in ("total_train_steps", "saver.freq_steps", "evaluator.freq_steps", "warmup_steps"):
        if key in found:
            found[key] = math.ceil(found[key] / updates)
    return found


def check_batch(fields: Fields) -> None:
    """Raise `ConfigError` for multiples of a batch whose size is not given, which would change nothing."""
    if fields.get("per_device_train_batch_size") is not None or fields.get("generation_batch_size") is not None:
        return
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        value = fields.get(name)
        if isinstance(value, int) and value > 1:
            raise ConfigError(
                f"{name}={value!r} multiplies per_device_train_batch_size, which is not given: set both, or "
                "train_dataset.batch_size alone, the rows of a whole step (micro-batches fit themselves to the memory)"
            )


def _check_numbers(fields: Fields) -> None:
    for name in _NUMBERS:
        if not isinstance(fields.get(name, 0), Real | None):
            raise ConfigError(f"{name}={fields[name]!r} is {type(fields[name]).__name__}: give a number")
    for name in _COUNTS:
        if fields.get(name) is not None and not fields[name] >= 1:
            raise ConfigError(f"{name}={fields[name]!r} must be 1 or more")
    warmup = fields.get("warmup_steps")
    if warmup is not None and not 0 <= warmup < math.inf:
        raise ConfigError(f"warmup_steps={warmup!r} must be 0 or more")


def _steps(fields: Fields) -> Keys:
    if (fields.get("max_steps") or 0) > 0:
        return {"total_train_steps": fields["max_steps"]}
    epochs = fields.get("num_train_epochs")
    if epochs is None:
        return {}
    if not 0 < epochs < math.inf:
        raise ConfigError(f"num_train_epochs={epochs!r} must be a finite number above 0; or set max_steps")
    return {"total_train_epochs": math.ceil(epochs)}


def _optimizer(fields: Fields, section: str) -> Keys:
    found: Keys = {}
    for name, words, key in (("optim", _OPTIMIZERS, "type"), ("lr_scheduler_type", _SCHEDULES, "lr_scheduler_type")):
        value = fields.get(name)
        if value is not None:
            if value not in words:
                raise ConfigError(f"{name}={value!r} has no counterpart: use one of {', '.join(words)}")
            found[f"{section}.optimizer.{key}"] = words[value]
    warmup = fields.get("warmup_steps") or 0
    if 0 < warmup < 1:
        found[f"{section}.optimizer.warmup_steps_proportion"] = warmup
    elif warmup:
        found["warmup_steps"] = warmup
    return found


def _precision(fields: Fields, section: str, on_gpu: bool) -> Keys:
    found: Keys = {f"{section}.device": "cpu"} if fields.get("use_cpu") else {}
    if on_gpu and not fields.get("use_cpu"):
        if fields.get("fp16"):
            found[f"{section}.dtype"] = "float16"
        elif fields.get("bf16") is not None:
            found[f"{section}.dtype"] = "bfloat16" if fields["bf16"] else "float32"
    return found


def _frequencies(fields: Fields) -> Keys:
    found: Keys = {}
    for name, part in (("save", "saver"), ("eval", "evaluator")):
        strategy, steps = fields.get(f"{name}_strategy"), fields.get(f"{name}_steps")
        if strategy is None and steps is not None:
            strategy = "steps"
        if strategy not in (None, *_STRATEGIES[name]):
            raise ConfigError(f"{name}_strategy={strategy!r} has no counterpart: use {', '.join(_STRATEGIES[name])}")
        if strategy == "best":
            found["saver.keep_best"] = True
        if strategy == "epoch":
            found[f"{part}.freq_epochs"] = 1
        elif strategy == "steps":
            steps = steps or fields.get("logging_steps") or 500
            if steps < 1:
                raise ConfigError(f"{name}_steps={steps} is a share of all steps: give a number of steps")
            found[f"{part}.freq_steps"] = int(steps)
    return found


def _loggers(fields: Fields) -> Keys:
    wanted = fields.get("report_to") or []
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    names = [name for name in names if name not in ("none", "all")]
    unknown = [name for name in names if name not in _SERVICES]
    if unknown:
        raise ConfigError(f"report_to={unknown[0]!r} has no counterpart: use none or {', '.join(_SERVICES)}")
    return {f"stats_logger.{name}": _SERVICES[name] for name in names}


def _batch(fields: Fields) -> Keys:
    size = fields.get("per_device_train_batch_size")
    if size is None:
        return {}
    return {"train_dataset.batch_size": size * (fields.get("gradient_accumulation_steps") or 1)}


def _rl_batch(fields: Fields) -> Keys:
    """TRL counts completions: a generation batch is used in one or several optimizer steps."""
    size, accumulated = fields.get("per_device_train_batch_size"), fields.get("gradient_accumulation_steps") or 1
    steps, whole = fields.get("steps_per_generation"), fields.get("generation_batch_size")
    if size is None and whole is None:
        return {}
    size = size or 8
    whole = whole or size * (steps or accumulated)
    group = fields.get("num_generations") or 8
    if whole % group:
        raise ConfigError(
            f"a batch has {whole} completions (per_device_train_batch_size={size} times {whole // size}), which is not "
            f"divisible by num_generations={group}: change one of them"
        )
    if whole % (size * accumulated):
        raise ConfigError(
            f"a generation batch has {whole} completions, which is not divisible by the {size * accumulated} of an "
            "optimizer step (per_device_train_batch_size times gradient_accumulation_steps): change one of them"
        )
    updates = whole // (size * accumulated)
    return {"train_dataset.batch_size": whole // group, "actor.ppo_n_minibatches": updates}


def _objective(fields: Fields) -> Keys:
    kind, scale = fields.get("loss_type"), fields.get("scale_rewards")
    level = fields.get("importance_sampling_level") or "token"
    if kind is not None and kind not in _LOSSES:
        raise ConfigError(f"loss_type={kind!r} has no counterpart: use one of {', '.join(_LOSSES)}")
    if scale is not None and scale not in _SCALES:
        raise ConfigError(f"scale_rewards={scale!r} has no counterpart: use group, batch or none")
    if level not in ("token", "sequence"):
        raise ConfigError(f"importance_sampling_level={level!r} has no counterpart: use token or sequence")
    found: Keys = {}
    loss, mean = _LOSSES[kind or "grpo"]
    if level == "sequence":
        if loss != "clip":
            raise ConfigError(f"loss_type={kind!r} has no sequence level: leave importance_sampling_level at token")
        # How token losses are averaged is that of `loss_type`.
        loss = "gspo"
    if kind is not None or scale is not None or level == "sequence":
        norm = {"mean_level": "group", "std_level": _SCALES[True if scale is None else scale]}
        found = {"actor.algorithm": "custom", "actor.loss": loss, "actor.loss_mean": mean, "actor.reward_norm": norm}
    if loss != "sapo":
        found |= {
            key: fields[name]
            for name, key in (("epsilon", "actor.eps_clip"), ("epsilon_high", "actor.eps_clip_higher"))
            if fields.get(name) is not None
        }
    if loss == "cispo":
        # TRL's epsilon_high is the largest weight itself, and there is no smallest.
        largest = fields.get("epsilon_high") or fields.get("epsilon") or 0.2
        if largest <= 1:
            raise ConfigError(f"loss_type='cispo' cuts weights at epsilon_high={largest}: set one above 1, such as 5")
        found |= {"actor.eps_clip": 1.0, "actor.eps_clip_higher": largest - 1.0}
    if fields.get("delta") is not None:
        found["actor.c_clip"] = fields["delta"]
    if (fields.get("num_generations_eval") or 1) > 1:
        found |= {"eval_gconfig.n_samples": fields["num_generations_eval"]}
        found |= {"eval_gconfig.temperature": fields.get("temperature") or 1.0}
    return found


def _preference(fields: Fields) -> Keys:
    kind = fields.get("loss_type")
    if isinstance(kind, list | tuple):
        if len(kind) > 1:
            raise ConfigError(
                f"loss_type={list(kind)} adds several losses, which has no counterpart: use one of "
                f"{', '.join(_PREFERENCES)}, or set model.loss"
            )
        kind = next(iter(kind), None)
    found: Keys = {key: fields[name] for name, key in _SAME_PREFERENCES.items() if fields.get(name) is not None}
    if kind not in (None, "nll", "chunked_nll"):
        if kind not in _PREFERENCES:
            raise ConfigError(
                f"loss_type={kind!r} has no counterpart: use nll for SFTTrainer; sigmoid, ipo or kto, or model.loss, "
                "for DPOTrainer"
            )
        found["model.loss"] = _PREFERENCES[kind]
    return found
