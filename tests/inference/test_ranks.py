"""Tests of tensor parallelism with two real ranks: same tokens as one rank, atomic updates, failures."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError, ServerError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.engine import Engine
from arealite.inference.ranks import RankWorker
from arealite.inference.sequence import SamplingParams
from arealite.inference.sharding import check_parallel
from arealite.inference.weights import Staged, WeightSource
from arealite.utils.process import process_table
from tests.inference.conftest import (
    assert_greedy,
    forward_logprobs,
    generate,
    make_model,
    prompts,
    run,
    submit,
    submit_and_see_start,
)
from tests.inference.test_adapters import make_adapter
from tests.server_process import server_process

SETTINGS = {"max_total_tokens": 2048, "block_size": 4, "device": "cpu", "max_prefill_tokens": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    for seed, family in enumerate(["qwen2", "qwen3"]):
        make_model(family, seed).save_pretrained(root / family)
    tokenizer.save_pretrained(root / "qwen2")
    make_model("qwen2", 5).save_pretrained(root / "other")
    return {name: root / name for name in ("qwen2", "qwen3", "other")}


@pytest.fixture(autouse=True, scope="module")
def forked_ranks():
    """Fork ranks, where a server starts interpreters: their imports take seconds. The slow test has a real server."""
    with pytest.MonkeyPatch.context() as patch:
        context = multiprocessing.get_context("forkserver")
        patch.setattr("arealite.inference.ranks.multiprocessing.get_context", lambda _: context)
        yield


@pytest.fixture(scope="module")
def pair(folders):
    """An engine with two ranks and drafts, and one with a single rank and no drafts."""
    path = str(folders["qwen2"])
    engines = [
        Engine(ServerConfig(model_path=path, tensor_parallel=size, draft_tokens=drafts, **SETTINGS))
        for size, drafts in ((2, 4), (1, 0))
    ]
    yield [engine.start() for engine in engines]
    processes = engines[0].ranks.processes
    for engine in engines:
        engine.close()
    # 255: another test has ended the fork server meanwhile, and nobody knows the exit code.
    assert [p.exitcode for p in processes] in ([0], [255])


@pytest.fixture(scope="module")
def model(folders):
    return AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float32)


def test_two_ranks_with_half_the_heads_give_the_same_tokens(pair, model):
    two, one = pair
    assert two.core.runner.keys[0].shape[2] * 2 == one.core.runner.keys[0].shape[2]
    asked = prompts(12)
    greedy = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
    futures = [submit(two, prompt, **greedy) for prompt in asked]
    for prompt, future in zip(asked, futures, strict=True):
        (output,) = future.result(60)
        assert_greedy(model, prompt, output.token_ids, 20, None)
        logprobs = forward_logprobs(model, prompt, output.token_ids)
        torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=1e-5, rtol=0)


CASES = [
    {"n": 4, "temperature": 0.8},
    {"top_p": 0.7, "top_k": 20, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    {"logit_bias": {7: 5.0, 9: -100.0}, "min_new_tokens": 5, "stop_token_ids": [7]},
    {"sampling_seed": 2**63 + 11},
]


@pytest.mark.parametrize("params", CASES, ids=lambda p: ",".join(p))
def test_two_ranks_sample_the_tokens_of_one(params, pair):
    params = {"sampling_seed": 3, "max_new_tokens": 16} | params
    for prompt in prompts(3, low=2):
        outputs = [run(engine, prompt, **params) for engine in pair]
        for mine, theirs in zip(*outputs, strict=True):
            assert mine.token_ids == theirs.token_ids
            torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=1e-5, rtol=0)


def test_ranks_accept_the_same_drafts(pair):
    before = pair[0].stats()["accepted_tokens"]
    # Three tokens only, so that the text repeats itself.
    params = {"logit_bias": {3: 40.0, 4: 40.0, 5: 40.0}, "max_new_tokens": 60, "sampling_seed": 1, "n": 2}
    for mine, theirs in zip(*(run(engine, [3, 4, 5, 3, 4], **params) for engine in pair), strict=True):
        assert mine.token_ids == theirs.token_ids
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=1e-4, rtol=0)
    assert pair[0].stats()["accepted_tokens"] > before and pair[1].stats()["drafted_tokens"] == 0


def test_stop_string_ends_a_sequence_on_every_rank(pair, tokenizer):
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    text = tokenizer.decode(run(pair[1], [9, 8], **greedy)[0].token_ids)
    for prompt in ([9, 8], [7, 6, 5]):
        mine, theirs = (run(engine, prompt, stop=[text[3:5]], **greedy)[0] for engine in pair)
        assert (mine.token_ids, mine.text, mine.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)


def test_ranks_listen_on_loopback_only(pair):
    pids = [os.getpid(), *(process.pid for process in pair[0].ranks.processes)]
    sockets = [c.laddr.ip for pid in pids for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
    assert sockets and set(sockets) == {"127.0.0.1"}


def test_rank_fails_if_its_tokens_differ_from_rank_0():
    worker = object.__new__(RankWorker)
    worker.core = SimpleNamespace(checksum=17, step=lambda: None)
    worker.step(checksum=17)
    with pytest.raises(ServerError, match="drifted apart"):
        worker.step(checksum=18)


def test_ranks_stay_in_step_over_preemption_abort_and_pause(pair, model):
    two, _ = pair
    long = {"temperature": 0.0, "max_new_tokens": 200, "ignore_eos": True}
    asked = prompts(12, low=10, seed=4)
    futures = [submit(two, p, rid=f"r{i}", **long) for i, p in enumerate(asked)]
    for i in range(0, 12, 3):
        two.abort(f"r{i}").result(60)
    two.pause("retract").result(60)
    two.resume().result(60)
    for i, (prompt, future) in enumerate(zip(asked, futures, strict=True)):
        (output,) = future.result(120)
        if i % 3 == 1:
            assert_greedy(model, prompt, output.token_ids, 200, None)
    assert two.scheduler.num_preemptions > 0
    assert two.scheduler.pool.num_free == two.scheduler.pool.num_usable


def test_blocks_of_a_broken_sequence_are_zeroed_on_every_rank(pair, model, monkeypatch):
    monkeypatch.setattr(SamplingParams, "check", lambda *_: None)  # so that forbidding all tokens breaks a sequence
    two, _ = pair
    (prompt,) = prompts(1, low=21, high=22)
    bias = dict.fromkeys(range(97), -torch.inf)
    assert "status_code" in run(two, prompt, logit_bias=bias)[0].finish_reason
    (output,) = run(two, prompt, temperature=0.0, max_new_tokens=12, ignore_eos=True)
    assert output.cached_tokens == 0 and output.token_ids == generate(model, prompt, 12, None)


def test_weight_update_is_loaded_by_all_ranks_or_none(pair, folders, tmp_path):
    two, one = pair
    other, before = folders["other"], two.version
    future = submit_and_see_start(two, [1, 2, 3], max_new_tokens=150, ignore_eos=True)
    for version, engine in ((1, two), (1, one)):
        source = WeightSource.published(WeightUpdateMeta("disk", str(other), version))
        engine.update(source, flush_cache=False).result(60)
    assert [span[0] for span in future.result(60)[0].version_spans] == [before, 1]
    assert two.fingerprint().result(60) == one.fingerprint().result(60)
    assert two.fingerprints().result(60) == one.fingerprints().result(60)

    weights = load_file(other / "model.safetensors")
    torn = tmp_path / "torn"
    torn.mkdir()
    save_file(weights | {"model.norm.weight": torch.ones(47)}, torn / "model.safetensors")
    with pytest.raises(WeightUpdateError, match="47"):
        two.update(WeightSource.published(WeightUpdateMeta("disk", str(torn), 2)))
    assert two.fingerprint().result(60) == one.fingerprint().result(60) and two.version == 1

    doubled = {name: 2 * tensor for name, tensor in weights.items()}
    coarse = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for version, tensors in ((2, coarse), (3, doubled)):  # another dtype than the update before
        for engine in pair:
            engine.update(WeightSource.received(tensors, version)).result(60)
    assert two.fingerprints().result(60) == one.fingerprints().result(60)
    same = {"temperature": 0.0, "max_new_tokens": 12}
    assert run(two, [4, 5, 6], **same)[0].token_ids == run(one, [4, 5, 6], **same)[0].token_ids


def test_adapters_are_sharded(pair, folders, tmp_path):
    pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float32)
    adapted = make_adapter(tmp_path, base, 1)
    torn = shutil.copytree(tmp_path, tmp_path / "torn")
    (torn / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for engine in pair:
        with pytest.raises(WeightUpdateError, match=r"r of .* got None"):
            engine.update(WeightSource.adapter(str(torn), 4))
        engine.update(WeightSource.published(WeightUpdateMeta("disk", str(folders["qwen2"]), 4))).result(60)
        engine.update(WeightSource.adapter(str(tmp_path), 5)).result(60)
    (output,) = run(pair[0], [5, 6, 7], max_new_tokens=12, ignore_eos=True)
    expected = forward_logprobs(adapted, [5, 6, 7], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
    for engine in pair:
        engine.update(WeightSource.base()).result(60)
    assert pair[0].fingerprint().result(60) == pair[1].fingerprint().result(60)


def test_rank_answers_with_any_error_while_it_reads_weights():
    class Core:
        def stage(self, source):
            raise {"disk": MemoryError("no room"), "shm": WeightUpdateError("torn")}[source.meta.type]

    ours, theirs = multiprocessing.Pipe()
    worker = object.__new__(RankWorker)
    worker.core, worker.updates = Core(), theirs
    thread = threading.Thread(target=worker._stage_updates)
    thread.start()
    for way, words in [("disk", "MemoryError"), ("shm", "torn")] * 2:
        ours.send_bytes(json.dumps({"source": {"type": way, "path": "x"}}).encode())
        assert ours.poll(10) and words in json.loads(ours.recv_bytes())
    ours.close()
    thread.join(10)
    assert not thread.is_alive()


def test_rank_stages_an_update_after_the_previous_one_is_loaded():
    """Otherwise an adapter would be merged with old weights, and the staged update would be overwritten."""
    seen = []
    worker = object.__new__(RankWorker)
    worker.core = SimpleNamespace(
        stage=lambda source: seen.append(worker.num_loads) or Staged([]), swap=lambda staged, *_: seen.append(staged)
    )
    worker.num_loads, worker.loaded = 0, threading.Condition()
    source = WeightSource.published(WeightUpdateMeta("disk", "one")).to_json()
    assert worker._stage(source) is None
    first = worker.staged
    thread = threading.Thread(target=worker._stage, args=(source, 1))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and worker.staged is first and seen == [0]
    worker.swap(None, True, "")
    thread.join(10)
    assert not thread.is_alive() and seen == [0, first, 1] and worker.staged is not first


def test_memory_is_released_on_every_rank(pair, model):
    two, _ = pair
    future = submit_and_see_start(two, [9, 8, 7], temperature=0.0, max_new_tokens=100, ignore_eos=True)
    two.release_memory().result(60)
    with pytest.raises(WeightUpdateError, match="released"):
        two.update(WeightSource.received({}, 9))
    two.resume_memory().result(60)
    assert_greedy(model, [9, 8, 7], future.result(60)[0].token_ids, 100, None)


def test_another_family_and_death_of_a_rank(folders):
    config = ServerConfig(model_path=str(folders["qwen3"]), tensor_parallel=2, **SETTINGS)
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32)
    engine = Engine(config).start()
    try:
        output = run(engine, [3, 1, 4], temperature=0.0, max_new_tokens=20, ignore_eos=True)[0]
        assert output.token_ids == generate(model, [3, 1, 4], 20, None)
        # The death of a rank fails all pending and later requests.
        future = submit_and_see_start(engine, [1, 2], max_new_tokens=200, ignore_eos=True)
        os.kill(engine.ranks.processes[0].pid, signal.SIGKILL)
        with pytest.raises(ServerError, match="rank 1 of 2"):
            future.result(30)
        with pytest.raises(ServerError, match="rank 1 of 2"):
            submit(engine, [1])
    finally:
        engine.close()


@pytest.mark.parametrize(("size", "words"), [(3, "4 / 3 = 1.33"), (4, "key-value heads: 2 / 4")])
def test_indivisible_model_is_rejected_before_a_process_starts(size, words, folders):
    config = ServerConfig(model_path=str(folders["qwen2"]), tensor_parallel=size, **SETTINGS)
    with pytest.raises(ConfigError, match=words):
        Engine(config)


def test_layers_of_different_widths_are_rejected():
    gemma4 = pytest.importorskip("transformers.models.gemma4").Gemma4TextConfig
    config = gemma4(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ConfigError, match=r"'gemma4_text' has layers of different widths.*tensor_parallel=1"):
        check_parallel(config, 2)


@pytest.mark.slow  # starts two processes, one after the other
def test_server_ends_with_one_message_when_a_rank_dies(folders):
    with server_process(folders["qwen2"], tensor_parallel=2, max_total_tokens=2048) as server:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        assert len(server.post("generate", **body)["output_ids"]) == 4
        children = [p for p, info in process_table().items() if info.parent == server.process.pid]
        # The resource tracker of multiprocessing is a child, too, but has only one thread.
        ranks = [p for p in children if len(list(Path(f"/proc/{p}/task").iterdir())) > 1]
        assert len(ranks) == 1
        os.kill(ranks[0], signal.SIGKILL)
        assert server.process.wait(30) == 1
        messages = [line for line in server.lines if "rank 1 of 2" in line]
        assert not [line for line in server.lines if "Loading weights" in line or "leaked" in line]
        assert len(messages) == 1 and "Traceback" not in "".join(server.lines)
    assert not [p for p in ranks if p in process_table() and not process_table()[p].zombie]
