"""Searches the best layouts of a model on a number of GPUs, with their predictions.

All layouts whose memory fits are ranked by a formula (perfect overlap of generation and training). The best one of each
of the best splits into servers and trainers is simulated, then other layouts of the two splits that were fastest: the
formula knows neither stragglers nor waits, so it may be wrong about the split. Large jobs are simulated at a fraction
of their size, with the same ratio of servers to trainers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from arealite.api.alloc_mode import AllocationMode, ParallelStrategy
from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError
from arealite.api.generation_args import MOST_RUNNING
from arealite.plan.hardware import GPUS_PER_NODE, Gpu
from arealite.plan.layouts import Layout, Memory
from arealite.plan.simulate import Crash, Prediction, Setup, ideal_step_s, simulate
from arealite.plan.workload import Workload
from arealite.utils.memory.model_size import ModelSize

_NUM_SPLITS, _NUM_BEST_SPLITS, _NUM_SIMULATED = 6, 2, 9
# Answers of a batch above which a search simulates a fraction of the job.
_MAX_BATCH = 512
_SEARCH_STEPS = 10


@dataclass(frozen=True)
class Candidate:
    """A layout with its memory and what it would do."""

    layout: Layout
    memory: Memory
    prediction: Prediction
    # Prompts of a batch.
    prompts: int
    # The job was simulated at one part in so many.
    scale: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.tokens_per_s * self.scale

    def reason(self) -> str:
        """Say what limits this layout, why it divides experts, and which batch size it needs."""
        experts, batch = self.layout.expert_reason(self.memory), self.layout.batch_problem(self.prompts)
        return "; ".join(filter(None, (self._limit(), experts, batch)))

    def _limit(self) -> str:
        found = self.prediction
        idle, servers = found.trainer_idle, found.server_idle
        if idle > 0.15 and servers < 0.15:
            return f"generation is the bottleneck: trainers wait {idle:.0%} of the time"
        if servers > 0.15 and idle < 0.15:
            return f"training is the bottleneck: servers are idle {servers:.0%} of the time"
        if idle > 0.15:
            return f"both sides wait (trainers {idle:.0%}, servers {servers:.0%}): stragglers, rewards or eta limit it"
        return f"balanced: trainers wait {idle:.0%}, servers {servers:.0%}"


def make_setup(
    layout: Layout, workload: Workload, rollout: InferenceEngineConfig, crashes: tuple[Crash, ...] = ()
) -> tuple[Setup, Memory]:
    """Return the setup of a layout, and its memory; raises `ConfigError` if it does not fit."""
    memory = layout.memory(workload)
    if memory.problem:
        raise ConfigError(f"{layout.name} does not fit on {layout.gpu.name}: {memory.problem}")
    costs = layout.server_cost(memory), layout.train_cost(memory), layout.update_cost()
    return Setup(workload, layout.gen.data, *costs, rollout=rollout, crashes=crashes), memory


def evaluate(
    layout: Layout,
    workload: Workload,
    rollout: InferenceEngineConfig,
    steps: int | None = None,
    crashes: tuple[Crash, ...] = (),
    seed: int = 1,
) -> Candidate:
    """Predict one layout at its full size."""
    setup, memory = make_setup(layout, workload, rollout, crashes)
    return Candidate(layout, memory, simulate(replace(setup, steps=steps, seed=seed)), workload.prompts)


def search(
    num_gpus: int, model: ModelSize, gpu: Gpu, workload: Workload, rollout: InferenceEngineConfig, backend: str,
    max_running: int = MOST_RUNNING, seed: int = 1, prox_logp: str = "first_pass",
) -> list[Candidate]:  # fmt: skip
    """Return the best layouts, the fastest first."""
    fitting: list[tuple[float, Layout, Setup, Memory]] = []
    # With the memory that the larger side needs: the least is nearest to fitting.
    problems: list[tuple[float, str]] = []
    for mode in _modes(num_gpus, backend, model.experts):
        layout = Layout(mode, model, gpu, max_running, prox_logp)
        if workload.prompts < layout.train.data or layout.indivisible or model.untrainable(layout.train.tensor):
            continue
        memory = layout.memory(workload)
        if memory.problem or memory.cache_tokens < workload.longest_sequence:
            cache = f"the KV cache of a server holds {memory.cache_tokens:,.0f} tokens, not the longest sequence"
            needed = max(memory.server_gib, memory.trainer_gib)
            problems.append((needed, f"The nearest is {layout.name}: {memory.problem or cache}"))
            continue
        setup, _ = make_setup(layout, workload, rollout)
        fitting.append((ideal_step_s(setup), layout, setup, memory))
    if not fitting:
        why = f"{workload.prompts} prompts are fewer than the trainer's replicas"
        why = min(problems)[1] if problems else why
        raise ConfigError(
            f"no layout of this model fits on {num_gpus} x {gpu.name}. {why}. Use more or larger GPUs, or a smaller "
            "model"
        )
    fitting.sort(key=lambda item: item[0])
    splits: dict[int, list[tuple[Layout, Setup, Memory]]] = {}
    for _, layout, setup, memory in fitting:
        splits.setdefault(layout.train.world_size, []).append((layout, setup, memory))
    best = list(splits.values())[:_NUM_SPLITS]
    found = [_simulate(*layouts[0], seed) for layouts in best]
    ranked = sorted(zip(found, best, strict=True), key=lambda item: -item[0].tokens_per_s)
    others = [each for _, layouts in ranked[:_NUM_BEST_SPLITS] for each in layouts[1:]]
    others.sort(key=lambda each: ideal_step_s(each[1]))
    found += [_simulate(*each, seed) for each in others[: _NUM_SIMULATED - len(found)]]
    return sorted(found, key=lambda candidate: -candidate.tokens_per_s)


def _simulate(layout: Layout, setup: Setup, memory: Memory, seed: int) -> Candidate:
    """Simulate a part of a large job, with the same load for each server and trainer."""
    work, servers, replicas = setup.workload, layout.gen.data, layout.train.data
    part = max(1, min(servers, servers * _MAX_BATCH // (work.prompts * work.samples)))
    scale = servers / part
    few = max(1, round(replicas / scale))
    train = setup.train
    slower = few * scale / replicas
    small = replace(
        setup,
        workload=replace(work, prompts=max(1, round(work.prompts / scale))),
        num_servers=part,
        train=replace(train, token_s=train.token_s * slower, pair_s=train.pair_s * slower, num_replicas=few),
        steps=_SEARCH_STEPS,
        seed=seed,
    )
    return Candidate(layout, memory, simulate(small), work.prompts, scale)


def _modes(num_gpus: int, backend: str, num_experts: int) -> Iterator[AllocationMode]:
    """Yield the ways to divide the GPUs: by d and t on both sides, and experts over trainers."""
    degrees = [t for t in (1, 2, 4, 8) if t <= min(GPUS_PER_NODE, num_gpus)]
    # Every split of few GPUs, sixteenths of many.
    unit = max(1, num_gpus // 16)
    for trainers in range(unit, num_gpus, unit):
        servers = num_gpus - trainers
        for gen in degrees:
            for train in degrees:
                if servers % gen or trainers % train:
                    continue
                data = trainers // train
                for expert in _expert_degrees(num_experts, data, train):
                    sides = ParallelStrategy(servers // gen, tensor=gen), ParallelStrategy(data, 1, train, 1, expert)
                    yield AllocationMode(backend, sides[0], "fsdp", sides[1])


def _expert_degrees(num_experts: int, data: int, tensor: int) -> list[int]:
    """Return 1, and the powers of two over which experts can be divided."""
    degrees = [2**power for power in range(1, 9)]
    return [1, *(e for e in degrees if num_experts and data % e == 0 and num_experts % (e * tensor) == 0)]
