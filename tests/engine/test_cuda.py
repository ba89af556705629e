"""The engine on CUDA: variable-length attention, mixed precision, offloading, compiled layers."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.engine.fsdp import varlen
from arealite.engine.fsdp.shared_prefix import Segment, SegmentPlan
from arealite.engine.sft.lm_engine import FSDPLMEngine
from tests.engine.engine_testing import SPEC, make_model, random_batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [3, 17, 9, 9, 30, 5, 12, 2]


def cuda_engine(path, **kwargs):
    settings = {"dtype": "bfloat16", "param_dtype": "bfloat16", "max_tokens_per_mb": 40, **kwargs}
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps_proportion=0.0)
    engine = FSDPLMEngine(TrainEngineConfig(path=path, device="cuda", optimizer=optimizer, **settings))
    engine.initialize(SPEC)
    return engine


def reference_logp(path, batch):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logp = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logp, (1, 0))


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_window", "llama"])
def test_packed_logprobs_equal_padded_logprobs(tmp_path, kind):
    path, batch = make_model(tmp_path, kind), random_batch(LENGTHS)
    mask = batch["loss_mask"].bool()
    found = cuda_engine(path).forward(batch)["logp"]
    torch.testing.assert_close(found[mask], reference_logp(path, batch)[mask], atol=0.05, rtol=0.02)


@pytest.mark.parametrize("compiled", [False, True])
def test_float32_is_exact(tmp_path, compiled):
    path, batch = make_model(tmp_path, "qwen2"), random_batch(LENGTHS)
    engine = cuda_engine(path, dtype="float32", param_dtype="float32", compile=compiled)
    mask = batch["loss_mask"].bool()
    torch.testing.assert_close(
        engine.forward(batch)["logp"][mask], reference_logp(path, batch)[mask], atol=1e-4, rtol=0
    )
    losses = [engine.train_lm(batch)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"compile": True}, {"param_dtype": "float32"}, {"param_dtype": "float32", "cpu_offload": True},
        {"gradient_checkpointing": True},
    ],
    ids=["bf16", "compile", "mixed", "offload", "checkpointing"],
)  # fmt: skip
def test_training_lowers_the_loss_in_every_mode(tmp_path, settings):
    engine = cuda_engine(make_model(tmp_path, "qwen2"), **settings)
    batch = random_batch(LENGTHS)
    losses = [engine.train_lm(batch)["loss"] for _ in range(10)]
    assert losses[0] == pytest.approx(4.20, abs=0.03)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("compiled", [False, True])
def test_long_sequences_alone_have_the_results_of_the_variable_length_kernel(monkeypatch, compiled):
    """Two answers to one prompt and a row of its own, by cuDNN and by FlashAttention."""
    segments = [Segment(0, 300, 0), Segment(300, 3000, 300), Segment(3300, 4100, 300), Segment(7400, 2600, 0)]
    paths = [range(300), [*range(300), *range(300, 3300)], [*range(300), *range(3300, 7400)], range(7400, 10_000)]
    plan = SegmentPlan(segments, torch.tensor(list(itertools.chain(*paths))))
    torch.manual_seed(0)
    heads = [torch.randn(10_000, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (12, 2, 2)]
    grad = torch.randn(10_000, 12, 128, device="cuda", dtype=torch.bfloat16)
    results = []
    for time_of_pair in (-1.0, 1.0):
        monkeypatch.setattr(varlen, "_TIME_OF_PAIR", time_of_pair)
        kernel = varlen.Varlen.of_segments(plan, torch.device("cuda"), compiled)
        assert bool(kernel.alone.any()) == (time_of_pair < 0) and varlen.has_fast_rows(*heads)
        attend = torch.compile(kernel.attend, dynamic=True) if compiled else kernel.attend
        out = attend(*heads, None, None)
        results.append([out, *torch.autograd.grad(out, heads, grad)])
    for found, expected in zip(*results, strict=True):
        assert float((found - expected).float().norm() / expected.float().norm()) < 0.01


def test_a_step_returns_before_the_optimizer_is_done(tmp_path):
    """So that publishing the weights can begin while the optimizer still runs."""
    engine = cuda_engine(make_model(tmp_path, "qwen2"))
    batch = random_batch(LENGTHS)
    engine.train_lm(batch)
    step = engine.optimizer.step
    # Sleeps about a second.
    engine.optimizer.step = lambda: (torch.cuda._sleep(2_000_000_000), step())
    engine.train_lm(batch)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
