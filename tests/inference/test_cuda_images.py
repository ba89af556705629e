"""Images on the CUDA runner: tokens and log-probs are those of transformers, also behind images and in later turns.

Where there is no GPU but Triton is installed, its interpreter runs the same kernels.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from arealite.api.cli_args import ServerConfig
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference import core
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weights import WeightSource
from tests.inference.test_engine_vision import ask, prompt, reference
from tests.tiny_vision import KINDS, make_vision_model, picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
COUNT = 12 if GPU else 3


@pytest.fixture
def make(tmp_path, monkeypatch):
    cuda_runner = pytest.importorskip("arealite.inference.cuda.runner")
    monkeypatch.setattr(core, "make_runner", cuda_runner.CudaRunner)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    engines = []

    def make_engine(kind: str, **settings) -> Engine:
        make_vision_model(tmp_path, kind)
        common = dict(dtype="float32", max_total_tokens=1024, block_size=4, max_running_requests=8)
        config = ServerConfig(
            model_path=str(tmp_path),
            device="cuda" if GPU else "cpu",
            **common,
            **({"max_prefill_tokens": 64} | settings),
        )
        engines.append(Engine(config).start())
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


def check(engine: Engine, kind: str, text: str, seeds: list[int]) -> None:
    images = [picture(seed, (32 + 8 * seed, 24)) for seed in seeds]
    (output,) = ask(engine, kind, text, images, max_new_tokens=COUNT)
    ids, logprobs = reference(engine.config.model_path, engine, kind, text, images, COUNT)
    assert output.token_ids == ids
    torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize("max_prefill_tokens", [64, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(make, kind, max_prefill_tokens):
    engine = make(kind, max_prefill_tokens=max_prefill_tokens)
    for text, seeds in (("ab#c#d", [0, 1]), ("text only", []))[: 2 if GPU else 1]:
        check(engine, kind, text, seeds)


@pytest.mark.parametrize("kind", KINDS if GPU else KINDS[:1])
def test_text_behind_a_cached_image_and_a_mixed_batch(make, kind):
    engine = make(kind)
    check(engine, kind, "abcd#ef", [2])
    # The image is in the prefix cache: what comes behind it is computed by the graph of text.
    check(engine, kind, "abcd#ef and another turn of text", [2])
    assert engine.stats()["cached_tokens"] > 0
    cases = [("abcd#ef", [3]), ("abcdefgh", []), ("c#d#e", [4, 5]), ("abcd#ef and text", [3])]
    params = SamplingParams(n=2, max_new_tokens=COUNT, sampling_seed=7, ignore_eos=True)
    engine.pause("in_place").result(10)
    futures = []
    for text, seeds in cases:
        ids, images = prompt(engine, kind, text, [picture(seed) for seed in seeds])
        futures.append(engine.submit(Request(ids, params, images=images)))
    engine.resume().result(10)
    together = [[output.token_ids for output in future.result(300)] for future in futures]
    for (text, seeds), found in zip(cases, together, strict=True):
        images = [picture(seed) for seed in seeds]
        alone = ask(
            engine, kind, text, images, n=2, max_new_tokens=COUNT, sampling_seed=7, ignore_eos=True, temperature=1.0
        )
        assert [output.token_ids for output in alone] == found


def test_new_weights_reach_the_vision_tower(make, tmp_path_factory):
    engine, other = make("qwen2_vl"), str(tmp_path_factory.mktemp("other"))
    image = [picture(0)]
    ask(engine, "qwen2_vl", "a#b", image, max_new_tokens=COUNT)
    make_vision_model(other, "qwen2_vl", seed=1)
    engine.update(WeightSource.published(WeightUpdateMeta("disk", other, 3))).result(60)
    (output,) = ask(engine, "qwen2_vl", "a#b", image, max_new_tokens=COUNT)
    ids, logprobs = reference(other, engine, "qwen2_vl", "a#b", image, COUNT)
    assert output.token_ids == ids
    torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=5e-4, rtol=1e-3)
