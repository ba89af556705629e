"""Simulated runs equal what can be computed by hand, and behave as real runs do."""

import asyncio
import json
import random
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import ConfigError, TrainingError
from arealite.core.foresee.core_sharing import CoreUse
from arealite.core.ledger.reading import open_ledger
from arealite.plan.costs import ServerCost, TrainCost, UpdateCost
from arealite.plan.server_model import DecodingServer
from arealite.plan.simulate import Crash, Setup, simulate
from arealite.plan.virtual_time import VirtualLoop
from arealite.plan.workload import Distribution, Workload


def constant(number):
    return Distribution("constant", (float(number),))


def rollout(eta, **options):
    options = {"adaptive_lead": False, "max_concurrent_rollouts": 4} | options
    return InferenceEngineConfig(max_head_offpolicyness=eta, **options)


# A batch of 4 x 2 answers of 100 tokens takes 1 s to generate, whatever else runs, and 0.6 s to train.
WORK = Workload(4, 2, constant(10), constant(100))
SETUP = Setup(WORK, 1, ServerCost(step_s=0.01), TrainCost(token_s=0.0, step_s=0.6), steps=5)
MIXED = replace(WORK, prompts=16, answer_tokens=Distribution("lognormal", (60.0, 1.0, 400.0)))


def run(eta=0, **changes):
    config = changes.pop("rollout", None) or rollout(eta)
    return simulate(replace(SETUP, rollout=config, **changes))


def test_synchronous_steps_take_generation_plus_training():
    found = run(eta=0)
    assert [step.seconds for step in found.steps] == pytest.approx([1.6] * 5)
    assert found.trainer_idle == pytest.approx(1.0 / 1.6) and found.server_idle == pytest.approx(0.6 / 1.6)
    assert found.sample_ages == {0: 1.0} and found.tokens_per_s == pytest.approx(8 * 110 / 1.6)
    assert found.mean_running == pytest.approx(8)


@pytest.mark.parametrize(("train_s", "expected"), [(0.6, 1.0), (1.0, 1.0), (2.5, 2.5)])
def test_asynchronous_steps_take_the_longer_of_both(train_s, expected):
    found = run(eta=4, train=TrainCost(token_s=0.0, step_s=train_s))
    assert found.step_s == pytest.approx(expected)
    assert found.trainer_idle == pytest.approx(1 - train_s / expected, abs=1e-9)


def test_a_prompt_is_computed_once_for_its_group_and_before_decoding():
    found = run(server=ServerCost(step_s=0.01, prompt_s=0.001, request_s=0.002))
    assert found.step_s == pytest.approx(1.6 + 4 * (10 * 0.001 + 0.002))
    # All of them in one pass.
    assert run(server=ServerCost(step_s=0.01, prompt_s=0.001, pass_s=0.03)).step_s == pytest.approx(1.6 + 0.04 + 0.03)


@pytest.mark.parametrize(
    ("prompts", "samples", "fill", "steps"), [(4, 2, 10, 40), (512, 16, 10, 5), (20_000, 1, 3, 3), (10**6, 1, 2, 3)]
)
def test_large_jobs_are_simulated_for_fewer_steps(prompts, samples, fill, steps):
    work = replace(WORK, prompts=prompts, samples=samples)
    large = replace(SETUP, workload=work, rollout=rollout(4, adaptive_lead=True), steps=None)
    assert large.num_steps() == (fill, steps)
    assert replace(large, steps=7).num_steps() == (10, 7)


def test_a_step_becomes_longer_with_the_context():
    # 100 steps of 8 sequences whose context grows from 10 to 110 tokens.
    found = run(server=ServerCost(step_s=0.01, context_s=1e-5))
    assert found.step_s == pytest.approx(1.6 + 1e-5 * 8 * (10 * 100 + 100 * 100 / 2))


def test_a_step_becomes_longer_with_different_lengths():
    # All of the same length, then some that were preempted.
    assert run(server=ServerCost(step_s=0.01, spread_s=1e-4)).step_s == pytest.approx(1.6)
    costs = [ServerCost(step_s=0.01, cache_tokens=460.0, spread_s=spread_s) for spread_s in (0.0, 1e-4)]
    assert run(server=costs[1]).step_s > 1.05 * run(server=costs[0]).step_s


def test_weights_hide_arithmetic_until_the_batch_is_large():
    assert run(server=ServerCost(0.0, weights_s=0.01, compute_s=0.001)).step_s == pytest.approx(1.6)
    assert run(server=ServerCost(0.0, weights_s=0.01, compute_s=0.002)).step_s == pytest.approx(2.2)


def test_servers_run_as_many_sequences_as_they_may():
    # Half of the samples wait: two rounds.
    assert run(server=ServerCost(step_s=0.01, max_running=4)).step_s == pytest.approx(2.6)
    # The cache has room for four whole answers: preempted ones are continued.
    found = run(server=ServerCost(step_s=0.01, cache_tokens=460.0))
    assert 2.0 < found.step_s < 3.2 and found.num_preemptions > 0


def seconds_by_tokens(lengths, context, cache):
    """Decode token by token, a second each; the youngest sequence leaves a full cache, and goes on first."""
    waiting, running, steps = deque([context, length] for length in lengths), [], 0
    while waiting or running:
        while len(running) > 1 and sum(held for held, _ in running) > cache:
            waiting.appendleft(running.pop())
        while waiting and not (running and sum(c for c, _ in running) + waiting[0][0] + len(running) > cache):
            running.append(waiting.popleft())
        running = [[held + 1, left - 1] for held, left in running if left > 0]
        running, steps = [each for each in running if each[1] > 0], steps + 1
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_preempted_sequences_make_all_of_their_tokens(seed):
    generator = random.Random(seed)
    lengths = [generator.randint(20, 300) for _ in range(12)]
    loop = VirtualLoop()
    server = DecodingServer(loop, ServerCost(step_s=1.0, cache_tokens=600.0))
    loop.run_until_complete(asyncio.gather(*(server.submit([float(n)], [10.0], 0.0) for n in lengths)))
    assert server.num_preemptions > 5 and server.num_tokens == pytest.approx(sum(lengths))
    # The model works with parts of steps.
    assert loop.time() == pytest.approx(seconds_by_tokens(lengths, 10, 600), abs=2.0)
    loop.shut_down()


def test_two_servers_share_the_requests():
    server = ServerCost(step_s=0.0, sequence_s=0.01)
    assert run(server=server).step_s == pytest.approx(8.6)
    assert run(server=server, num_servers=2).step_s == pytest.approx(4.6)


def test_a_weight_update_that_interrupts_stops_generation_and_keeps_its_tokens():
    swap = run(eta=4, update=UpdateCost(publish_s=0.1, load_s=0.2, pause_s=0.05, is_swap=True))
    stop = run(eta=4, update=UpdateCost(publish_s=0.1, load_s=0.2, is_swap=False))
    assert swap.step_s == pytest.approx(1.05, rel=0.02) and stop.step_s == pytest.approx(1.2, rel=0.02)
    # Every answer was made under two versions, or lies in the buffer for a version.
    assert max(stop.token_ages) <= 4 and len(stop.token_ages) > 1
    synchronous = run(eta=0, update=UpdateCost(publish_s=0.1, load_s=0.2, is_swap=False))
    assert synchronous.step_s == pytest.approx(1.9)


def test_rewards_and_tools_take_time_but_no_server():
    found = run(workload=replace(WORK, reward_s=constant(2)))
    assert found.step_s == pytest.approx(3.6) and found.server_idle == pytest.approx(2.6 / 3.6)
    found = run(workload=replace(WORK, turns=3, tool_s=constant(0.5)))
    assert found.step_s == pytest.approx(3 * 1.0 + 2 * 0.5 + 0.6)
    assert found.steps[0].answer_tokens == pytest.approx(8 * 300)


def test_replicas_share_the_groups_of_a_batch():
    assert TrainCost(token_s=0.01, num_replicas=2).seconds([[10], [40], [20], [30]]) == pytest.approx(0.5)
    assert TrainCost(token_s=0.01, pair_s=0.001, step_s=1).seconds([[10, 10]]) == pytest.approx(1 + 0.2 + 0.2)
    assert run(train=TrainCost(token_s=0.001, num_replicas=4)).step_s == pytest.approx(1 + 0.22)


def test_shared_cores_slow_down_who_is_active_at_the_same_time():
    assert run(eta=0, cores=CoreUse(1)).step_s == pytest.approx(1.6)
    # Both are active for 1.2 s, in which they take turns.
    assert run(eta=4, cores=CoreUse(1)).step_s == pytest.approx(0.4 + 1.15 * 1.2)
    assert run(eta=4, cores=CoreUse(2)).step_s == pytest.approx(1.0)
    # Eight sequences of 100 tokens a second; episodes take half of the interpreter's time from the trainer.
    half = CoreUse(8, token_s=0.5 / 800)
    assert run(eta=4, cores=half).step_s == pytest.approx(1.2)
    assert run(eta=0, cores=half).step_s == pytest.approx(1.6)


def test_more_of_everything_is_never_slower():
    def step_s(eta, **changes):
        config = rollout(eta, max_concurrent_rollouts=None)
        return run(eta, workload=MIXED, rollout=config, warm_up=6, steps=12, **changes).step_s

    server = ServerCost(step_s=0.01, sequence_s=0.001)
    by_eta = [step_s(eta, server=server) for eta in (0, 1, 4)]
    assert all(later <= before * 1.05 for before, later in pairwise(by_eta))
    by_servers = [step_s(1, server=server, num_servers=n) for n in (1, 2, 4)]
    assert all(later <= before * 1.05 for before, later in pairwise(by_servers))
    assert step_s(1, server=server) < step_s(1, server=replace(server, sequence_s=0.002))


def test_no_sample_is_older_than_eta_and_counts_add_up():
    for eta in (0, 1, 3):
        found = run(eta, workload=MIXED, rollout=rollout(eta, max_concurrent_rollouts=None))
        assert max(found.sample_ages) <= eta and sum(found.sample_ages.values()) == pytest.approx(1)
        counts = found.counts
        ended = counts["accepted"] + counts["rejected"] + counts["failed"] + counts["stale"]
        assert counts["admitted"] == counts["running"] + ended


def test_the_same_seed_predicts_the_same():
    once, again = (run(2, workload=MIXED, rollout=rollout(2, adaptive_lead=True)) for _ in range(2))
    assert once == again
    assert run(2, workload=MIXED, seed=2).steps != run(2, workload=MIXED, seed=3).steps


def test_a_server_that_dies_loses_no_episode_and_costs_time():
    config, crash = rollout(1, max_concurrent_rollouts=None), Crash(at_s=2.5, server=1, restart_s=1.0)
    server = ServerCost(step_s=0.0, sequence_s=0.002)
    parts = dict(workload=MIXED, rollout=config, num_servers=2, server=server, warm_up=0)
    calm, crashed = run(**parts), run(**parts, crashes=(crash,))
    assert crashed.counts["failed"] == 0 and crashed.step_s > calm.step_s
    gone = run(**parts, crashes=(crash._replace(restart_s=None),))
    assert gone.step_s > crashed.step_s
    with pytest.raises(ConfigError, match="server 5 cannot crash: the servers are 0 to 1"):
        run(**parts, crashes=(crash._replace(server=5),))


def test_requests_that_cannot_fail_take_the_same_time_as_those_that_can():
    stop = UpdateCost(load_s=0.2, is_swap=False)
    parts = dict(workload=MIXED, rollout=rollout(1, max_concurrent_rollouts=None), num_servers=2, update=stop)
    never = Crash(at_s=1e6, server=0, restart_s=None)
    assert run(**parts).steps == run(**parts, crashes=(never,)).steps


def test_a_request_past_its_deadline_fails_its_episode():
    config = rollout(0, request_timeout_s=0.5, max_failed_episodes=3)
    with pytest.raises(TrainingError, match=r"request_timeout_s"):
        run(rollout=config)


def test_the_ledger_of_a_simulation_is_a_real_one(tmp_path):
    run(1, steps=3, ledger_path=tmp_path / "run.sqlite")
    database = open_ledger(tmp_path / "run.sqlite")
    states = dict(database.execute("SELECT state, COUNT(*) FROM episodes GROUP BY 1").fetchall())
    parts = [part for (text,) in database.execute("SELECT parts FROM episode_times") for part in json.loads(text)]
    database.close()
    assert states["trained"] == 4 * (3 + 3)
    assert {len(part) for part in parts} == {2}, "placeholders are not counted as tokens"


def test_impossible_setups_are_refused():
    with pytest.raises(ConfigError, match="at least one server"):
        run(num_servers=0)
    with pytest.raises(ConfigError, match="must take time"):
        run(server=ServerCost(step_s=0.0))
    with pytest.raises(ConfigError, match="longest sequence has 110 tokens, and the KV cache of a server holds 109"):
        run(server=ServerCost(step_s=0.01, cache_tokens=109.0))


@pytest.mark.parametrize(
    "text", ["lognormal:3", "normal:1,2", "constant:-1", "uniform:a,b", "uniform:5,2", "", "constant:nan"]
)
def test_malformed_distributions_are_refused(text):
    with pytest.raises(ConfigError, match=r"--lengths is .* write constant:N"):
        Distribution.parse(text, "--lengths")


def test_distributions():
    assert Distribution.parse("512", "x").mean() == 512
    assert Distribution.parse("uniform:100,300", "x").mean() == pytest.approx(200, rel=0.05)
    assert Distribution.parse("lognormal:100,0.5,250", "x").largest == 250
    assert Distribution.of([1.0, 3.0]).mean() == pytest.approx(2, rel=0.1)


def test_a_lead_that_is_given_leaves_the_limit_of_staleness():
    """Long answers of a run that is one batch ahead may still become four versions old."""
    options = {"workload": MIXED, "steps": 20, "train": TrainCost(token_s=0.0, step_s=0.2)}
    ahead = run(rollout=rollout(4, adaptive_lead=True, max_concurrent_rollouts=None), lead=1, **options)
    limited = run(rollout=rollout(1, max_concurrent_rollouts=None), **options)
    assert max(ahead.sample_ages) > 1 >= max(limited.sample_ages)
    assert ahead.counts["stale"] == 0 < limited.counts["stale"]
    assert ahead.step_s < limited.step_s and ahead.mean_age < 2
