"""Controller mode on a real Ray: one driver, engines in actors.

The numbers equal those of ordinary ranks, no tensor passes through the driver, calls overlap, dead actors are reported.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import ClusterConfig, OptimizerConfig, PreferenceConfig, TrainEngineConfig
from arealite.api.errors import AllocationError, ConfigError, TrainingError
from arealite.api.io_struct import FinetuneSpec, Stat
from arealite.controller.factory import Driver
from arealite.core.ledger.reading import open_ledger
from arealite.core.ledger.token_record import TokenRecord
from arealite.doctor.case import Case
from arealite.doctor.collect import collect
from arealite.doctor.graph import find_edges
from arealite.doctor.rules import diagnose
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.launcher import local, ray
from arealite.launcher.job import Job
from arealite.launcher.launch_config import LaunchConfig
from arealite.utils.trace.trace_file import read_trace
from tests import warm_start
from tests.launcher.conftest import diagnosis

EXAMPLES = Path(__file__).parents[2] / "examples" / "arealite"
MODELS = ("actor", "critic", "ref")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Three small decoders like the demo's; the critic has a value head."""
    sys.path.insert(0, str(EXAMPLES))
    from reverse import make_model

    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(MODELS):
        make_model(folder / name, seed)
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "critic", num_labels=1)
    critic.save_pretrained(folder / "critic")
    return {name: folder / name for name in MODELS}


def arguments(folder: Path, models: dict[str, Path], steps: int, *more: str) -> list[str]:
    on_cpu = [f"{m}.{key}" for m in ("ref", "critic") for key in ("device=cpu", "dtype=float32")]
    return [
        *("--config", str(EXAMPLES / "configs" / "demo.yaml"), f"cluster.fileroot={folder}"),
        *(f"{name}.path={path}" for name, path in models.items()),
        *(*on_cpu, "actor.algorithm=ppo", "actor.kl_ctl=0.1", "actor.prox_logp=recompute"),
        *("allocation_mode=embedded.d1+d2", "gconfig.n_samples=4", "train_dataset.batch_size=4"),
        *("rollout.max_head_offpolicyness=0", f"total_train_steps={steps}"),
        *("server.deterministic=true", "server.max_total_tokens=4096"),
        *("launcher.stop_timeout_s=3", "stats_logger.console=false", *more),
    ]


@pytest.fixture
def start(start_launcher) -> Callable[..., subprocess.Popen]:
    return partial(start_launcher, EXAMPLES / "reverse_grpo.py")


def stats(folder: Path) -> list[dict]:
    path = folder / "demo" / "reverse" / "stats.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def spans(folder: Path, name: str) -> list[tuple[float, float]]:
    events = json.loads((folder / "demo" / "reverse" / "trace.json").read_text())
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name and e["ph"] == "X"]


def rank_pids(folder: Path, log: str = "") -> list[int]:
    """Return the processes of the run's actors, found by the path of their log."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_text() if entry.name.isdigit() else ""
            is_mine = f"AREALITE_LOG_FILE={folder}" in environment and f"{log}.log" in environment
            if is_mine and "ray::" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_for(condition, timeout_s: float = 360) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def test_dry_run_shows_placement(tmp_path, models, capsys, monkeypatch):
    # The script starts as a fork, to be checked.
    for name, value in warm_start.environment().items():
        monkeypatch.setenv(name, value)
    argv = arguments(tmp_path, models, 1, "cluster.n_gpus_per_node=8", "controller=true")
    assert ray.launch(EXAMPLES / "reverse_grpo.py", argv, dry_run=True) == 0
    out = capsys.readouterr().out
    assert "driver: node 0, runs the script" in out and "1 server, 6 trainer ranks" in out
    for name in MODELS:
        assert f"  {name}: 2 rank(s), one slot each, in a placement group of their own" in out
    with pytest.raises(AllocationError, match=r"d2p1t1 for each of actor, critic, ref = 6"):
        too_few = [*argv, "cluster.n_nodes=1", "cluster.n_gpus_per_node=4"]
        ray.launch(EXAMPLES / "reverse_grpo.py", too_few, dry_run=True)
    with pytest.raises(ConfigError, match="controller=true needs Ray"):
        local.launch(EXAMPLES / "reverse_grpo.py", argv, dry_run=True)


def trained_records(folder: Path) -> list[TokenRecord]:
    """The tokens of trained rollouts in the ledger of the run under `folder`."""
    (path,) = folder.rglob("run.sqlite")
    query = "SELECT record FROM rollout_data JOIN rollouts USING (id) WHERE source = 'stream'"
    with contextlib.closing(open_ledger(path)) as database:
        return [TokenRecord.from_bytes(blob) for (blob,) in database.execute(query) if blob]


def trace_lanes(folder: Path) -> set[str]:
    """The groups of lanes in the trace of the run under `folder`."""
    (path,) = folder.rglob("trace.json")
    return {lane.group for lane in read_trace(path)}


@pytest.mark.ray
@pytest.mark.timeout(800)
def test_controller_mode_gives_the_numbers_of_ordinary_ranks(start, tmp_path, models, ray_cluster):
    """Actor and critic on two ranks each, and a reference: the losses of the two runs are equal bit for bit."""
    one, other = tmp_path / "ranks", tmp_path / "controller"
    evaluation = ("valid_dataset.path=made", "eval_gconfig.n_samples=2", "eval_gconfig.temperature=1")
    ranks = start("local", arguments(one, models, 3, *evaluation))
    extra = ("controller=true", "rollout.weight_update=broadcast", "cluster.n_gpus_per_node=8")
    argv = arguments(other, models, 3, *evaluation, *extra)
    driver = start("ray", argv, RAY_ADDRESS=ray_cluster.address)
    for process in (ranks, driver):
        out, _ = process.communicate(timeout=700)
        assert process.returncode == 0, out
    keys = ("loss", "grad_norm", "ref_kl", "answer_len", "critic/loss", "critic/grad_norm")
    steps, others = ([line for line in stats(folder) if "loss" in line] for folder in (one, other))
    pairs = list(zip(steps, others, strict=True))
    assert len(pairs) == 3
    evaluations = [[line for line in stats(folder) if "eval/valid/pass@2" in line] for folder in (one, other)]
    assert all([line["step"] for line in lines] == [-1, 2] for lines in evaluations)
    # After the last step the weights stand still, so that both answer the same.
    last, other_last = ({k: v for k, v in lines[-1].items() if k != "time"} for lines in evaluations)
    assert last == other_last and last["eval/valid/version/min"] == last["eval/valid/version/max"] == 3
    for here, there in pairs:
        assert {k: here[k] for k in keys} == {k: there[k] for k in keys}
        assert there["driver/tensor_bytes"] == 0, "a tensor passed through the driver"
    for first, second in (("actor.compute_logp", "ref.forward"), ("actor.ppo_update", "critic.ppo_update")):
        pairs = [(a, b) for a in spans(other, first) for b in spans(other, second)]
        assert any(a[0] < b[1] and b[0] < a[1] for a, b in pairs), f"{first} and {second} never overlapped"
    records, lanes = zip(*((trained_records(folder), trace_lanes(folder)) for folder in (one, other)), strict=True)
    assert records[1] and all(r.train_logp is not None and r.advantages is not None for r in records[1])
    assert lanes[0] <= lanes[1], "episodes, servers and weight updates have their lanes in both traces"
    assert rank_pids(other) == []


def check_doctor(run_dir: Path, victim: int) -> None:
    """Stop a rank for a while: the doctor names it, and who waits for it."""
    expected = {"node0", "rank0", "server0", "actor.rank0", "actor.rank1", "rollout.rank0"}
    os.kill(victim, signal.SIGSTOP)
    try:
        wait_for(lambda: waits_for_actor(collect(run_dir, 5.0)))
        case = collect(run_dir, 5.0)
    finally:
        os.kill(victim, signal.SIGCONT)
    assert expected <= {process.name for process in case.processes}
    assert case.collector is not None and case.collector.name == "rollout.rank0"
    finding = diagnose(case)[0]
    assert finding.kind == "process_stopped" and finding.verdict.startswith("actor.rank1 is stopped"), finding


def waits_for_actor(case: Case) -> bool:
    """Whether the driver has waited for the actors for long."""
    edges = {(edge.waiter, edge.target) for edge in find_edges(case) if edge.wait["age_s"] > 5}
    return ("rank0", "actor.rank1") in edges


@pytest.mark.ray
@pytest.mark.timeout(800)
def test_run_recovers_from_its_checkpoint_after_an_actor_died(start, tmp_path, models, ray_cluster):
    alone = ("critic=null", "ref=null", "actor.algorithm=grpo", "actor.kl_ctl=0")
    recover = ("recover.mode=auto", "recover.retries=1", "recover.freq_steps=1")
    gpus = (
        "actor.device=auto",
        "server.device=auto",
        "cluster.n_gpus_per_node=4",
    )  # Ray believes in them; there are none
    more = ("controller=true", *gpus, *alone, *recover)
    argv = arguments(tmp_path, models, 1000, *more)
    process = start("ray", argv, RAY_ADDRESS=ray_cluster.address)
    wait_for(lambda: len(stats(tmp_path)) >= 2)
    (victim,) = rank_pids(tmp_path, "actor.rank1")
    check_doctor(tmp_path / "demo" / "reverse", victim)
    os.kill(victim, signal.SIGKILL)
    before = len(stats(tmp_path))
    wait_for(lambda: len(stats(tmp_path)) > before + 1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 130, out
    assert "rank 1 of actor died" in out, out
    assert "starting again from the recover" in out
    assert diagnosis(tmp_path / "demo" / "reverse")[0] == "run_stopped"
    steps = [line["step"] for line in stats(tmp_path)]
    assert steps == list(range(len(steps))), "the run continued from the checkpoint"
    wait_for(lambda: rank_pids(tmp_path) == [], 30)


@pytest.fixture
def driver(tmp_path, ray_cluster, monkeypatch):
    """Make this process the driver of a job."""
    for name, value in {**warm_start.environment(), "RAY_ADDRESS": ray_cluster.address}.items():
        monkeypatch.setenv(name, value)
    cluster = ClusterConfig(fileroot=str(tmp_path))
    config = LaunchConfig(allocation_mode="d2", cluster=cluster, setup_timeout_s=60)
    job = Job(config, "script.py", [], [[0] * 8], False)
    job.save()
    module = ray.connect()
    yield Driver(module, job)
    module.shutdown()


def pairs_batch() -> dict[str, torch.Tensor]:
    lengths = torch.tensor([5, 9, 7, 4, 8, 6, 9, 3])
    mask = (torch.arange(9) < lengths[:, None]).long()
    ids = torch.randint(3, 29, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    number = torch.arange(8)
    pairs = {"pair_ids": number // 2 + 1, "is_chosen": 1 - number % 2}
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": mask.clone(), **pairs}


def train_dpo(make) -> tuple[dict[str, float], torch.Tensor]:
    """Make one DPO step against a reference, with the lines of examples/arealite/preference_dpo.py."""
    engine, ref = make()
    engine.initialize(FinetuneSpec(1, 100, 1))
    ref.initialize()
    batch = pairs_batch()
    batch["ref_logp"] = ref.forward(batch)["logp"]
    result = engine.train_dpo(batch)
    weight = 2.0

    def loss(outputs, micro_batch):
        return outputs["logp"].sum() * weight, {"two": Stat(torch.tensor(2.0))}

    extra = engine.eval_batch(pairs_batch(), loss, lambda micro_batch: micro_batch["loss_mask"].sum())
    return result | extra, batch["ref_logp"] * 1.0


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_engines_with_different_numbers_of_ranks(models, driver):
    """Two data-parallel ranks train, one is the reference: equal to one process, for a batch that the script made."""
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    common = {"dtype": "float32", "device": "cpu"}
    trained = PreferenceConfig(path=str(models["actor"]), optimizer=optimizer, **common)
    frozen = TrainEngineConfig(path=str(models["ref"]), optimizer=None, **common)
    expected, logp = train_dpo(lambda: (FSDPDPOEngine(trained), FSDPEngine(frozen)))
    engine = driver.place(FSDPDPOEngine, (trained, ParallelStrategy(data=2)), {})
    ref = driver.place(FSDPEngine, (frozen, ParallelStrategy(data=1)), {})
    found, controller_logp = train_dpo(lambda: (engine, ref))
    for key in ("loss", "grad_norm", "accuracy", "two"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    torch.testing.assert_close(controller_logp, logp)  # in the order of the script's batch
    engine.set_version(7)
    ref.temperature = 0.5
    assert engine.get_version() == 7 and ref.temperature == 0.5 and engine.dp_size == 2
    with pytest.raises(TrainingError, match="needs `ref_logp` in the batch"):
        engine.train_dpo(pairs_batch())
    with pytest.raises(AttributeError):
        _ = engine.no_such_thing
    engine.destroy()
    engine.destroy()
