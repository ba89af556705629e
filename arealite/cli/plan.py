"""Predicts a run, or prints what a script would start, and where.

`arealite plan SCRIPT.py key=value…` prints servers, ranks and the memory of every device. It starts nothing and needs
no cluster: `cluster.n_nodes` and `cluster.n_gpus_per_node` name the devices. Runs the same checks as a launcher's
`--dry-run`.

`arealite plan --model 7B --gpus 64` predicts. It runs the real executor, staleness limit, router and fleet on virtual
time, with engines modelled by hardware tables, a measurement of this machine (`--calibrate`) or a recorded run
(`--from RUN_DIR`), and prints tokens/s, step time, idle shares, staleness and memory.
"""

import importlib
import shlex
from argparse import Namespace

from arealite.api.errors import ConfigError
from arealite.api.generation_args import MOST_RUNNING
from arealite.cli.arguments import ArgumentParser
from arealite.launcher.job import Job
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.local import show_plan
from arealite.launcher.placement import cluster_slots
from arealite.plan.hardware import BACKENDS, GPUS
from arealite.plan.model_shape import MODELS
from arealite.utils.config import run_main

_EXAMPLES = (
    "arealite plan train.py allocation_mode=sglang.d12+d4 cluster.n_nodes=2",
    "arealite plan --model 7B --gpus 64 --gpu H100 --eta 4",
    "arealite plan --model 1.5B --layout sglang.d6+d2 --sweep eta=0,1,2,4,8 --plot eta.png",
    "arealite plan --from runs/demo/reverse --eta 2",
)
SWEPT = ("eta", "servers", "prompts", "samples", "lengths", "reward-s")
_UNUSED = {
    "--gpus": ("crash", "servers", "interrupt", "steps"),
    "--layout": ("interrupt", "backend"),
    "--from": ("model", "max-running", "prox-logp", "gpu", "backend"),
    "--calibrated": ("model", "max-running", "prox-logp", "gpu", "backend"),
}
# Options of a search that a prediction of one layout has, too; the backend is part of a layout's name.
_OF_ONE_LAYOUT = (
    *("model", "gpu", "eta", "prompts", "samples", "prompt-lengths", "lengths", "reward-s", "turns", "tool-s"),
    *("max-running", "prox-logp", "fixed-lead", "seed"),
)
_PROX = ("first_pass", "recompute", "interpolate")


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        _parser().print_help()
        return 0 if argv else 2
    if argv[0].startswith("--"):
        parser = _parser()
        options = parser.parse_args(argv)
        _refuse_unused(parser, options)
        # Imports torch, which takes seconds; the help does not need it.
        return importlib.import_module("arealite.cli.predict").predict(options)
    if argv[0].startswith("-") or "=" in argv[0]:
        raise ConfigError("name the script first: arealite plan SCRIPT.py key=value…, or predict with --model SIZE")
    config = read_launch_config(argv[0], argv[1:], has_controller_mode=True)
    return show_plan(Job(config, argv[0], argv[1:], *cluster_slots(config)), servers_run_here=False)


def command_for(layout: str, options: Namespace) -> str:
    """Return the command that predicts one layout of a search, with what the user gave for the search."""
    parser, words = _parser(), ["arealite", "plan"]
    for name in _OF_ONE_LAYOUT:
        key = name.replace("-", "_")
        value = getattr(options, key)
        if name == "gpu" or value != parser.get_default(key):
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join([*words, "--layout", layout])


def _refuse_unused(parser: ArgumentParser, options: Namespace) -> None:
    """Raise `ConfigError` if an option would change nothing: a prediction must not look as if it did."""
    for source, names in _UNUSED.items():
        for name in names if getattr(options, source.removeprefix("--").replace("from", "run_dir")) is not None else ():
            if getattr(options, name.replace("-", "_")) != parser.get_default(name.replace("-", "_")):
                raise ConfigError(f"--{name} has no effect with {source}: leave it out")
    if options.tool_s is not None and options.turns in (None, 1) and not (options.run_dir or options.calibrated):
        raise ConfigError("--tool-s is the time between two turns: give --turns, too")


def _parser() -> ArgumentParser:
    parser = ArgumentParser("plan", __doc__, *_EXAMPLES)
    add = parser.add_argument
    add("--model", metavar="SIZE", help=f"{', '.join(MODELS)}, a folder, or a hub name in the cache")
    add("--gpu", default="H100", metavar="NAME", help=f"one of {', '.join(GPUS)} (default: H100)")
    add("--gpus", type=int, metavar="N", help="search the best layouts of so many GPUs")
    add("--layout", metavar="MODE", help="predict this allocation_mode instead, such as sglang.d6t2+d4")
    add("--backend", default="sglang", choices=[*BACKENDS], help="the backend of a search (default: sglang)")
    add("--eta", type=int, metavar="N", help="rollout.max_head_offpolicyness (default: 4, or the run's)")
    add("--prompts", type=int, metavar="N", help="prompts of a batch (default: 512, or the run's)")
    add("--samples", type=int, metavar="N", help="answers to a prompt (default: 16, or the run's)")
    add("--prompt-lengths", metavar="D", help="tokens of prompts (default: lognormal:200,0.5,1024)")
    add("--lengths", metavar="D", help="tokens of answers (default: lognormal:2000,1.0,8192)")
    add("--reward-s", metavar="D", help="seconds of a reward (default: 0)")
    add("--turns", type=int, metavar="N", help="turns of an episode (default: 1)")
    add("--tool-s", metavar="D", help="seconds of a tool between two turns (default: 0)")
    add("--max-running", type=int, default=MOST_RUNNING, metavar="N", help="sequences that a server decodes at once")
    add("--prox-logp", default=_PROX[0], choices=_PROX, help="actor.prox_logp (recompute: one more pass a step)")
    add("--fixed-lead", action="store_true", help="rollout.adaptive_lead=false")
    add("--interrupt", action="store_true", help="servers stop for weight updates, also embedded ones")
    add("--crash", action="append", default=[], metavar="SERVER@S[:RESTART_S]", help="a server dies; may be repeated")
    add("--servers", type=int, metavar="N", help="with --from or --calibrated: number of servers")
    add("--from", dest="run_dir", metavar="RUN_DIR", help="take costs and lengths from a recorded run")
    add("--calibrate", metavar="FILE", help="measure this machine with --model (a folder), write the costs to FILE")
    add("--calibrated", metavar="FILE", help="take costs from a file of --calibrate")
    add("--steps", type=int, metavar="N", help="measured steps (default: as many as are cheap)")
    add("--seed", type=int, default=1)
    add("--sweep", metavar="KEY=A,B,…", help=f"predict each value of one of {', '.join(SWEPT)}")
    add("--plot", metavar="FILE.png", help="draw the sweep (needs matplotlib)")
    add("--page", metavar="RUN_DIR", help="save the sweep in a run directory: the dashboard draws it with the run")
    add("--json", action="store_true", help="print one JSON line")
    return parser


if __name__ == "__main__":
    run_main(main)
