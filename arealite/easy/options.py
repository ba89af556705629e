"""Makes the configuration of a run from what a Python caller gives.

Later sources win: defaults for this machine, TRL's `args`, `config`, keyword arguments. A keyword argument is a key of
the configuration (`seed`, `gconfig={…}`, `**{"actor.optimizer.lr": 1e-5}`) or a field of TRL's arguments
(`learning_rate`, `max_steps`).
"""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig
from arealite.api.errors import ConfigError
from arealite.dataset.loader import check_training_rows
from arealite.easy.peft_args import read_peft
from arealite.easy.trl_args import (
    check_batch,
    field_names,
    is_field,
    is_ignored,
    read_fields,
    translate,
    unknown_fields,
)
from arealite.utils.config import load_plain, merge_sources
from arealite.utils.config_help import nearest_text

C = TypeVar("C", bound=BaseExperimentConfig)
Keys = dict[str, Any]

# Defaults of reinforcement learning; those on a GPU are the settings of examples/arealite/configs/gsm8k_grpo.yaml.
_RL: Keys = {
    "allocation_mode": "embedded.d1p1t1+d1p1t1",
    "gconfig.n_samples": 8,
    "rollout.max_head_offpolicyness": 2,
    "actor.ppo_n_minibatches": 2,
}
_RL_ON_CPU: Keys = {"train_dataset.batch_size": 8, "gconfig.max_new_tokens": 128, "rollout.pause_mode": "in_place"}
# Sections of models beside the trained one.
_OTHER_MODELS = ("critic", "ref", "teacher")
# Arguments of `GRPOTrainer` that are neither keys nor fields of TRL.
_REWARD_ARGUMENTS = {"reward_fn", "reward_funcs", "reward_weights", "train_dataset", "eval_dataset"}
_RL_ON_GPU: Keys = {
    "train_dataset.batch_size": 64,
    "gconfig.max_new_tokens": 1024,
    "actor.optimizer.weight_decay": 0.017,
    "actor.optimizer.beta2": 0.999,
}


@dataclass
class Given:
    """What the caller has set: sources of keys with their names, and fields of TRL that are no keys."""

    sources: list[tuple[str, DictConfig]] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the last value that was given for a dotted key."""
        values = [OmegaConf.select(source, key) for _, source in self.sources]
        return next((value for value in reversed(values) if value is not None), default)


def read_given(
    cls: type[BaseExperimentConfig], args: Any, config: Any, options: Mapping[str, Any], peft_config: Any
) -> Given:
    """Read all sources. Raises `ConfigError` for what cannot be translated."""
    section, given = ("actor" if issubclass(cls, GRPOConfig) else "model"), Given()
    if isinstance(args, BaseExperimentConfig):
        args, config = None, args if config is None else config
    is_rl, on_gpu = section == "actor", torch.cuda.is_available()
    own_keys = {field.name for field in dataclasses.fields(cls)}
    fields = {} if args is None else read_fields(args)
    plain = {**(fields if isinstance(args, Mapping) else {}), **options}
    ignored = {
        name: value
        for name, value in plain.items()
        if name.split(".")[0] not in own_keys and not is_field(name, is_rl) and is_ignored(name, is_rl)
    }
    _check_names([name for name in plain if name not in ignored], own_keys, is_rl)
    if ignored:
        given.warnings.append(_ignored_text(f"{name}={value!r}" for name, value in ignored.items()))
    if isinstance(args, Mapping):
        # A dict may mix fields of TRL and keys.
        keys = {name: value for name, value in fields.items() if not is_field(name, is_rl) and name not in ignored}
        fields = {name: value for name, value in fields.items() if name not in keys}
        given.sources.append(("args", _nested(keys, "args")))
    elif args is not None:
        names = unknown_fields(args, fields, is_rl)
        if names:
            given.warnings.append(_ignored_text(names))
    short = {k: v for k, v in options.items() if k not in own_keys and (is_field(k, is_rl) or k in ignored)}
    given.fields = {**fields, **short}
    check_batch(given.fields)
    of_args, of_all = (translate(each, section, on_gpu) if each else {} for each in (fields, given.fields))
    # Some fields have a meaning only together: a batch size and the size of a group.
    own = {key: value for key, value in of_all.items() if key not in of_args or of_args[key] != value}
    own |= {key: value for key, value in options.items() if key not in short}
    for source, keys in (("args", of_args), ("peft_config", read_peft(peft_config, section))):
        given.sources.append((source, _nested(keys, source)))
    given.sources.append(("config", _read_config(config, cls)))
    given.sources.append(("the keyword arguments", _nested(own, "the keyword arguments")))
    return given


def _check_names(names: Iterable[str], own_keys: set[str], is_rl: bool) -> None:
    """Raise `ConfigError` for a misspelled argument; names without a near one are checked with the keys."""
    known = own_keys | field_names(is_rl) | (_REWARD_ARGUMENTS if is_rl else set())
    for name in names:
        if name == "tokenizer":
            raise ConfigError(
                "unknown argument 'tokenizer': pass the object as processing_class, or its folder or hub name as "
                "tokenizer_path"
            )
        if not is_rl and is_field(name) and not is_field(name, is_rl):
            raise ConfigError(f"unknown argument {name!r}: it is one of GRPOTrainer only, leave it out")
        near = nearest_text(name, sorted(known))
        if name.split(".")[0] not in known and near:
            raise ConfigError(f"unknown argument {name!r}: {near}")


def _ignored_text(fields: Iterable[str]) -> str:
    return f"arguments without counterpart here are ignored: {', '.join(fields)}"


def _read_config(config: Any, cls: type[BaseExperimentConfig]) -> DictConfig:
    """Read `config`: a nested dict, a file, or a configuration of this package."""
    if config is None:
        return OmegaConf.create({})
    if isinstance(config, str | Path):
        return load_plain(["--config", str(config)], cls)
    if isinstance(config, BaseExperimentConfig):
        return OmegaConf.structured(config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is {type(config).__name__}: give a dict of keys, or the path of a .yaml file")
    return _nested(config, "config")


def _nested(keys: Mapping[str, Any], source: str) -> DictConfig:
    """Return dotted keys as a tree."""
    tree = OmegaConf.create({})
    try:
        for key, value in keys.items():
            OmegaConf.update(tree, key, _plain(value), merge=True)
    except (OmegaConfBaseException, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read {source}: {str(error).splitlines()[0]}") from error
    return tree


def _plain(value: Any) -> Any:
    """Return a path as text, and a scalar of numpy as a number."""
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return str(value) if isinstance(value, Path) else value.item() if is_scalar else value


def make_config(cls: type[C], given: Given, model: str, data: Keys) -> C:
    """Merge and check everything. `data` has the keys of the datasets.

    The names of the run are those of the defaults until it starts.
    """
    is_rl = issubclass(cls, GRPOConfig)
    section = "actor" if is_rl else "model"
    device = given.get(f"{section}.device", "auto")
    on_gpu = torch.cuda.is_available() and device != "cpu"
    defaults: dict[str, Any] = {"experiment_name": cls.__name__.removesuffix("Config").lower(), "trial_name": "run"}
    defaults |= {f"{section}.path": model, f"{section}.dtype": "bfloat16" if on_gpu else "float32"}
    # The log-probs of all models are compared. A reference that is not given is made so too.
    shared = {
        key: given.get(f"{section}.{key}", defaults.get(f"{section}.{key}", "auto")) for key in ("dtype", "device")
    }
    others = [name for name in _OTHER_MODELS if any(name in source for _, source in given.sources)]
    defaults |= {f"{name}.{key}": value for name in others for key, value in shared.items()}
    if is_rl:
        defaults |= _RL | (_RL_ON_GPU if on_gpu else _RL_ON_CPU)
        defaults |= {"server.device": device} if device != "auto" else {}
        is_plain_grpo = given.get("actor.algorithm", "grpo") == "grpo" and given.get("actor.loss", "clip") == "clip"
        if on_gpu and is_plain_grpo:
            defaults["actor.prox_logp"] = "interpolate"
        defaults |= _implied(given, int(given.get("gconfig.max_new_tokens", defaults["gconfig.max_new_tokens"])))
    sources = [(name, _without(values, ("warmup_steps",))) for name, values in given.sources]
    has_sets = given.get("valid_dataset") is not None or given.get("valid_datasets")
    if not has_sets and not any(key.startswith("valid_dataset") for key in data):
        if given.get("saver.keep_best"):
            warnings.warn(
                "saver.keep_best (save_strategy='best') compares evaluations, and there is no eval_dataset: only the "
                "last model is saved. Give eval_dataset",
                stacklevel=4,
            )
        # Arguments of TRL may ask for evaluations without a set.
        sources = [(name, _without(v, ("evaluator",)) if name == "args" else v) for name, v in sources]
    merged = [("the defaults", _nested(defaults, "the defaults")), *sources, ("the datasets", _nested(data, "data"))]
    config = merge_sources(merged, cls)
    if (config.controller, config.num_shares) != (False, 1):
        raise ConfigError(
            f"allocation_mode={config.allocation_mode} has several trainers, and the trainer runs in this process: "
            "use d1 after the +, or the launcher (docs/launching.md)"
        )
    return config


def _without(values: DictConfig, keys: tuple[str, ...]) -> DictConfig:
    kept = {k: v for k, v in values.items_ex(resolve=False) if k not in keys}
    return OmegaConf.create(kept)


def _implied(given: Given, max_new_tokens: int) -> dict[str, Any]:
    """Return keys that follow from others."""
    found: dict[str, Any] = {}
    temperature = given.get("gconfig.temperature")
    if temperature:
        found["actor.temperature"] = temperature
    if given.get("actor.loss_mean") == "constant" or given.get("actor.algorithm") in ("dr_grpo", "dapo"):
        found["actor.max_answer_length"] = max_new_tokens
    return found


def fit_to_rows(config: C, given: Given, num_rows: int) -> C:
    """Fill in what depends on the number of rows and is not given: batch size, epochs and warm-up.

    Raises `DatasetError` for a batch size that was given and is more than the rows, and for too few rows.
    """
    data = config.train_dataset
    if given.get("train_dataset.batch_size") is None and num_rows < data.batch_size:
        data = dataclasses.replace(data, batch_size=num_rows)
    check_training_rows(dataclasses.replace(config, train_dataset=data), num_rows)
    per_epoch = num_rows // data.batch_size
    epochs, steps = config.total_train_epochs, config.total_train_steps
    if epochs is None:
        epochs = 1 if steps is None else -(-steps // per_epoch)
    config = dataclasses.replace(config, train_dataset=data, total_train_epochs=epochs)
    warmup = given.get("warmup_steps")
    if warmup is not None:
        section = "actor" if isinstance(config, GRPOConfig) else "model"
        part = getattr(config, section)
        total = min(steps or epochs * per_epoch, epochs * per_epoch)
        if warmup > total:
            warnings.warn(
                f"warmup_steps={warmup:g} is more than the {total} steps of the run: the learning rate rises until the "
                "end. Lower warmup_steps, or train longer",
                stacklevel=4,
            )
        optimizer = dataclasses.replace(part.optimizer, warmup_steps_proportion=min(1.0, warmup / total))
        config = dataclasses.replace(config, **{section: dataclasses.replace(part, optimizer=optimizer)})
    config.check()
    return config
