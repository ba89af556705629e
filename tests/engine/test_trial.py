"""Trial passes, with which an engine compiles: they change nothing, and cover all that is compiled later."""

import gc
from concurrent.futures import Future
from dataclasses import replace
from weakref import WeakSet

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.cli_args import InferenceEngineConfig
from arealite.engine.fsdp.micro_batches import MicroBatchCount, make_micro_batches
from arealite.engine.fsdp.sharding import compile_layers, decoder_layers
from arealite.engine.fsdp.trial import can_run_first_layers, first_layers, trial_batch
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.utils.startup import do_while_servers_start, take_meanwhile
from tests.engine.engine_testing import SPEC, VOCAB, engine_config, random_batch
from tests.tiny_model import make_model

LENGTHS = [3, 17, 9, 9, 30, 5, 12, 2]


def make_engine(path, cls=FSDPLMEngine, dtype="float32", **kwargs):
    engine = cls(replace(engine_config(path, **kwargs), dtype=dtype))
    engine.initialize(SPEC)
    return engine


@pytest.mark.parametrize(
    ("cls", "first_only", "dtype"),
    [
        (FSDPLMEngine, False, "float32"),
        (FSDPRWEngine, False, "float32"),
        (FSDPLMEngine, True, "float32"),
        (FSDPLMEngine, True, "bfloat16"),  # FSDP converts the weights
    ],
)
def test_a_trial_pass_changes_nothing(tmp_path, cls, first_only, dtype):
    """Weights, optimizer and random numbers are those of an engine that made none, and so is the next step."""
    make_model(tmp_path, num_hidden_layers=4, vocab_size=VOCAB)
    plain, tried = (make_engine(str(tmp_path), cls, dtype, max_tokens_per_mb=200) for _ in range(2))
    before, layers = torch.get_rng_state(), decoder_layers(tried.model)
    if first_only:
        tried.compile_first_layers()
        assert decoder_layers(tried.model) == layers and "memory" not in vars(tried)
    else:
        tried.run_trial(200)
    assert torch.equal(torch.get_rng_state(), before)
    assert tried.optimizer is not None and not tried.optimizer.state
    assert all(p.grad is None for p in tried.model.parameters())
    if cls is FSDPLMEngine:
        batch = random_batch(LENGTHS)
        one, other = plain.train_lm(batch), tried.train_lm(batch)
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"])
    for a, b in zip(plain.model.parameters(), tried.model.parameters(), strict=True):
        assert torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b))


class Kept:
    """A tensor that is kept for a backward pass."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def test_a_pass_without_backward_keeps_no_activations(model_dirs):
    """Compiled layers run with a graph also for log-probs: it must be gone when the next micro-batch begins."""
    engine = make_engine(model_dirs["qwen2"], max_tokens_per_mb=40)
    micro_batches = engine._micro_batches(random_batch(LENGTHS))
    assert len(micro_batches) > 1
    kept = WeakSet[Kept]()
    most = 0

    def keep(tensor: torch.Tensor) -> Kept:
        nonlocal most
        kept.add(found := Kept(tensor.detach()))  # with its graph, a result that is kept would keep itself
        most = max(most, len(kept))
        return found

    left = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda found: found.tensor):
        for outputs in engine._passes.outputs(micro_batches, engine._settings):
            assert not outputs["logp"].requires_grad
            left.append(len(kept))
    assert most > 0 and left == [0] * len(micro_batches)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "qwen2_window"])
def test_a_pass_through_the_first_layers_changes_nothing_in_other_families(model_dirs, kind):
    plain, tried = (make_engine(model_dirs[kind], max_tokens_per_mb=200) for _ in range(2))
    tried.compile_first_layers()
    batch = random_batch(LENGTHS)
    assert plain.train_lm(batch)["loss"] == tried.train_lm(batch)["loss"]
    for a, b in zip(plain.model.parameters(), tried.model.parameters(), strict=True):
        assert torch.equal(a, b)
    tried.destroy()
    tried.compile_first_layers()


def test_the_first_layers_are_of_all_kinds():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("qwen2", vocab_size=16, num_hidden_layers=6, **sizes)
    counts = []
    for types in (["full_attention"] * 6, ["full_attention"] * 3 + ["sliding_attention"] * 3):
        config.layer_types = types
        model = AutoModelForCausalLM.from_config(config)
        layers = decoder_layers(model)
        assert can_run_first_layers(model, ParallelStrategy())
        with first_layers(model) as count:
            assert decoder_layers(model) == layers[:count]
            counts.append(count)
        assert decoder_layers(model) == layers
    assert counts == [2, 4]
    assert not can_run_first_layers(model, ParallelStrategy(tensor=2))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_sizes_are_numbers_in_the_one_graph_of_all_layers(tmp_path, monkeypatch, dtype):
    """Under FSDP, here with bfloat16, torch.compile would take them for variables, and reason about their quotients."""
    make_model(tmp_path, num_hidden_layers=3, vocab_size=VOCAB)
    engine = make_engine(str(tmp_path), dtype=dtype, share_prefix=False)
    batch = random_batch([9, 9])
    loss = engine.evaluate_lm(batch)["loss"]
    graphs, compile_module = [], torch.nn.Module.compile

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kwargs: compile_module(self, backend=keep, **kwargs))
    compile_layers(engine.model, replace(engine.config, compile=True), "cpu")
    assert engine.evaluate_lm(batch)["loss"] == loss
    inputs = [node for graph in graphs for node in graph.graph.nodes if node.op == "placeholder"]
    assert len(graphs) == 1 and any("hidden_states" in node.name for node in inputs)
    sizes = [node.meta["example_value"] for node in inputs if "head_dim" in node.name]
    assert all(isinstance(size, int) or size.node.maybe_as_int() is not None for size in sizes)


class Work:
    def __init__(self):
        self.count = 0

    def do(self) -> None:
        self.count += 1


def test_work_is_done_once_while_servers_start_and_not_if_they_run():
    engine, slow, answered, work = RemoteSGLangEngine(InferenceEngineConfig()), Future(), Future(), Work()
    answered.set_result(None)
    for connecting in (slow, slow):
        if not work.count:
            do_while_servers_start(work.do)
        engine._work_meanwhile(connecting)
        assert work.count == 1
    do_while_servers_start(work.do)
    engine._work_meanwhile(answered)
    assert work.count == 1
    do_while_servers_start(Work().do)
    gc.collect()
    assert take_meanwhile() == []


@pytest.mark.parametrize("max_tokens", [8, 100, 1000, 32768])
def test_a_trial_batch_fills_one_micro_batch_with_distinct_sizes(model_dirs, max_tokens):
    engine = make_engine(model_dirs["qwen2"])
    batch = trial_batch(max_tokens, engine.model.config)
    (mb,) = make_micro_batches(batch, engine.model, max_tokens, "cpu", None, True, MicroBatchCount())
    assert max_tokens <= 8 or 0.8 * max_tokens < sum(mb.lengths) <= max_tokens
    if max_tokens > 100:
        assert mb.prefixes is not None
        sizes = [sum(mb.lengths), len(mb.prefixes.unique), len(mb.data["target_positions"]), len(mb.lengths)]
        sizes += [max(s.length for s in mb.segments), max(s.prefix_length + s.length for s in mb.segments)]
        assert len(set(sizes)) == len(sizes), sizes
