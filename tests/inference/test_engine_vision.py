"""Images in the embedded engine: tokens and log-probs are those of transformers, prefixes are not mixed up."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError, RequestError
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SampleOutput, SamplingParams
from arealite.inference.vision import check_served
from arealite.inference.weights import WeightSource
from tests.tiny_vision import KINDS, make_vision_model, picture, placeholder

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for kind in KINDS:
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        make_vision_model(folders[kind], kind)
    return folders


@pytest.fixture
def make(folders):
    engines = []

    def make_engine(kind: str, **settings) -> Engine:
        config = ServerConfig(model_path=folders[kind], device="cpu", max_running_requests=16, **settings)
        engines.append(Engine(config).start())
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.close()


def prompt(engine: Engine, kind: str, text: str, images: list[bytes]):
    """Token ids and images of a text in which # stands for an image."""
    return engine.read_prompt(text.replace("#", placeholder(kind)), images).result(30)


def ask(engine: Engine, kind: str, text: str, images: list[bytes], **params) -> list[SampleOutput]:
    ids, found = prompt(engine, kind, text, images)
    request = Request(ids, SamplingParams(**{"max_new_tokens": 12, **GREEDY, **params}), images=found)
    return engine.submit(request).result(60)


def reference(folder: str, engine: Engine, kind: str, text: str, images: list[bytes], count: int = 12):
    """Tokens and log-probs that transformers generates greedily; those of one prompt once for all settings."""
    key = folder, text, *images
    if key not in _references:
        _references[key] = _generate(folder, engine, kind, text, images, count)
    return _references[key]


_references: dict[tuple, tuple[list[int], torch.Tensor]] = {}


def _generate(folder: str, engine: Engine, kind: str, text: str, images: list[bytes], count: int):
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    encoded = engine.processor.encode(text.replace("#", placeholder(kind)), images)
    inputs = {"input_ids": torch.tensor([encoded.input_ids]), **encoded.inputs}
    if "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == engine.processor.image_token_id).int()
    out = model.generate(
        **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, output_logits=True,
        return_dict_in_generate=True, eos_token_id=None,
    )  # fmt: skip
    ids = out.sequences[0, -count:]
    logits = torch.stack([step[0] for step in out.logits])
    return ids.tolist(), logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]


CASES = [("ab#c#d", [0, 1]), ("#how many", [2]), ("text only", [])]


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"max_prefill_tokens": 7, "block_size": 4}])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(make, folders, kind, settings):
    engine = make(kind, **settings)
    for text, seeds in CASES:
        images = [picture(seed, (32 + 8 * seed, 24)) for seed in seeds]
        (output,) = ask(engine, kind, text, images)
        ids, logprobs = reference(folders[kind], engine, kind, text, images)
        assert output.token_ids == ids
        torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_with_other_images_share_no_blocks(make, kind):
    engine = make(kind, block_size=4)
    first = ask(engine, kind, "abcdefgh#ij", [picture(0)])[0]
    again = ask(engine, kind, "abcdefgh#ij", [picture(0)])[0]
    other = ask(engine, kind, "abcdefgh#ij", [picture(1)])[0]
    assert again.cached_tokens > 16 and again.token_ids == first.token_ids
    assert 0 < other.cached_tokens <= 12  # the text before the image, and what begins the image in other families
    torch.testing.assert_close(torch.tensor(again.logprobs), torch.tensor(first.logprobs), atol=1e-4, rtol=1e-4)
    fresh = make(kind, block_size=4)
    alone = ask(fresh, kind, "abcdefgh#ij", [picture(1)])[0]
    assert alone.token_ids == other.token_ids
    assert other.logprobs[0] != first.logprobs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_and_a_mixed_batch_give_what_single_requests_give(make, kind):
    engine = make(kind, max_total_tokens=512, block_size=4)
    cases = [("#a", [3]), ("b", []), ("c#d#e", [4, 5]), ("#f", [3])]
    requests = []
    for text, seeds in cases:
        ids, images = prompt(engine, kind, text, [picture(seed) for seed in seeds])
        params = SamplingParams(n=3, max_new_tokens=20, sampling_seed=7, ignore_eos=True)
        requests.append(Request(ids, params, images=images))
    futures = [engine.submit(request) for request in requests]
    together = [[output.token_ids for output in future.result(120)] for future in futures]
    for (text, seeds), found in zip(cases, together, strict=True):
        images = [picture(seed) for seed in seeds]
        alone = ask(engine, kind, text, images, n=3, max_new_tokens=20, sampling_seed=7, temperature=1.0)
        assert [output.token_ids for output in alone] == found


def test_new_weights_of_the_vision_tower_change_the_embeddings_of_requests_in_flight(make, folders, tmp_path):
    engine = make("qwen2_vl")
    before = ask(engine, "qwen2_vl", "#a", [picture(0)])[0]
    ids, images = prompt(engine, "qwen2_vl", "#a", [picture(0)])
    engine.submit(Request(ids, SamplingParams(max_new_tokens=1), images=images)).result(30)
    new = {name: value.clone() for name, value in engine.weights.model.named_parameters()}
    for name in new:
        if "visual" in name:
            new[name] *= -1
    engine.update(WeightSource.received(new, 1)).result(60)
    params = SamplingParams(**GREEDY, max_new_tokens=12)
    reused = engine.submit(Request(ids, params, images=images)).result(30)[0]
    fresh = ask(engine, "qwen2_vl", "#a", [picture(0)])[0]
    assert reused.logprobs == fresh.logprobs != before.logprobs


def test_wrong_placeholders_and_images_are_refused(make):
    engine = make("qwen2_vl")
    ids = engine.processor.encode(f"a{placeholder('qwen2_vl')}", [picture(0)]).input_ids
    with pytest.raises(RequestError, match="16 image placeholder tokens, but its 2 images have 32 features"):
        engine.read_prompt(ids, [picture(0), picture(1)]).result(30)
    with pytest.raises(RequestError, match="no images: send them too"):
        engine.submit(Request(ids, SamplingParams()))
    with pytest.raises(RequestError, match="0 image placeholders"):
        engine.processor.encode("no placeholder", [picture(0)])
    assert engine.read_prompt([3, 4], []).result(30) == ([3, 4], None)


def test_models_that_cannot_be_served_are_refused(folders):
    config = ServerConfig(model_path=folders["llava"], device="cpu", tensor_parallel=2)
    with pytest.raises(ConfigError, match="one device only"):
        Engine(config)
    same = ServerConfig(model_path=folders["llava"], deterministic=True)
    with pytest.raises(ConfigError, match="deterministic=true cannot be used with a vision-language model on cuda"):
        check_served(AutoModelForImageTextToText.from_pretrained(folders["llava"]).config, same, torch.device("cuda"))
