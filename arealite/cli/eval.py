"""Evaluates a model from a configuration alone: `arealite eval valid_dataset.path=…`.

The same as `arealite train trainer.type=null`. `arealite evaluate RUN_DIR` evaluates the checkpoints of a run instead.
"""

from arealite.api.errors import ConfigError
from arealite.cli.main import run
from arealite.utils.config import run_main
from arealite.utils.config_help import USAGE, CommandHelp

HELP = CommandHelp(
    f"arealite eval {USAGE} [--dry-run]",
    "Evaluate a model on validation sets, without training. Model, servers and sampling are keys of `trainer.grpo`.",
    (
        ("arealite eval trainer.grpo.actor.path=/models/mine valid_dataset.path=gsm8k/test.jsonl", ""),
        ("arealite eval --config run.yaml trainer.grpo.eval_gconfig.n_samples=8", "pass@8 of eight samples each"),
        ("arealite evaluate runs/gsm8k/trial0", "the checkpoints of a run, with its own settings"),
    ),
)


def main(argv: list[str]) -> int:
    for argument in argv:
        if argument.startswith("trainer.type=") and argument not in ("trainer.type=null", "trainer.type=~"):
            raise ConfigError(f"{argument} trains: leave it out, or use `arealite train`")
    return run([*argv, "trainer.type=null"] if "--help" not in argv and "-h" not in argv else argv, HELP)


if __name__ == "__main__":
    run_main(main)
