"""Predicts a run, or prints what a script would start, and where.

`arealite plan SCRIPT.py key=value…` prints servers, ranks and the memory of every device. It starts nothing and needs
no cluster: `cluster.n_nodes` and `cluster.n_gpus_per_node` name the devices. Runs the same checks as a launcher's
`--dry-run`.

`arealite plan --model 7B --gpus 64` predicts. It runs the real executor, staleness limit, router and fleet on virtual
time, with engines modelled by hardware tables, a measurement of this machine (`--calibrate`) or a recorded run
(`--from RUN_DIR`), and prints tokens/s, step time, idle shares, staleness and memory.
"""

import importlib
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.cli.arguments import ArgumentParser
from arealite.launcher.job import Job
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.local import show_plan
from arealite.launcher.placement import cluster_slots
from arealite.plan.hardware import BACKENDS, GPUS, find_gpu
from arealite.plan.layouts import Layout
from arealite.plan.measured import describe_costs, read_measured, write_measured
from arealite.plan.model_shape import MODELS, find_model
from arealite.plan.recorded import read_run
from arealite.plan.report import as_json, describe, describe_best, describe_sweep, plot_sweep
from arealite.plan.search import evaluate, make_setup, search
from arealite.plan.simulate import Crash, Prediction, Setup, simulate
from arealite.plan.workload import Distribution, Workload
from arealite.trainer.stats_logger import read_stats
from arealite.utils.config import run_main
from arealite.utils.memory.model_size import ModelSize
from arealite.utils.rundir import RunDir

_EXAMPLES = (
    "arealite plan train.py allocation_mode=sglang.d12+d4 cluster.n_nodes=2",
    "arealite plan --model 7B --gpus 64 --gpu H100 --eta 4",
    "arealite plan --model 1.5B --layout sglang.d6+d2 --sweep eta=0,1,2,4,8 --plot eta.png",
    "arealite plan --from runs/demo/reverse --eta 2",
)
_NUM_SHOWN = 5
_SWEPT = ("eta", "servers", "prompts", "samples", "lengths", "reward-s")
_NO_LIMIT_S = 1e7


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        _parser().print_help()
        return 0 if argv else 2
    if argv[0].startswith("--"):
        return _predict(_parser().parse_args(argv))
    if argv[0].startswith("-") or "=" in argv[0]:
        raise ConfigError("name the script first: arealite plan SCRIPT.py key=value…, or predict with --model SIZE")
    config = read_launch_config(argv[0], argv[1:], has_controller_mode=True)
    return show_plan(Job(config, argv[0], argv[1:], *cluster_slots(config)), servers_run_here=False)


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
    add("--max-running", type=int, default=256, metavar="N", help="sequences that a server decodes at once")
    add("--fixed-lead", action="store_true", help="rollout.adaptive_lead=false")
    add("--interrupt", action="store_true", help="servers stop for weight updates, also embedded ones")
    add("--crash", action="append", default=[], metavar="SERVER@S[:RESTART_S]", help="a server dies; may be repeated")
    add("--servers", type=int, metavar="N", help="with --from or --calibrated: number of servers")
    add("--from", dest="run_dir", metavar="RUN_DIR", help="take costs and lengths from a recorded run")
    add("--calibrate", metavar="FILE", help="measure this machine with --model (a folder), write the costs to FILE")
    add("--calibrated", metavar="FILE", help="take costs from a file of --calibrate")
    add("--steps", type=int, metavar="N", help="measured steps (default: as many as are cheap)")
    add("--seed", type=int, default=1)
    add("--sweep", metavar="KEY=A,B,…", help=f"predict each value of one of {', '.join(_SWEPT)}")
    add("--plot", metavar="FILE.png", help="draw the sweep (needs matplotlib)")
    add("--json", action="store_true", help="print one JSON line")
    return parser


# ------------------------------------------------------------------------------------------------- predictions


def _predict(options: Namespace) -> int:
    if options.calibrate:
        return _calibrate(options)
    sources = [options.run_dir, options.calibrated, options.layout, options.gpus]
    if sum(source is not None for source in sources) != 1:
        raise ConfigError("give one of --gpus N (search), --layout MODE, --from RUN_DIR or --calibrated FILE")
    if options.sweep:
        return _sweep(options)
    if options.gpus is not None:
        return _search(options)
    if options.layout is not None:
        chosen = _layout(options)
        found = evaluate(chosen, _workload(options), _rollout(options), options.steps, _crashes(options), options.seed)
        title = f"{chosen.name} on {chosen.gpu.name}"
        return _show(options, found.prediction, title, describe(found.prediction, found.memory))
    setup, title = _measured_setup(options)
    prediction = simulate(setup)
    return _show(options, prediction, title, describe(prediction))


def _show(options: Namespace, prediction: Prediction, title: str, text: str) -> int:
    print(json.dumps(as_json(prediction)) if options.json else f"{title}\n{text}")
    return 0


def _search(options: Namespace) -> int:
    if not 2 <= options.gpus <= 4096:
        raise ConfigError(f"--gpus is {options.gpus}; give 2 to 4096: servers and trainers have their own")
    gpu, work = find_gpu(options.gpu), _workload(options)
    found = search(
        options.gpus, _model(options), gpu, work, _rollout(options), options.backend, options.max_running, options.seed
    )
    best = found[:_NUM_SHOWN]
    if options.json:
        rows = [{"layout": c.layout.name, "reason": c.reason(), **as_json(c.prediction)} for c in best]
        rows = [row | {"tokens_per_s": c.tokens_per_s} for row, c in zip(rows, best, strict=True)]
        print(json.dumps(rows))
        return 0
    eta = _rollout(options).max_head_offpolicyness
    print(f"the best of {options.gpus} x {gpu.name}, {work.prompts} x {work.samples} answers a step, eta {eta}:")
    print(describe_best(best))
    print(f"more about one: arealite plan --model {options.model} --gpu {gpu.name} --layout {best[0].layout.name}")
    return 0


def _sweep(options: Namespace) -> int:
    key, _, rest = options.sweep.partition("=")
    values = [value for value in rest.split(";" if ";" in rest else ",") if value]
    if key not in _SWEPT or not values:
        raise ConfigError(f"--sweep is {options.sweep!r}; write KEY=A,B,… with one of {', '.join(_SWEPT)}")
    if options.gpus is not None:
        raise ConfigError("--sweep predicts one layout: give --layout, --from or --calibrated instead of --gpus")
    predictions = []
    for value in values:
        name = key.replace("-", "_")
        is_text = name in ("lengths", "reward_s")
        try:
            changed = Namespace(**{**vars(options), name: value if is_text else int(value)})
        except ValueError:
            raise ConfigError(f"--sweep {key}: {value!r} is no whole number") from None
        predictions.append(simulate(_setup(changed)))
    if options.json:
        print(json.dumps({value: as_json(found) for value, found in zip(values, predictions, strict=True)}))
    else:
        print(describe_sweep(key, values, predictions))
    if options.plot:
        plot_sweep(Path(options.plot), key, values, predictions)
    return 0


def _setup(options: Namespace) -> Setup:
    if options.layout is None:
        return _measured_setup(options)[0]
    layout = _layout(options)
    if options.servers is not None:
        gen = replace(layout.gen, data=options.servers)
        layout = replace(layout, mode=replace(layout.mode, gen=gen))
    setup, _ = make_setup(layout, _workload(options), _rollout(options), _crashes(options))
    return replace(setup, steps=options.steps, seed=options.seed)


def _model(options: Namespace) -> ModelSize:
    if options.model is None:
        raise ConfigError(f"--model is missing: one of {', '.join(MODELS)}, a folder, or a hub name in the cache")
    return find_model(options.model)


def _layout(options: Namespace) -> Layout:
    return Layout.parse(options.layout, _model(options), find_gpu(options.gpu), options.max_running)


def _workload(options: Namespace, recorded: Workload | None = None) -> Workload:
    """Return the workload of the options, or of a recorded run where they leave it open."""
    usual = Workload(
        512, 16, Distribution("lognormal", (200.0, 0.5, 1024.0)), Distribution("lognormal", (2000.0, 1.0, 8192.0))
    )
    given = {
        "prompts": options.prompts,
        "samples": options.samples,
        "prompt_tokens": options.prompt_lengths and Distribution.parse(options.prompt_lengths, "--prompt-lengths"),
        "answer_tokens": options.lengths and Distribution.parse(options.lengths, "--lengths"),
        "reward_s": options.reward_s and Distribution.parse(options.reward_s, "--reward-s"),
        "turns": options.turns,
        "tool_s": options.tool_s and Distribution.parse(options.tool_s, "--tool-s"),
    }
    for name in ("prompts", "samples", "turns", "max_running"):
        number = getattr(options, name)
        if number is not None and not 1 <= number <= 1_000_000:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}; give 1 to 1000000")
    return replace(recorded or usual, **{name: value for name, value in given.items() if value is not None})


def _rollout(options: Namespace, eta: int = 4) -> InferenceEngineConfig:
    chosen = eta if options.eta is None else options.eta
    if not 0 <= chosen <= 1000:
        raise ConfigError(f"--eta is {chosen}; give 0 (synchronous) to 1000")
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps is {options.steps}; give at least 1")
    # A prediction shows how long steps take; it does not fail because they are long.
    limits = dict.fromkeys(("request_timeout_s", "episode_timeout_s", "batch_timeout_s"), _NO_LIMIT_S)
    return InferenceEngineConfig(max_head_offpolicyness=chosen, adaptive_lead=not options.fixed_lead, **limits)


def _crashes(options: Namespace) -> tuple[Crash, ...]:
    found = []
    for text in options.crash:
        server, _, when = text.partition("@")
        at, _, restart = when.partition(":")
        try:
            crash = Crash(float(at), int(server), float(restart) if restart else None)
        except ValueError:
            crash = Crash(-1.0, -1, None)
        if crash.server < 0 or crash.at_s < 0 or (crash.restart_s or 0.0) < 0:
            raise ConfigError(f"--crash is {text!r}; write SERVER@SECONDS or SERVER@SECONDS:RESTART_SECONDS")
        found.append(crash)
    return tuple(found)


def _measured_setup(options: Namespace) -> tuple[Setup, str]:
    """Return the setup of a recorded run or of a calibration."""
    if options.run_dir:
        measured = read_run(Path(options.run_dir), read_stats(RunDir(options.run_dir)))
    else:
        measured = read_measured(Path(options.calibrated))
    servers = options.servers or measured.num_servers
    if servers < 1:
        raise ConfigError(f"--servers is {servers}; give at least 1")
    update = replace(measured.update, is_swap=measured.update.is_swap and not options.interrupt)
    eta = measured.eta if options.eta is None else options.eta
    setup = Setup(
        _workload(options, measured.workload), servers, measured.server, measured.train, update,
        _rollout(options, eta), options.steps, None, _crashes(options), measured.cores, options.seed,
    )  # fmt: skip
    return setup, f"{servers} servers, eta {eta}, costs of {options.run_dir or options.calibrated}"


def _calibrate(options: Namespace) -> int:
    if options.model is None or not Path(options.model).is_dir():
        raise ConfigError("--calibrate measures a real model: give its folder with --model FOLDER")
    # Needs torch and transformers, which take seconds to import.
    calibrate = importlib.import_module("arealite.plan.calibrate")
    costs = calibrate.measure(options.model)
    write_measured(Path(options.calibrate), costs)
    print(f"wrote {options.calibrate}: {describe_costs(costs)}")
    print(f"predict with it: arealite plan --calibrated {options.calibrate} --eta 4")
    return 0


if __name__ == "__main__":
    run_main(main)
