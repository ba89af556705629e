"""Train or evaluate from a configuration alone, without a script.

    arealite train trainer.type=grpo trainer.grpo.actor.path=Qwen/Qwen2-0.5B        (or python -m arealite.cli.main …)
    arealite eval valid_dataset.path=…/gsm8k/test.jsonl                            (or trainer.type=null)
    arealite train mode=ray allocation_mode=sglang.d16p1m1+d32p2m1 trainer.type=grpo

Turns the tree below into the flat configuration of scripts, and runs the matching loop of `arealite/trainer/` with the
launcher that `mode` names. `--help` lists the keys; `--dry-run` prints what would be started where. What needs torch is
imported when the configuration is known to be right.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import tempfile
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arealite.api.alloc_mode import AllocationMode
from arealite.api.backends import API_KEY_ENV
from arealite.api.cli_args import (
    BaseExperimentConfig,
    DatasetConfig,
    DPOConfig,
    EvalConfig,
    GenerationHyperparameters,
    GRPOConfig,
    PPOActorConfig,
    PreferenceConfig,
    RWConfig,
    SaverConfig,
    SFTConfig,
    TrainEngineConfig,
)
from arealite.api.config_field import help_field
from arealite.api.errors import AReaLiteError, ConfigError
from arealite.api.trainer_api import load_trainer
from arealite.launcher.output import lasting_output
from arealite.utils.activity import activity
from arealite.utils.config import load_config, private_yaml, run_main
from arealite.utils.config_help import USAGE, CommandHelp
from arealite.utils.rundir import RunDir, write_file
from arealite.utils.startup import launch_began

# The configuration of each `trainer.type`.
TRAINERS: dict[str | None, type[BaseExperimentConfig]] = {
    "grpo": GRPOConfig,
    "sft": SFTConfig,
    "rw": RWConfig,
    "dpo": DPOConfig,
    None: EvalConfig,
}
# Its loop in `arealite.trainer`; any other type has `custom`.
_LOOPS = {"grpo": "ppo", "sft": "sft", "rw": "rw", "dpo": "dpo", None: "evaluate"}
MODES = ("local", "torchrun", "ray", "slurm")
DEFAULT_MODEL = "Qwen/Qwen2-0.5B"
HELP = CommandHelp(
    f"arealite train {USAGE} [--dry-run]",
    "Train from a configuration alone: reinforcement learning, supervised, reward model, preferences. A script of "
    "your own has the same keys without `trainer.TYPE.`; `arealite launch local SCRIPT.py` runs it.",
    (
        ("arealite train trainer.grpo.actor.path=Qwen/Qwen2-0.5B --dry-run", "what would be started where"),
        ("arealite train trainer.type=sft train_dataset.path=chats.jsonl", "supervised fine-tuning"),
        ("arealite train train_dataset.path=mine.jsonl reward=mine:score", "your own data and reward function"),
        ("arealite train --config run.yaml seed=2", "a file, and one value changed"),
        ("arealite train --help actor", "the keys of one part"),
        ("arealite train --help lr", "all keys with a word in their name"),
    ),
)


def _own_fields(config_class: type, **defaults: Callable[[], Any]) -> Any:
    """Make the dataclass of `trainer.<type>`: the fields that `config_class` adds to those of every run."""
    common = {f.name for f in dataclasses.fields(BaseExperimentConfig)}
    types = typing.get_type_hints(config_class)
    own = {f.name: f for f in dataclasses.fields(config_class) if f.name not in common}
    own |= {k: help_field(own[k].metadata["help"], default) for k, default in defaults.items()}
    fields = [(name, types[name], each) for name, each in own.items()]
    return dataclasses.make_dataclass(config_class.__name__, fields)


if TYPE_CHECKING:
    GRPOTree = GRPOConfig
    SFTTree = SFTConfig
    RWTree = RWConfig
    DPOTree = DPOConfig
else:
    GRPOTree = _own_fields(
        GRPOConfig,
        actor=lambda: PPOActorConfig(path=DEFAULT_MODEL, ppo_n_minibatches=2),
        gconfig=lambda: GenerationHyperparameters(n_samples=8),
    )
    SFTTree = _own_fields(SFTConfig, model=lambda: TrainEngineConfig(path=DEFAULT_MODEL))
    RWTree = _own_fields(RWConfig, model=lambda: TrainEngineConfig(path=DEFAULT_MODEL))
    DPOTree = _own_fields(DPOConfig, model=lambda: PreferenceConfig(path=DEFAULT_MODEL))


@dataclass
class TrainerTree:
    """The training loop and its own settings."""

    type: str | None = help_field(
        "grpo, sft, rw, dpo, null to evaluate only, or package.module:Class of your own trainer.", "grpo"
    )
    args: dict[str, Any] = help_field("Keys that the configuration of your own trainer adds.", dict, secret=True)
    grpo: GRPOTree = help_field("Reinforcement learning: the whole GRPO/PPO family.", GRPOTree)
    sft: SFTTree = help_field("Supervised fine-tuning.", SFTTree)
    rw: RWTree = help_field("Reward model.", RWTree)
    dpo: DPOTree = help_field("Preference learning.", DPOTree)


@dataclass
class MainConfig(BaseExperimentConfig):
    """The configuration tree of this command."""

    experiment_name: str = help_field("First part of the run directory's name.", "arealite")
    trial_name: str = help_field("Second part; by default trainer.type, or eval.", "")
    mode: str = help_field("Launcher: local, torchrun, ray or slurm.", "local")
    allocation_mode: str = help_field(
        "Devices and parallelism; by default one trainer, and one embedded server if one is needed.", ""
    )
    train_dataset: DatasetConfig = help_field(
        "Training data.", lambda: DatasetConfig(path="openai/gsm8k", name="main", split="train", batch_size=64)
    )
    saver: SaverConfig = help_field("When models are saved, besides the last.", lambda: SaverConfig(freq_epochs=1))
    trainer: TrainerTree = help_field("The training loop and its settings.", TrainerTree)

    def check(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; use one of {', '.join(MODES)}")
        if self.trainer.type not in TRAINERS and ":" not in str(self.trainer.type):
            known = ", ".join(str(name or "null") for name in TRAINERS)
            raise ConfigError(
                f"trainer.type is {self.trainer.type!r}; use one of {known}, or package.module:Class of your own"
            )
        if self.trainer_class is not None:
            raise ConfigError(f"trainer_class is {self.trainer_class!r}: set trainer.type to it instead")
        if self.trainer.type is None and not self.validation_sets:
            raise ConfigError("evaluation needs a dataset: set valid_dataset.path")
        if self.allocation_mode:
            AllocationMode.from_str(self.allocation_mode)
        if self.saver.best_metric is not None:
            self._check_best_metric(self.saver.best_metric)

    def _check_best_metric(self, metric: str) -> None:
        """Refuse a statistic that no evaluation of this run has: no model would be kept as the best."""
        known = [f"eval/{name}/" for name in self.validation_sets]
        if not metric.startswith(tuple(known)):
            expected = f"its name begins with {' or '.join(known)}" if known else "set valid_dataset.path too"
            raise ConfigError(f"saver.best_metric={metric} is not a statistic of a validation set: {expected}")
        name = metric.split("/")[2]
        is_answer_share = name.startswith(("pass@", "maj@"))
        if self.trainer.type in ("sft", "rw", "dpo"):
            if is_answer_share:
                raise ConfigError(
                    f"saver.best_metric={metric} is not measured: trainer.type={self.trainer.type} generates no "
                    f"answers and measures its loss, as {metric.rpartition('/')[0]}/loss"
                )
            return
        count = self.trainer.grpo.eval_gconfig.n_samples
        # It imports numpy.
        counts: list[int] = importlib.import_module("arealite.algo.eval_metrics").reported_counts(count)
        measured = [f"pass@{k}" for k in counts] + [f"maj@{k}" for k in counts if k > 1]
        is_known = name in (*measured, "reward", "answer_len", "truncated")
        # A trainer of the user's own may measure more.
        if not is_known and (is_answer_share or self.trainer.type == "grpo"):
            raise ConfigError(
                f"saver.best_metric={metric} is not measured: trainer.grpo.eval_gconfig.n_samples={count} gives "
                f"{', '.join(measured)}, and there is reward"
            )


def _section(config_class: type[BaseExperimentConfig]) -> str:
    """Return which section of `trainer` has the keys of a configuration."""
    sections = {"grpo": GRPOConfig, "sft": SFTConfig, "rw": RWConfig, "dpo": DPOConfig}
    found = next((name for name, cls in sections.items() if issubclass(config_class, cls)), None)
    if found is None:
        names = ", ".join(cls.__name__ for cls in sections.values())
        raise ConfigError(
            f"{config_class.__name__}, the config_class of the trainer, is not a subclass of one of {names}"
        )
    return found


def flatten(config: MainConfig) -> BaseExperimentConfig:
    """Return the configuration of the script that will run: common keys, and those of the chosen trainer."""
    kind = config.trainer.type
    script_config = TRAINERS[kind] if kind in TRAINERS else load_trainer(str(kind)).config_class
    tree = getattr(config.trainer, _section(script_config))
    common = {f.name: getattr(config, f.name) for f in dataclasses.fields(BaseExperimentConfig)}
    if kind not in TRAINERS:
        common["trainer_class"] = kind
    common["trial_name"] = config.trial_name or (kind or "eval").rpartition(":")[2]
    default = "embedded.d1p1t1+d1p1t1" if issubclass(script_config, GRPOConfig) else "d1"
    common["allocation_mode"] = config.allocation_mode or default
    if config.trainer.type is None:
        # An evaluation reads no training data: the launcher must not look for the default one.
        data = dataclasses.replace(next(iter(config.validation_sets.values())), path="")
        common |= {"train_dataset": data, "train_datasets": {}}
    elif config.train_datasets:
        # Its path is the default.
        common["train_dataset"] = dataclasses.replace(config.train_dataset, path="", name=None, split=None)
    unknown = sorted(config.trainer.args.keys() - {f.name for f in dataclasses.fields(script_config)})
    if unknown:
        raise ConfigError(f"trainer.args has {unknown[0]!r}, which {script_config.__name__} does not have")
    flat = script_config(**{**common, **vars(tree), **config.trainer.args})
    flat.check()
    return flat


@contextmanager
def _config_file(flat: BaseExperimentConfig, folder: Path) -> Iterator[Path]:
    """Write the file that ranks read, named by its content; remove it if the run is refused.

    The launcher writes config.yaml itself, when it has made sure that no other run uses the folder.
    """
    if isinstance(flat, GRPOConfig) and flat.server.api_key:
        # The file refers to this variable: other users may read the file.
        os.environ[API_KEY_ENV] = flat.server.api_key
    text = private_yaml(flat)
    path = folder / f"config-{hashlib.sha256(text.encode()).hexdigest()[:12]}.yaml"
    # A running job of the same configuration reads the same file.
    is_new = not path.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, text, private=True)
    except OSError as error:
        raise RunDir(folder).unwritable(error) from error
    try:
        yield path
    except AReaLiteError:
        if is_new:
            path.unlink(missing_ok=True)
            # The folders of the run and of the experiment, if nothing else is in them.
            for empty in (folder, folder.parent):
                with suppress(OSError):
                    empty.rmdir()
        raise


def main(argv: list[str]) -> int:
    return run(argv, HELP)


def run(argv: list[str], about: CommandHelp) -> int:
    """Run what the arguments configure; returns the exit code."""
    dry_run = "--dry-run" in argv
    config = load_config([argument for argument in argv if argument != "--dry-run"], MainConfig, about)
    kind = config.trainer.type
    is_own = kind not in TRAINERS
    flat = flatten(config)
    # A trainer of the user's own may have data of its own.
    if not dry_run and not is_own:
        with _shown("checking the data and the reward"):
            _check_data(flat, kind)
    with (
        tempfile.TemporaryDirectory() as scratch,
        _config_file(flat, Path(scratch) if dry_run else RunDir(flat).path) as path,
    ):
        # Only one launcher is imported: Ray is optional.
        launcher = importlib.import_module(f"arealite.launcher.{config.mode}")
        # The local launcher takes its caller for a script, whose own work before is no part of the start.
        more = {"began": launch_began()} if config.mode == "local" else {}
        code = launcher.launch(loop_file(kind), ["--config", str(path)], dry_run, **more)
    if dry_run and not is_own:
        # After the plan, so that it is printed also for data that cannot be used.
        _check_data(flat, kind)
    return code


@contextmanager
def _shown(text: str) -> Iterator[None]:
    """Say what is done, and go on saying it if it takes long. No thread is left behind."""
    with lasting_output():
        print(text, flush=True)
        activity.watch()
        try:
            with activity.doing(text):
                yield
        finally:
            activity.close()


def loop_file(kind: str | None) -> Path:
    """Return the script that runs on every rank. It is not imported: that would import torch."""
    spec = importlib.util.find_spec(f"arealite.trainer.{_LOOPS.get(kind, 'custom')}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def _check_data(flat: BaseExperimentConfig, kind: str | None) -> None:
    importlib.import_module("arealite.trainer.tasks").check_data(flat, kind)


if __name__ == "__main__":
    run_main(main)
