"""Evaluates the checkpoints of a run, also while the run goes on.

    arealite evaluate RUN_DIR [--once] [key=value]…

Follows `checkpoints/` of the run directory. Each new checkpoint is evaluated on servers of its own, which start for it
and end after it (`allocation_mode=embedded.d1+eval`, on the devices that CUDA_VISIBLE_DEVICES names). Validation sets
and sampling are those of the run's configuration; `key=value` changes them. Results go to the run's stats.jsonl and
TensorBoard files under the checkpoint's step, answers to `evaluations/`. A checkpoint that has its results is not
evaluated again, unless data, reward or sampling have changed. The command ends when the run has ended, or with --once
after the checkpoints that there are.
"""

import hashlib
import importlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from arealite.api.cli_args import EvalConfig
from arealite.api.dataset_args import DATA_FILES, ValidationDatasetConfig
from arealite.api.errors import ConfigError
from arealite.cli.arguments import ArgumentParser
from arealite.cli.main import loop_file
from arealite.launcher.job import StopEvent
from arealite.launcher.local import launch
from arealite.launcher.supervisor import INTERRUPTED
from arealite.trainer.stats_logger import read_stats
from arealite.utils.config import load_config, load_plain, run_main, to_yaml
from arealite.utils.rundir import RunDir, write_file

_POLL_INTERVAL_S = 5.0
_ADAPTER = "adapter_config.json"
# Sections of a run that its evaluation does not have.
_DROPPED = ("critic", "ref", "teacher", "recover", "controller", "saver", "evaluator")
# Keys of a validation set that do not change what is asked and how it is scored.
_IRRELEVANT = ("path", "streaming", "batch_size", "shuffle", "curriculum")
# Beside the answers: the data of which they are. Results without this file are of the data that the run names.
_DATA_FILE = "data.json"


@dataclass(frozen=True)
class Checkpoint:
    """A finished checkpoint. `version` is the number of steps before it.

    A run that recovers may save it again, at another time.
    """

    path: Path
    version: int
    saved_at_ns: int


def main(argv: list[str]) -> int:
    """Follow a run until it ends; returns 1 if a checkpoint could not be evaluated."""
    parser = ArgumentParser(
        "evaluate",
        __doc__,
        "arealite evaluate runs/gsm8k/trial0",
        "arealite evaluate runs/gsm8k/trial0 --once eval_gconfig.n_samples=8 eval_gconfig.temperature=0.6",
    )
    parser.add_argument("run_dir", help="the run directory, such as runs/gsm8k-grpo/trial0")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="such as eval_gconfig.max_new_tokens=1024"
    )
    parser.add_argument("--once", action="store_true", help="evaluate the checkpoints that there are, and end")
    options = parser.parse_intermixed_args(argv)
    run_dir = RunDir(options.run_dir)
    settings = read_settings(run_dir, options.overrides)
    importlib.import_module("arealite.trainer.tasks").check_data(settings, None)
    tried: set[Checkpoint] = set()
    num_idle = num_failed = 0
    with StopEvent() as stop:
        while True:
            # Asked before the search: a checkpoint that is written in between is found. A run that is restarted is not
            # in use for a moment, so it has ended only if it is not in use twice.
            num_idle = 0 if run_dir.is_in_use() else num_idle + 1
            for checkpoint in find_new(run_dir, settings):
                if checkpoint in tried:
                    continue
                tried.add(checkpoint)
                code = evaluate_checkpoint(settings, checkpoint)
                if code in INTERRUPTED or stop.is_set():
                    return code or 1
                num_failed += bool(code)
            if options.once or num_idle > 1:
                return 1 if num_failed or (not tried and not explain_nothing(run_dir)) else 0
            if stop.wait(_POLL_INTERVAL_S):
                return 128 + stop.number


def explain_nothing(run_dir: RunDir) -> bool:
    """Say why nothing was evaluated; return whether there are checkpoints (all have results)."""
    count = sum(is_complete(path) for path in run_dir.checkpoints.glob("step*"))
    if count:
        print(f"nothing to do: all {count} checkpoints in {run_dir.checkpoints} have results of this data and sampling")
    else:
        print(f"error: no checkpoint in {run_dir.checkpoints}: runs save their last model, more with saver.freq_steps")
    return count > 0


def read_settings(run_dir: RunDir, overrides: list[str]) -> EvalConfig:
    """Return the configuration of evaluations: that of the run, as far as it applies, and the overrides."""
    run_dir.check()
    if not run_dir.config_path.is_file():
        raise ConfigError(f"{run_dir.path} is not a run directory: it has no {run_dir.config_path.name}")
    run = _plain_config(run_dir)
    known = {field.name for field in fields(EvalConfig)} - set(_DROPPED)
    values = {key: value for key, value in run.items() if key in known}
    actor = values.get("actor") or {"path": (run.get("model") or {}).get("path", "")}
    own = {
        "actor": actor,
        "tokenizer_path": values.get("tokenizer_path") or actor["path"],
        "experiment_name": "jobs",
        "trial_name": "job",
        "allocation_mode": "embedded.d1+eval",
        "cluster": {"n_nodes": 1, "fileroot": str(run_dir.evaluations)},
        "results_dir": str(run_dir.path),
        # The run's own servers are not used.
        "rollout": {**(values.get("rollout") or {}), "server_addrs": []},
        "server": {
            **(values.get("server") or {}),
            **{"model_path": "", "port": 0, "api_key": None, "join": ""},
            # Adapters are loaded from the checkpoints of the run.
            "weight_folders": [str(run_dir.checkpoints)],
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create({**values, **own})))
        # Also as the keys of `arealite train`.
        own_keys = [key.removeprefix("trainer.grpo.") for key in overrides]
        config = load_config(["--config", str(path), *own_keys], EvalConfig)
    # No training data is read: the launcher must not look for it.
    return replace(config, train_dataset=next(iter(config.validation_sets.values())), train_datasets={})


def find_new(run_dir: RunDir, settings: EvalConfig) -> list[Checkpoint]:
    """Return the checkpoints without results, the oldest first."""
    results = {step["step"]: step for step in read_stats(run_dir)}
    run = _plain_config(run_dir)
    sets = {"valid": run.get("valid_dataset"), **(run.get("valid_datasets") or {})}
    of_run = {name: _describe(data, run) for name, data in sets.items() if data}
    paths = [path for path in run_dir.checkpoints.glob("step*") if is_complete(path)]
    found = [Checkpoint(path, int(path.name[4:]), _saved_at_ns(path)) for path in paths]
    found = [
        each
        for each in found
        if not _has_results(results.get(each.version - 1, {}), each.version, settings)
        or not _is_same_data(of_run if (data := _read_data(run_dir, each.version)) is None else data, settings)
    ]
    return sorted(found, key=lambda each: each.version)


def _plain_config(run_dir: RunDir) -> dict[str, Any]:
    values: Any = OmegaConf.to_container(load_plain(["--config", str(run_dir.config_path)], EvalConfig))
    return values


def _describe(data: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, str]:
    """Return the path of a validation set, and a digest of what else its results depend on.

    A digest, because `options` and `workflow_args` may hold keys of services.
    """
    known = {**asdict(ValidationDatasetConfig()), **data}
    parts = {key: value for key, value in known.items() if key not in _IRRELEVANT}
    parts["reward"] = known["reward"] or run.get("reward")
    parts |= {"workflow": run.get("workflow"), "workflow_args": run.get("workflow_args") or {}}
    text = json.dumps(parts, sort_keys=True, default=str)
    return {"path": known["path"], "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


def _describe_all(settings: EvalConfig) -> dict[str, dict[str, str]]:
    return {name: _describe(asdict(data), asdict(settings)) for name, data in settings.validation_sets.items()}


def _read_data(run_dir: RunDir, version: int) -> dict[str, dict[str, str]] | None:
    """Return the data of which an earlier `arealite evaluate` has results; None if there was none.

    If the file is damaged, the results are of unknown data: they match none.
    """
    path = run_dir.answers_path(version, "").with_name(_DATA_FILE)
    try:
        sets = json.loads(path.read_bytes()).items()
        return {name: {key: str(data[key]) for key in ("path", "digest")} for name, data in sets}
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, KeyError, TypeError):
        return {}


def _is_same_data(before: Mapping[str, Mapping[str, str]], settings: EvalConfig) -> bool:
    """Whether results are of the configured rows and rewards, which have the same names if they differ."""
    for name, now in _describe_all(settings).items():
        old = before.get(name)
        if old is None or old["digest"] != now["digest"]:
            return False
        if old["path"] != now["path"] and not _is_gone(old["path"]):
            return False
    return True


def _is_gone(path: str) -> bool:
    """Whether a local file does not exist (any more): it may have another path on this machine."""
    is_local = path.startswith(("/", ".", "~")) or path.endswith(DATA_FILES)
    return is_local and not Path(path).expanduser().exists()


def _saved_at_ns(path: Path) -> int:
    """Return when a checkpoint was saved; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def is_complete(path: Path) -> bool:
    """Whether a folder is a checkpoint that is not being written any more."""
    if not re.fullmatch(r"step\d+", path.name):
        return False
    has_model = (path / "config.json").exists() or (path / _ADAPTER).exists()
    # The tokenizer's files are moved into the folder last, from one beside it.
    return has_model and not Path(f"{path}.tokenizer").exists()


def _has_results(stats: dict[str, Any], version: int, settings: EvalConfig) -> bool:
    """Whether there are results of exactly these weights, sampled as configured.

    An evaluation beside training may have answers of later weights too.
    """
    sampling = settings.eval_gconfig.statistics(settings.gconfig)
    for name in settings.validation_sets:
        versions = {stats.get(f"eval/{name}/version/{end}") for end in ("min", "max")}
        others = [key for key, value in sampling.items() if stats.get(f"eval/{name}/{key}", value) != value]
        if others or versions != {version}:
            return False
    return True


def evaluate_checkpoint(settings: EvalConfig, checkpoint: Checkpoint) -> int:
    """Evaluate one checkpoint on servers of its own; returns the exit code."""
    path, name = checkpoint.path, checkpoint.path.name
    is_adapter = (path / _ADAPTER).exists()
    actor = replace(settings.actor, lora_rank=0, frozen_weight_dtype="auto", path=str(path))
    config = replace(settings, trial_name=name, version=checkpoint.version, actor=actor)
    if is_adapter:
        config = replace(config, actor=settings.actor, adapter=str(path))
    print(f"evaluating {path}", flush=True)
    job = RunDir(config)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(to_yaml(config))
        try:
            code = launch(loop_file(None), ["--config", str(file)])
        except ConfigError:
            # A run deletes the best model when it has a better one.
            if path.exists():
                raise
            return 0
    if code == 0:
        data_path = RunDir(config.results_dir).answers_path(checkpoint.version, "").with_name(_DATA_FILE)
        data_path.parent.mkdir(parents=True, exist_ok=True)
        write_file(data_path, json.dumps(_describe_all(settings)), private=False)
        shutil.rmtree(job.path, ignore_errors=True)
    elif code not in INTERRUPTED:
        print(f"warning: {name} was not evaluated: see {job.logs}", flush=True)
    return code


if __name__ == "__main__":
    run_main(main)
