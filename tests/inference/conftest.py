"""Tiny random models of the supported families, engines that are closed after the test, and references."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from arealite.api.cli_args import ServerConfig
from arealite.core.event_loop import new_event_loop
from arealite.inference import core
from arealite.inference.engine import Engine
from arealite.inference.http.server import serve
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from arealite.utils.http.server import bind

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    # Layers take most of the time on CPU. With two, families that alternate have one layer of each kind.
    "num_hidden_layers": 3 if torch.cuda.is_available() else 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 96,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # random weights large enough for distributions that differ
}
# SmolLM2 is Llama with three KV heads of nine and tied embeddings.
SMOL = SMALL | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}
EAGER = SMALL | {"attn_implementation": "eager"}  # the only one with soft-capping and sinks
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "smollm2": lambda: LlamaForCausalLM(LlamaConfig(**SMOL, tie_word_embeddings=True)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=11)),
    "qwen2-window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    ),
    "gemma2-softcap": lambda: Gemma2ForCausalLM(
        Gemma2Config(**EAGER, head_dim=16, sliding_window=9, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    ),
    "gpt-oss-sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**EAGER, head_dim=16, sliding_window=9, num_local_experts=4, num_experts_per_tok=2)
    ),
}


def make_model(family: str = "qwen2", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return FAMILIES[family]().eval()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Make engines with a copy of a model, so that the model keeps its own attention function."""
    engines: list[Engine] = []

    def make(model: PreTrainedModel, tokenizer=None, **settings) -> Engine:
        settings = {"max_total_tokens": 4096, "block_size": 4, "device": "cpu"} | settings
        engine = Engine(ServerConfig(**settings), model=copy.deepcopy(model), tokenizer=tokenizer)
        engines.append(engine)
        return engine.start()

    yield make
    for engine in engines:
        engine.close()


@contextmanager
def served(engine: Engine, **settings) -> Iterator[str]:
    """Serve the engine over HTTP on a thread; yields `host:port`. Closes the engine at the end."""
    config = ServerConfig(**settings)
    sock = bind(config.host, config.port)
    sock.listen()  # so that connections wait for the thread
    loop = new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(engine, config, sock, stop)))
    thread.start()
    try:
        yield f"127.0.0.1:{sock.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        assert not thread.is_alive()
        loop.close()


def run(engine: Engine, prompt: list[int], **params) -> list[SampleOutput]:
    """Generate and wait."""
    return submit(engine, prompt, **params).result(100)


def submit(engine: Engine, prompt: list[int], rid: str | None = None, **params):
    return engine.submit(Request(prompt, SamplingParams(**params), rid))


def submit_and_see_start(engine: Engine, prompt: list[int], rid: str | None = None, **params):
    """Submit a request and wait for its first token."""
    seen = threading.Event()
    request = Request(prompt, SamplingParams(**params), rid, on_progress=lambda *event: seen.set())
    future = engine.submit(request)
    assert seen.wait(30)
    return future


def forward_logprobs(
    model: PreTrainedModel, prompt: list[int], output: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of `output` after `prompt` by one ordinary forward pass."""
    ids = torch.tensor([prompt + output])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    table = (logits / temperature).log_softmax(-1)
    return table.gather(1, torch.tensor(output)[:, None])[:, 0]


def generate(model: PreTrainedModel, prompt: list[int], count: int, eos: int | None) -> list[int]:
    """Return the tokens of greedy generation by Hugging Face."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=eos,
    )
    return out[0, len(prompt) :].tolist()


def assert_greedy(model: PreTrainedModel, prompt: list[int], output: list[int], count: int, eos: int | None) -> None:
    """Check by one forward pass that `output` is what `generate` returns: each token is the most likely one."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == output
    assert eos not in output[:-1] and (len(output) == count or output[-1] == eos)


def prompts(count: int, low: int = 1, high: int = 40, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(0, 96, (n,), generator=generator).tolist() for n in sizes]


def check_top_logprobs(engine: Engine, model: PreTrainedModel) -> None:
    """Compare top log-probs with a forward pass; forbidden stop tokens count, but are not among them."""
    prompt, eos = [5, 6, 7], SMALL["eos_token_id"]
    params = {"max_new_tokens": 6, "min_new_tokens": 6, "temperature": 1.3, "logit_bias": {9: 2.0}, "sampling_seed": 3}
    requests = [
        Request(prompt, SamplingParams(**params), num_top_logprobs=count, want_raw_logprobs=True)
        for count in (4, 0, 20)
    ]
    outputs = [engine.submit(request) for request in requests]
    tokens = None
    for future, request in zip(outputs, requests, strict=True):
        (output,) = future.result(100)
        count, tokens = request.num_top_logprobs, tokens or output.token_ids
        assert output.token_ids == tokens
        if not count:
            assert output.top_logprobs is None
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        logits[:, 9] += 2.0
        table = (logits / 1.3).log_softmax(-1)
        table[:, eos] = -torch.inf
        expected = table.topk(count)
        assert output.top_logprobs is not None
        assert [[token for token, _ in top] for top in output.top_logprobs] == expected.indices.tolist()
        found = torch.tensor([[value for _, value in top] for top in output.top_logprobs])
        torch.testing.assert_close(found, expected.values, atol=2e-4, rtol=1e-4)


@contextmanager
def cuda_engines(monkeypatch: pytest.MonkeyPatch, **defaults: object) -> Iterator[Callable[..., Engine]]:
    """Make engines with the CUDA runner, which Triton's interpreter runs without a GPU; close them at the end."""
    # Imported here: it loads Triton, which must know before that it interprets.
    runner = pytest.importorskip("arealite.inference.cuda.runner")
    monkeypatch.setattr(core, "make_runner", runner.CudaRunner)
    engines: list[Engine] = []

    def make(model: PreTrainedModel, **settings: object) -> Engine:
        copied = copy.deepcopy(model).to("cuda" if torch.cuda.is_available() else "cpu")
        engines.append(Engine(ServerConfig(**(defaults | settings)), model=copied))  # pyright: ignore[reportArgumentType]
        return engines[-1].start()

    yield make
    for engine in engines:
        engine.close()
