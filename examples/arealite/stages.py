"""Runs the stages of learning from preferences, each from the model of the one before: sft, rw, dpo, grpo.

`tldr.py` and `hhrlhf.py` call it. A stage is a run of `arealite.cli.main` with a directory of its own. The reward of
`grpo` is the model that `rw` trained.
"""

from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.cli.main import main as run
from arealite.utils.rundir import run_path

HERE = Path(__file__).parent


def run_stages(name: str, argv: list[str]) -> int:
    """Run the stages that the first argument lists (`sft,rw,grpo`), with the overrides that follow."""
    stages, *overrides = argv or [""]
    known = {"sft": "model", "rw": "model", "dpo": "model", "grpo": "actor"}
    if not stages or not set(stages.split(",")) <= known.keys():
        raise ConfigError(f"the first argument lists stages of {', '.join(known)}, such as sft,rw,grpo; got {stages!r}")
    given = dict(o.split("=", 1) for o in overrides if "=" in o)
    if "trial_name" in given:
        raise ConfigError("each stage is a run with the stage as its trial_name: set experiment_name instead")
    experiment = run_path(given.get("cluster.fileroot", "runs"), given.get("experiment_name", name), "sft").parent
    policy: Path | None = None
    reward_model: Path | None = None
    for stage in stages.split(","):
        start = [f"trainer.{stage}.{known[stage]}.path={policy}"] if policy else []
        if stage == "grpo" and reward_model:
            start.append(f"reward={reward_model}")
        config = ["--config", str(HERE / "configs" / f"{name}.yaml"), f"trainer.type={stage}", f"trial_name={stage}"]
        code = run([*config, *overrides, *start])
        if code:
            return code
        folder = experiment / stage / "checkpoints"
        trained = max(folder.glob("step*"), default=None)
        if trained is None:
            raise ConfigError(f"there is no checkpoint of the stage {stage} in {folder}")
        if stage == "rw":
            reward_model = trained
        else:
            policy = trained
    return 0
