"""The client with real embedded servers: generation, interruption, updates, failures, a training loop."""

import asyncio
import signal
import threading
import time

import pytest
import torch
from transformers import Qwen2ForCausalLM

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from arealite.api.errors import RequestError, ServerError, WaitTimeout, WeightUpdateError
from arealite.api.io_struct import ModelRequest, WeightUpdateMeta
from arealite.core.waits import NamedWait
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.data import split_groups
from arealite.utils.network import free_port
from arealite.weights.host_memory import SharedWeights
from arealite.workflow.rlvr import RLVRWorkflow
from tests.server_process import server_process

PROMPT = list(range(5, 15))


@pytest.fixture(scope="module")
def server(model_path):
    with server_process(model_path, deterministic="true") as server:
        yield server


@pytest.fixture
def connect():
    engines = []

    def make(*servers, batch_size=None, **config):
        config.setdefault("setup_timeout_s", 20.0)
        config.setdefault("request_timeout_s", 30.0)
        engine = RemoteSGLangEngine(InferenceEngineConfig(**config))
        engine.initialize([s if isinstance(s, str) else s.address for s in servers], batch_size)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.destroy()


def run(engine, coroutine, timeout_s=60):
    return engine.executor.run_coroutine(coroutine, NamedWait("the test", "an answer", timeout_s))


def request(n=1, max_new_tokens=20, seed=3, **kwargs):
    gconfig = GenerationHyperparameters(n_samples=n, max_new_tokens=max_new_tokens, ignore_eos=True, **kwargs)
    return ModelRequest(PROMPT, gconfig, seed=seed)


def in_background(engine, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, engine.executor.runner.loop)


def wait_until_generating(server, future, tokens=1):
    """Return when the server has made some more tokens, or `future` is done."""
    began = server.get("server_info")["generated_tokens"]
    while server.get("server_info")["generated_tokens"] < began + tokens and not future.done():
        time.sleep(0.002)


def full_logprobs(model_path, tokens):
    model = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_tokens_are_told_while_they_are_generated_over_segments(server, connect):
    told = {}

    def tell(sample, at, tokens, logprobs):
        told.setdefault(sample, []).append((at, tokens, logprobs))

    engine, asking = connect(server, segment_tokens=8), request(n=2)
    asking.on_tokens = tell
    for index, response in enumerate(run(engine, engine.agenerate_group(asking))):
        assert [at for at, _, _ in told[index]] == list(range(20))
        assert [token for _, tokens, _ in told[index] for token in tokens] == response.output_tokens
        assert [value for *_, values in told[index] for value in values] == pytest.approx(response.output_logprobs)


def test_one_request(server, connect, model_path):
    engine = connect(server)
    response = run(engine, engine.agenerate(request()))
    assert len(response.output_tokens) == len(response.output_logprobs) == len(response.output_versions) == 20
    assert response.stop_reason == "length" and response.truncated
    expected = full_logprobs(model_path, PROMPT + response.output_tokens)[len(PROMPT) - 1 :]
    assert torch.allclose(torch.tensor(response.output_logprobs), expected, atol=1e-4)


def test_a_group_equals_single_requests_with_its_seeds(server, connect):
    engine = connect(server)
    group = run(engine, engine.agenerate_group(request(n=4)))
    assert len({tuple(r.output_tokens) for r in group}) == 4
    for i, response in enumerate(group):
        single = run(engine, engine.agenerate(request(seed=3 + i)))
        assert single.output_tokens == response.output_tokens


def test_refused_request_is_not_retried(server, connect):
    engine = connect(server)
    long = ModelRequest([5] * 600, GenerationHyperparameters(max_new_tokens=8))
    with pytest.raises(RequestError, match="600"):
        run(engine, engine.agenerate(long))
    assert engine.router.servers[server.address].num_failures == 0


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_an_interruption_loses_no_token_and_repeats_none(model_path, connect, mode, server):
    """With the same weights loaded again, an interrupted generation equals an undisturbed one, token for token."""
    engine = connect(server, pause_mode=mode)
    wanted = request(n=2, max_new_tokens=100)
    undisturbed = run(engine, engine.agenerate_group(wanted))
    first = server.get("model_info")["weight_version"]
    future = in_background(engine, engine.agenerate_group(wanted))
    for version in range(int(first) + 1, int(first) + 5):
        wait_until_generating(server, future, tokens=20)
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), version))
    interrupted = future.result(60)
    seen = set()
    for a, b in zip(undisturbed, interrupted, strict=True):
        assert a.output_tokens == b.output_tokens
        assert torch.allclose(torch.tensor(a.output_logprobs), torch.tensor(b.output_logprobs), atol=1e-4)
        assert len(b.output_versions) == 100 and b.output_versions == sorted(b.output_versions)
        assert b.num_interruptions == 0, "the server did not go on by itself"
        seen |= set(b.output_versions)
    assert len(seen) > 1, "all tokens carry one version"


def test_tokens_after_an_update_follow_from_the_new_weights_alone(model_path, tmp_path, connect, server):
    torch.manual_seed(8)
    other = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for parameter in other.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    other.save_pretrained(tmp_path)
    engine = connect(server, pause_mode="abort")
    first = int(server.get("model_info")["weight_version"]) + 1
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), first))
    future = in_background(engine, engine.agenerate(request(max_new_tokens=300)))
    wait_until_generating(server, future, tokens=20)
    engine.update_weights(WeightUpdateMeta("disk", str(tmp_path), first + 1))
    response = future.result(60)
    num_old = response.output_versions.count(first)
    assert 0 < num_old < 300 and response.output_versions[num_old:] == [first + 1] * (300 - num_old)
    tokens = PROMPT + response.output_tokens
    logprobs = torch.tensor(response.output_logprobs)
    by_old = full_logprobs(model_path, tokens)[len(PROMPT) - 1 :]
    by_new = full_logprobs(tmp_path, tokens)[len(PROMPT) - 1 :]
    assert torch.allclose(logprobs[:num_old], by_old[:num_old], atol=1e-4)
    assert torch.allclose(logprobs[num_old:], by_new[num_old:], atol=1e-4)
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), first + 2))


def test_new_weights_make_other_tokens_by_disk_and_shared_memory(model_path, tmp_path, connect, server):
    torch.manual_seed(9)
    other = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for parameter in other.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.5)
    other.save_pretrained(tmp_path / "other")
    shared = SharedWeights.create(tmp_path / "shared", dict(other.named_parameters()))
    for name, parameter in other.named_parameters():
        shared.tensors[name].copy_(parameter.detach())
    engine = connect(server)
    greedy = request(temperature=0.0)
    before = run(engine, engine.agenerate(greedy)).output_tokens
    engine.update_weights(WeightUpdateMeta("disk", str(tmp_path / "other"), 1))
    by_disk = run(engine, engine.agenerate(greedy))
    assert engine.get_version() == 1 and set(by_disk.output_versions) == {1}
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), 2))
    assert run(engine, engine.agenerate(greedy)).output_tokens == before
    engine.update_weights(WeightUpdateMeta("shm", str(tmp_path / "shared"), 3))
    assert run(engine, engine.agenerate(greedy)).output_tokens == by_disk.output_tokens != before
    with pytest.raises(WeightUpdateError, match="refused version 4"):
        engine.update_weights(WeightUpdateMeta("disk", str(tmp_path), 4))
    engine.update_weights(WeightUpdateMeta("disk", str(model_path), 5))  # as it was, for other tests
    shared.unlink()


def test_requests_of_a_killed_server_continue_elsewhere(model_path, connect, server):
    with server_process(model_path, deterministic="true") as one:
        engine = connect(one, server)
        wanted = [request(max_new_tokens=100, seed=i) for i in range(4)]
        futures = [in_background(engine, engine.agenerate(one)) for one in wanted]
        wait_until_generating(one, futures[0])
        one.signal(signal.SIGKILL)
        tokens = [f.result(60).output_tokens for f in futures]
        assert all(len(own) == 100 for own in tokens)
        again = [in_background(engine, engine.agenerate(one)) for one in wanted]
        assert tokens == [f.result(60).output_tokens for f in again]
        assert not engine.router.servers[one.address].is_open


def test_when_all_servers_are_gone_the_error_says_so(model_path, connect):
    with server_process(model_path) as server:
        engine = connect(server, request_timeout_s=5.0, request_retries=2)
        server.signal(signal.SIGKILL)
        server.process.wait()
        with pytest.raises((ServerError, WaitTimeout), match=server.address):
            run(engine, engine.agenerate(request()))


def test_a_server_that_never_comes_up_is_named(connect):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(WaitTimeout, match=f"1 inference servers[\\s\\S]*{address}"):
        connect(address, setup_timeout_s=0.5)


def reward(completion, **data):
    return float(sum(c in "aeiou" for c in completion))


def test_a_training_loop_with_updates_keeps_versions_and_staleness(model_path, tokenizer, connect, server):
    engine = connect(server, batch_size=4, max_head_offpolicyness=2)
    gconfig = GenerationHyperparameters(n_samples=3, max_new_tokens=12)
    workflow = RLVRWorkflow(reward, gconfig, tokenizer, reward_inline=True)
    data = [[{"prompt": f"count to {i}"} for i in range(j, j + 4)] for j in range(0, 40, 4)]
    groups = []
    for version in range(6):
        batch = engine.prepare_batch(data, workflow)
        generated = batch["versions"] >= 0
        assert version - batch["versions"][generated].min() <= 2
        assert torch.equal(generated.long(), batch["loss_mask"])
        assert batch["rewards"].shape == (12,)
        groups += batch["group_ids"].unique().tolist()
        engine.update_weights(WeightUpdateMeta("disk", str(model_path), version + 1))
        engine.executor.staleness.counts.check()
    assert len(groups) == len(set(groups)) == 24
    assert engine.stats()["failed"] == 0


def test_no_staleness_through_the_server_equals_a_plain_loop(model_path, tokenizer, connect, server):
    gconfig = GenerationHyperparameters(n_samples=3, max_new_tokens=16)
    workflow = RLVRWorkflow(reward, gconfig, tokenizer, reward_inline=True)
    rows = [{"prompt": f"count to {i}", "seed": 100 * i} for i in range(8)]
    engine = connect(server, batch_size=4)
    first = engine.prepare_batch([rows[:4], rows[4:]], workflow)
    plain = [run(engine, workflow.arun_episode(engine, row)) for row in rows[:4]]
    assert torch.equal(first["input_ids"][:3, : plain[0]["input_ids"].shape[1]], plain[0]["input_ids"])
    for i, part in enumerate(plain):
        length = part["input_ids"].shape[1]
        for key in part:
            got = first[key][3 * i : 3 * i + 3]
            assert torch.equal(got[:, :length] if got.ndim == 2 else got, part[key]), key


def test_rollout_workers_make_the_same_batch(model_path, tokenizer, connect, server):
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=12)
    workflow = RLVRWorkflow(reward, gconfig, tokenizer, reward_inline=True)
    rows = [{"prompt": f"count to {i}", "seed": 100 * i} for i in range(4)]
    here = connect(server, batch_size=4).rollout_batch(rows, workflow)
    there = connect(server, batch_size=4, num_workers=1).rollout_batch(rows, workflow)
    for key in here:
        assert torch.equal(here[key], there[key]), key


def test_groups_stay_whole_and_balanced_over_ranks():
    lengths = torch.tensor([9, 9, 1, 1, 5, 5, 2, 2])
    batch = {
        "attention_mask": (torch.arange(9)[None] < lengths[:, None]).long(),
        "input_ids": torch.arange(72).view(8, 9),
        "group_ids": torch.tensor([3, 3, 4, 4, 7, 7, 9, 9]),
    }
    shares = split_groups(batch, 2)
    groups = [set(s["group_ids"].tolist()) for s in shares]
    assert groups[0] | groups[1] == {3, 4, 7, 9} and not groups[0] & groups[1]
    tokens = [int(s["attention_mask"].sum()) for s in shares]
    assert max(tokens) - min(tokens) <= 2


def test_engine_leaves_no_thread(server, connect):
    # The first one in a process starts a thread that prints what the process waits for.
    connect(server).destroy()
    before = set(threading.enumerate())
    connect(server).destroy()
    assert set(threading.enumerate()) <= before
