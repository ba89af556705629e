"""The predictions of `arealite plan`: reads options, runs the simulator and prints. Imports torch."""

import importlib
import json
import math
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.cli.plan import SWEPT, command_for
from arealite.core.foresee.recording import read_recording
from arealite.core.foresee.what_if import describe_leads, describe_load
from arealite.plan.hardware import find_gpu
from arealite.plan.layouts import Layout
from arealite.plan.measured import describe_costs, read_measured, write_measured
from arealite.plan.model_shape import MODELS, find_model
from arealite.plan.recorded import read_run
from arealite.plan.report import as_json, describe, describe_best, describe_sweep, plot_sweep, save_sweep
from arealite.plan.search import evaluate, make_setup, search
from arealite.plan.simulate import Crash, Prediction, Setup, simulate
from arealite.plan.workload import Distribution, Workload
from arealite.trainer.stats_logger import read_stats
from arealite.utils.memory.model_size import ModelSize
from arealite.utils.rundir import RunDir

_NUM_SHOWN = 5
_NO_LIMIT_S = 1e7
_MAX_SERVERS = 4096
_PICTURES = (".png", ".svg", ".pdf", ".jpg")


def predict(options: Namespace) -> int:
    """Run what the options ask for; returns the exit code."""
    if options.seed < 0:
        raise ConfigError(f"--seed is {options.seed}; give 0 or more")
    if options.servers is not None and options.layout is not None:
        raise ConfigError(
            "--layout says how many servers there are: leave out --servers, or sweep it (--sweep servers=1,2)"
        )
    # Not after minutes of work.
    _check_file("--calibrate", options.calibrate)
    _check_file("--plot", options.plot)
    if options.plot and Path(options.plot).suffix.lower() not in _PICTURES:
        raise ConfigError(f"--plot is {options.plot}; give a file that ends with one of {', '.join(_PICTURES)}")
    if options.calibrate:
        return _calibrate(options)
    sources = [options.run_dir, options.calibrated, options.layout, options.gpus]
    if sum(source is not None for source in sources) != 1:
        raise ConfigError("give one of --gpus N (search), --layout MODE, --from RUN_DIR or --calibrated FILE")
    if options.sweep:
        return _sweep(options)
    if options.plot or options.page:
        raise ConfigError("--plot and --page draw a sweep: give --sweep KEY=A,B,…, too")
    if options.gpus is not None:
        return _search(options)
    if options.layout is not None:
        chosen = _layout(options)
        work = _workload(options)
        found = evaluate(chosen, work, _rollout(options), options.steps, _crashes(options), options.seed)
        problems = filter(None, (chosen.batch_problem(work.prompts), chosen.length_problem(work)))
        text = "\n".join([describe(found.prediction, found.memory), *(f"note: {problem}" for problem in problems)])
        return _show(options, found.prediction, f"{chosen.name} on {chosen.gpu.name}", text)
    setup, title = _measured_setup(options)
    prediction = simulate(setup)
    return _show(options, prediction, title, describe(prediction))


def _check_file(option: str, path: str | None) -> None:
    """Raise `ConfigError` if a file cannot be written."""
    folder = Path(path or ".").absolute().parent
    if path and (Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK)):
        raise ConfigError(f"{option} is {path}, which cannot be written: give a file in a folder that exists")


def _show(options: Namespace, prediction: Prediction, title: str, text: str) -> int:
    notes = [f"\nnote: {note}" for note in (*_notes(options), *_lead_notes(options, prediction))]
    print(json.dumps(as_json(prediction)) if options.json else f"{title}\n{text}{''.join(notes)}")
    return 0


def _lead_notes(options: Namespace, prediction: Prediction) -> list[str]:
    """Describe both leads of a trial whose margin is so small that a run may take either."""
    if prediction.close_leads is None or options.json:
        return []
    setup, found = _setup(options), {}
    for lead in prediction.close_leads:
        each = simulate(replace(setup, lead=lead))
        found[lead] = each.step_s, each.mean_age
    return [describe_leads(found)]


def _notes(options: Namespace) -> list[str]:
    """Say what makes a prediction from a recorded run doubtful."""
    if not options.run_dir or options.json:
        return []
    note = describe_load(read_recording(Path(options.run_dir), read_stats(RunDir(options.run_dir))))
    return [note] if note else []


def _length_notes(options: Namespace, swept: Sequence[Namespace]) -> list[str]:
    """Say for which of several predictions sequences are longer than the model's context."""
    if options.layout is None:
        return []
    return list(dict.fromkeys(filter(None, (_layout(each).length_problem(_workload(each)) for each in swept))))


def _search(options: Namespace) -> int:
    if not 2 <= options.gpus <= 4096:
        raise ConfigError(f"--gpus is {options.gpus}; give 2 to 4096: servers and trainers have their own")
    gpu, work = find_gpu(options.gpu), _workload(options)
    found = search(
        options.gpus, _model(options), gpu, work, _rollout(options), options.backend, options.max_running, options.seed,
        options.prox_logp,
    )  # fmt: skip
    best = found[:_NUM_SHOWN]
    if options.json:
        rows = [{"layout": c.layout.name, "reason": c.reason(), **as_json(c.prediction)} for c in best]
        rows = [row | {"tokens_per_s": c.tokens_per_s} for row, c in zip(rows, best, strict=True)]
        print(json.dumps(rows))
        return 0
    eta = _rollout(options).max_head_offpolicyness
    print(f"the best of {options.gpus} x {gpu.name}, {work.prompts} x {work.samples} answers a step, eta {eta}:")
    print(describe_best(best))
    if problem := best[0].layout.length_problem(work):
        print(f"note: {problem}")
    print(f"more about one: {command_for(best[0].layout.name, options)}")
    return 0


def _sweep(options: Namespace) -> int:
    key, _, rest = options.sweep.partition("=")
    values = [value for value in rest.split(";" if ";" in rest else ",") if value]
    if key not in SWEPT or not values:
        raise ConfigError(f"--sweep is {options.sweep!r}; write KEY=A,B,… with one of {', '.join(SWEPT)}")
    if options.gpus is not None:
        raise ConfigError("--sweep predicts one layout: give --layout, --from or --calibrated instead of --gpus")
    if options.page:
        RunDir(options.page).check()
    predictions, swept = [], []
    for value in values:
        name = key.replace("-", "_")
        is_text = name in ("lengths", "reward_s")
        try:
            changed = Namespace(**{**vars(options), name: value if is_text else int(value)})
        except ValueError:
            raise ConfigError(f"--sweep {key}: {value!r} is not a whole number") from None
        predictions.append(simulate(_setup(changed)))
        swept.append(changed)
    if options.json:
        print(json.dumps({value: as_json(found) for value, found in zip(values, predictions, strict=True)}))
    else:
        notes = [*_notes(options), *_length_notes(options, swept)]
        print("\n".join([describe_sweep(key, values, predictions), *(f"note: {note}" for note in notes)]))
    if options.page:
        title = options.layout or f"costs of {options.run_dir or options.calibrated}"
        print(f"wrote {save_sweep(Path(options.page), key, values, predictions, title)}")
    if options.plot:
        plot_sweep(Path(options.plot), key, values, predictions)
    return 0


def _setup(options: Namespace) -> Setup:
    if options.layout is None:
        return _measured_setup(options)[0]
    layout = _layout(options)
    if options.servers is not None:
        _check_servers(options.servers)
        gen = replace(layout.gen, data=options.servers)
        layout = replace(layout, mode=replace(layout.mode, gen=gen))
    setup, _ = make_setup(layout, _workload(options), _rollout(options), _crashes(options))
    return replace(setup, steps=options.steps, seed=options.seed)


def _check_servers(number: int) -> None:
    if not 1 <= number <= _MAX_SERVERS:
        raise ConfigError(f"--servers is {number}; give 1 to {_MAX_SERVERS}")


def _model(options: Namespace) -> ModelSize:
    if options.model is None:
        raise ConfigError(f"--model is missing: one of {', '.join(MODELS)}, a folder, or a hub name in the cache")
    return find_model(options.model)


def _layout(options: Namespace) -> Layout:
    return Layout.parse(options.layout, _model(options), find_gpu(options.gpu), options.max_running, options.prox_logp)


def _workload(options: Namespace, recorded: Workload | None = None) -> Workload:
    """Return the workload of the options, or of a recorded run where they leave it open."""
    usual = Workload(
        512, 16, Distribution("lognormal", (200.0, 0.5, 1024.0)), Distribution("lognormal", (2000.0, 1.0, 8192.0))
    )
    given = {"prompts": options.prompts, "samples": options.samples, "turns": options.turns}
    parsed = {
        "prompt_tokens": (options.prompt_lengths, Distribution.tokens, "--prompt-lengths"),
        "answer_tokens": (options.lengths, Distribution.tokens, "--lengths"),
        "reward_s": (options.reward_s, Distribution.parse, "--reward-s"),
        "tool_s": (options.tool_s, Distribution.parse, "--tool-s"),
    }
    given |= {name: parse(text, option) for name, (text, parse, option) in parsed.items() if text is not None}
    for name in ("prompts", "samples", "turns", "max_running"):
        number = getattr(options, name)
        if number is not None and not 1 <= number <= 1_000_000:
            raise ConfigError(f"--{name.replace('_', '-')} is {number}; give 1 to 1000000")
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen.keys() - {"prompts"}:
        # Recorded episodes have their own lengths and waits: draw others instead.
        chosen["episodes"] = ()
    return replace(recorded or usual, **chosen)


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
        times = (crash.at_s, crash.restart_s or 0.0)
        if crash.server < 0 or not all(math.isfinite(time) and time >= 0 for time in times):
            raise ConfigError(f"--crash is {text!r}; write SERVER@SECONDS or SERVER@SECONDS:RESTART_SECONDS")
        found.append(crash)
    return tuple(found)


def _measured_setup(options: Namespace) -> tuple[Setup, str]:
    """Return the setup of a recorded run or of a calibration."""
    if options.run_dir:
        measured = read_run(Path(options.run_dir), read_stats(RunDir(options.run_dir)))
    else:
        measured = read_measured(Path(options.calibrated))
    servers = measured.num_servers if options.servers is None else options.servers
    _check_servers(servers)
    update = replace(measured.update, is_swap=measured.update.is_swap and not options.interrupt)
    eta = measured.eta if options.eta is None else options.eta
    has_lead = measured.adaptive_lead and not options.fixed_lead
    # A limit of concurrency that the run had is a limit of what is asked, too.
    limits = {"adaptive_lead": has_lead, "max_concurrent_rollouts": measured.max_concurrent}
    rollout = replace(_rollout(options, eta), **limits)
    setup = Setup(
        _workload(options, measured.workload), servers, measured.server, measured.train, update,
        rollout, options.steps, None, _crashes(options), measured.cores, options.seed,
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
