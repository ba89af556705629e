"""`make demo`: train a small model from random weights on two CPU cores, with every part of the system.

1. Supervised training teaches a small decoder the task in part.
2. The launcher starts an embedded inference server and a trainer, and asynchronous GRPO raises the reward.
3. The script prints a summary and one line for other programs, and saves a plot of the reward. It exits with 1 if the
   reward stays below 0.9.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from reverse import make_model, make_rows, make_tokenizer, supervised_batch
from transformers.utils.logging import disable_progress_bar

from arealite.api.cli_args import GRPOConfig, OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.launcher.local import launch
from arealite.trainer.output.curve import save_curve
from arealite.trainer.stats_logger import read_stats
from arealite.utils.config import load_config, run_main
from arealite.utils.rundir import RunDir, make_new_folder

HERE = Path(__file__).parent
SFT_STEPS, SFT_BATCH = 75, 128
GOAL = 0.9


def supervise(start: Path, out: Path, seed: int) -> float:
    """Train the random model at `start` on worked examples, save it to `out`, and return the last loss."""
    tokenizer = make_tokenizer()
    rows = make_rows(SFT_STEPS * SFT_BATCH, seed=seed + 1)
    engine = FSDPLMEngine(
        TrainEngineConfig(
            path=str(start),
            dtype="float32",
            device="cpu",
            optimizer=OptimizerConfig(lr=2e-3, weight_decay=0.0, warmup_steps_proportion=0.1),
        )
    )
    engine.initialize(FinetuneSpec(1, len(rows), SFT_BATCH))
    loss = float("nan")
    for step in range(SFT_STEPS):
        batch = supervised_batch(rows[step * SFT_BATCH : (step + 1) * SFT_BATCH], tokenizer)
        loss = engine.train_lm(batch)["loss"]
        engine.step_lr_scheduler()
    engine.save(SaveLoadMeta(str(out), "hf"))
    tokenizer.save_pretrained(out)
    engine.destroy()
    return loss


def main(argv: list[str]) -> int:
    argv = ["--config", str(HERE / "configs" / "demo.yaml"), *argv]
    folders = new_run_dir(load_config([*argv, "actor.path=unused"], GRPOConfig))
    argv += [f"trial_name={folders.path.name}"]
    start, supervised = folders.path / "model" / "random", folders.path / "model" / "supervised"

    # The table of the training run is the only progress display.
    disable_progress_bar()
    print(f"supervised: {SFT_STEPS} steps on {SFT_STEPS * SFT_BATCH} worked examples", flush=True)
    make_model(start, seed=1)
    loss = supervise(start, supervised, seed=1)
    print(f"supervised: loss {loss:.3f}; now asynchronous GRPO", flush=True)

    code = launch(HERE / "reverse_grpo.py", [*argv, f"actor.path={supervised}"])
    if code:
        return code
    return report(folders)


def new_run_dir(config: GRPOConfig) -> RunDir:
    """Make a run directory of its own, with a number if there is one of this name: another demo may be running."""
    path = RunDir(config).path
    return RunDir(make_new_folder(path.with_name(f"{path.name}-{n}") if n > 1 else path for n in itertools.count(1)))


def report(folders: RunDir) -> int:
    """Print a summary of the run directory and plot the reward. Returns the exit code."""
    # An evaluation before the first step has no reward.
    steps = [step for step in read_stats(folders) if "reward" in step]
    rewards = [step["reward"] for step in steps]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
    seconds = sum(step["time/step"] for step in steps)
    staleness = max(step["staleness/max"] for step in steps)
    curve = save_curve(folders.curve_path, rewards)
    print(f"reward:       {first:.2f} -> {last:.2f} in {len(steps)} steps, {seconds:.0f} s")
    print(f"reward curve: {curve or 'not drawn: matplotlib is missing'}")
    print(f"details:      {Path(sys.executable)} -m arealite.cli.report {folders.path}")
    print(
        f"DEMO reward_start={first:.3f} reward_end={last:.3f} steps={len(steps)} "
        f"train_seconds={seconds:.1f} max_staleness={staleness:.0f}"
    )
    return 0 if last >= GOAL else 1


if __name__ == "__main__":
    run_main(main)
