"""Reads the part of a script's configuration that launchers need, before any process starts.

`read_launch_config` finds the config class in the script's source and loads it, so that a wrong key, type or
combination is rejected at once. It imports neither torch nor the script.
"""

import ast
import dataclasses
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from arealite.api import cli_args
from arealite.api.alloc_mode import AllocationMode
from arealite.api.config_field import check_section, check_text
from arealite.api.errors import ConfigError
from arealite.utils import rundir
from arealite.utils.config import CHECK_ONLY_ENV, bad_value, load_config, load_plain, public_yaml
from arealite.utils.settings.nodes import schema_of, to_node

_CHECK_TIMEOUT_S = 300.0
# Sections of a configuration that become engines.
_MODELS = ("actor", "critic", "ref", "teacher", "model")
_DATASETS = ("train_dataset", "valid_dataset")


@dataclass
class _ReadKeys:
    """The keys that a launcher reads as they are. A script's configuration may have any others."""

    experiment_name: str = "run"
    trial_name: str = "trial"
    allocation_mode: str = "d1"
    cluster: cli_args.ClusterConfig = field(default_factory=cli_args.ClusterConfig)
    launcher: cli_args.LauncherConfig = field(default_factory=cli_args.LauncherConfig)
    recover: cli_args.RecoverConfig = field(default_factory=cli_args.RecoverConfig)
    server: cli_args.ServerConfig = field(default_factory=cli_args.ServerConfig)
    sglang: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str | None = None
    controller: bool = False
    dashboard: bool | int = False


@dataclass
class LaunchConfig(_ReadKeys):
    """What a launcher knows of a configuration: keys, and what is derived from other sections.

    A script may use the names of the derived fields for keys of its own.
    """

    model_path: str = ""
    train_device: str = "auto"
    setup_timeout_s: float = 300.0
    weight_update: str = "auto"
    server_addrs: list[str] = field(default_factory=list)
    # Of the adapters that servers may get; 0 if they get whole weights.
    lora_rank: int = 0
    routing_replay: bool = False
    # Names of the sections that become engines, and the path of each model, by key.
    models: list[str] = field(default_factory=list)
    model_paths: dict[str, str] = field(default_factory=dict)
    # Pipeline stages of each rank, for the models that are trained or evaluated.
    stages_per_rank: dict[str, int] = field(default_factory=dict)
    # Keys of the models whose frozen layers are in low bits.
    low_bit_paths: list[str] = field(default_factory=list)
    # Paths of datasets, by key. `reads_datasets`: the script passes them to a loader of `arealite.dataset`.
    dataset_paths: dict[str, str] = field(default_factory=dict)
    reads_datasets: bool = False
    # Whether the configuration names a workflow of the user's own.
    names_workflow: bool = False
    # Whether the trained model has a head with one output instead of a vocabulary.
    trains_reward_model: bool = False
    # Packages of the services that statistics are sent to.
    logger_packages: list[str] = field(default_factory=list)
    resolved_yaml: str = ""

    @property
    def mode(self) -> AllocationMode:
        return AllocationMode.from_str(self.allocation_mode)

    @property
    def private_file(self) -> Path:
        """File of the run directory with server flags that must not appear on a command line."""
        return rundir.RunDir(self.run_path).private / "server_flags.yaml"

    @property
    def package_link(self) -> Path:
        """Link to this package, alone in a folder of the run directory."""
        return self.run_path / "pythonpath" / "arealite"

    @property
    def run_path(self) -> Path:
        """The run directory."""
        return rundir.run_path(self.cluster.fileroot, self.experiment_name, self.trial_name)


def read_launch_config(script: str, argv: list[str], has_controller_mode: bool = False) -> LaunchConfig:
    """Load what `argv` configures `script` with. Raises for all that the script would reject."""
    tree = _parse(script) if script.endswith(".py") else None
    node = _resolve(script, tree, argv) if tree is not None else None
    config = _pick_keys(load_plain(argv, _ReadKeys) if node is None else node)
    config.reads_datasets = tree is not None and _reads_datasets(tree)
    config.trains_reward_model = tree is not None and _config_class_name(tree) == cli_args.RWConfig.__name__
    if config.controller and not has_controller_mode:
        raise ConfigError("controller=true needs Ray: use mode=ray, or arealite.launcher.ray")
    return config


def find_config_class(script: str) -> type | None:
    """Return the class of `arealite.api.cli_args` that a script loads; None if it loads no such class."""
    cls = getattr(cli_args, _config_class_name(_parse(script)) or "", None)
    return cls if isinstance(cls, type) and dataclasses.is_dataclass(cls) else None


def resolve_config(script: str, argv: list[str]) -> str:
    """Return the whole configuration of a script as YAML. Raises for all that the script would reject."""
    node = _resolve(script, _parse(script), argv)
    if node is None:
        raise ConfigError(f"{script} loads no configuration: it does not call load_config(argv, CLASS)")
    return OmegaConf.to_yaml(node)


def launch_config_of(config: cli_args.BaseExperimentConfig) -> LaunchConfig:
    """Return what a launcher reads of a configuration that is loaded already."""
    return _pick_keys(to_node(config))


def _parse(script: str) -> ast.Module:
    if not Path(script).is_file():
        raise ConfigError(f"there is no script {script}")
    try:
        # Bytes, as Python reads them: a script may begin with a byte order mark, or name its encoding.
        return ast.parse(Path(script).read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"{script} is not valid Python: line {error.lineno}: {error.msg}") from error


def _resolve(script: str, tree: ast.Module, argv: list[str]) -> DictConfig | None:
    """Return the script's configuration; None if it loads none.

    A class of `arealite.api.cli_args` is loaded here. For any other class the script runs once in check mode, in which
    `load_config` ends the process.
    """
    class_name = _config_class_name(tree)
    if class_name is None:
        return None
    cls = getattr(cli_args, class_name, None)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return to_node(load_config(argv, cls))
    node = OmegaConf.create(_resolve_in_script(script, argv))
    assert isinstance(node, DictConfig)
    return node


def _config_class_name(tree: ast.Module) -> str | None:
    """Return the class in `load_config(argv, Class)`; empty for one that the script itself defines."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) + len(node.keywords) != 2:
            continue
        if _last_name(node.func) == "load_config":
            name = _last_name(node.args[1] if len(node.args) == 2 else node.keywords[-1].value)
            return "" if name in own else name
    return None


def _last_name(node: ast.expr) -> str:
    """Return `c` for `a.b.c` and for `c`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _reads_datasets(tree: ast.Module) -> bool:
    """Whether the script imports a dataset loader of the package; others may make rows from any path."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports if (node.module or "").startswith("arealite.") for alias in node.names]
    return any(name.startswith("get_") or name in ("load_dataset", "load_rows", "load_sft") for name in names)


def _resolve_in_script(script: str, argv: list[str]) -> str:
    """Run the script up to its `load_config`, which writes the configuration and ends the process."""
    if {"-h", "--help"} & set(argv):
        raise SystemExit(subprocess.run([sys.executable, script, *argv], timeout=_CHECK_TIMEOUT_S).returncode)
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "config.yaml"
        command, env = [sys.executable, script, *argv], {**os.environ, CHECK_ONLY_ENV: str(answer)}
        try:
            result = subprocess.run(command, env=env, text=True, capture_output=True, timeout=_CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"{script} did not call load_config within {_CHECK_TIMEOUT_S:.0f} s: load the configuration before "
                "other work"
            ) from error
        if result.returncode != 0 or not answer.exists():
            output = (result.stderr or result.stdout).strip().removeprefix("error: ")
            raise ConfigError(
                output or f"{script} ended before it loaded its configuration (exit code {result.returncode})"
            )
        return answer.read_text()


def _section(values: Any, name: str) -> Any:
    """Return a section of the configuration; empty if there is none."""
    section = values.get(name)
    if section is not None and not isinstance(section, DictConfig):
        raise ConfigError(f"{name} is a section, not one value: set {name}.KEY")
    return section or {}


def _pick_keys(values: Any) -> LaunchConfig:
    """Pick the keys that launchers read, and derive the rest; missing keys get their defaults."""
    known = {f.name for f in dataclasses.fields(_ReadKeys)}
    picked = {str(k): v for k, v in values.items() if k in known}
    try:
        config = OmegaConf.to_object(OmegaConf.unsafe_merge(schema_of(LaunchConfig), picked))
    except OmegaConfBaseException as error:
        raise bad_value(error, "the configuration", LaunchConfig) from error
    assert isinstance(config, LaunchConfig)
    model = _section(values, "actor") or _section(values, "model")
    config.model_path = config.server.model_path or model.get("path", "")
    config.train_device = model.get("device", "auto")
    config.names_workflow = values.get("workflow") is not None
    in_low_bits = {name: _section(values, name).get("frozen_weight_dtype", "auto") != "auto" for name in _MODELS}
    config.low_bit_paths = [f"{name}.path" for name in _MODELS if in_low_bits[name]]
    # Merged weights are sent if the trainer's base is not that of the servers.
    config.lora_rank = 0 if in_low_bits["actor"] else model.get("lora_rank", 0)
    if config.server.dtype == "auto" and model.get("dtype") == "float32":
        # Rounded to bfloat16, weights lose most of what a step changes: servers would sample from an older policy.
        config.server.dtype = "float32"
    paths = {name: _section(values, name).get("path") for name in (*_MODELS, *_DATASETS)}
    config.models = [name for name in _MODELS if paths[name]] or ["model"]
    config.model_paths = {f"{name}.path": str(paths[name]) for name in _MODELS if paths[name]}
    stages = {name: _section(values, name).get("pipeline_stages_per_rank") for name in _MODELS}
    config.stages_per_rank = {f"{n}.path": count if isinstance(count, int) else 1 for n, count in stages.items()}
    if config.server.model_path:
        config.model_paths["server.model_path"] = config.server.model_path
    config.dataset_paths = {f"{name}.path": str(paths[name]) for name in _DATASETS if paths[name]}
    for key in ("train_datasets", "valid_datasets"):
        for name, dataset in _section(values, key).items():
            config.dataset_paths[f"{key}.{name}.path"] = str(dataset.get("path"))
    rollout = _section(values, "rollout")
    config.setup_timeout_s = rollout.get("setup_timeout_s", 300.0)
    config.weight_update = rollout.get("weight_update", "auto")
    config.routing_replay = bool(rollout.get("routing_replay", False))
    config.server_addrs = list(rollout.get("server_addrs") or [])
    services = _section(values, "stats_logger")
    config.logger_packages = [name for name in cli_args.SERVICES if str(services.get(name, "off")) != "off"]
    config.resolved_yaml = public_yaml(values)
    for name in ("recover", "cluster", "launcher", "server"):
        check_section(name, getattr(config, name))
    check_section("rollout", cli_args.InferenceEngineConfig(setup_timeout_s=config.setup_timeout_s))
    for name in ("experiment_name", "trial_name", "sglang", "vllm"):
        check_text(name, getattr(config, name))
    return config
