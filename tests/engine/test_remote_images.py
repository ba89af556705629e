"""Images over the clients: a real embedded server with workers, and what SGLang and vLLM are sent."""

import asyncio

import pytest
import torch

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, ServerConfig
from arealite.api.errors import RequestError
from arealite.api.io_struct import ModelRequest
from arealite.engine.remote.progress import Progress
from arealite.engine.remote.server import Server, ServerInfo
from arealite.engine.sglang_remote import RemoteSGLangEngine, SGLangClient
from arealite.engine.vllm_remote import VLLMClient
from arealite.inference.engine import Engine
from arealite.utils.images.encoded import to_data_url
from arealite.workflow.vision_rlvr import VisionRLVRWorkflow
from tests.inference.conftest import served
from tests.tiny_vision import make_vision_model, picture

IMAGES = [picture(0), picture(1)]
# 7 stands for the first image three times, for the second one twice.
REQUEST = ModelRequest([5, 7, 7, 7, 6, 7, 7, 8], images=IMAGES, image_spans=[(1, 4), (5, 7)])
COLLAPSED = [5, 7, 6, 7, 8]


def length_reward(completion: str, **data) -> float:
    return float(len(completion))


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_episodes_with_images_over_http(tmp_path, num_workers):
    make_vision_model(tmp_path, "qwen2_vl")
    rows = [{"images": [picture(i)] * (i % 3), "problem": f"how many {i}", "seed": i} for i in range(4)]
    gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=6)
    workflow = VisionRLVRWorkflow(length_reward, gconfig, str(tmp_path), reward_inline=True)
    server = Engine(ServerConfig(model_path=str(tmp_path), device="cpu", max_total_tokens=4096)).start()
    with served(server) as address:
        engine = RemoteSGLangEngine(InferenceEngineConfig(setup_timeout_s=60, num_workers=num_workers))
        engine.initialize([address], 4)
        try:
            batch = engine.rollout_batch(rows, workflow)
        finally:
            engine.destroy()
    assert batch["image_index"].tolist() == [-1, -1, 0, 0, 1, 1, -1, -1]
    assert batch["pixel_values"].shape[0] == 2 and torch.isfinite(batch["logprobs"]).all()


class FixedHttp:
    """Keeps what is posted and returns one answer."""

    def __init__(self, answer):
        self.answer, self.bodies = answer, []

    async def generate(self, url, body, timeout_s):
        self.bodies.append((url, body))
        return self.answer


def ask(client_class, kind, answer, request=REQUEST, num_samples=1, tokens=()):
    client = client_class(InferenceEngineConfig())
    client._http = FixedHttp(answer)
    server = Server("host:1")
    server.update_info(ServerInfo(kind, 0, frozenset()))
    progress = Progress(request, None, tokens=list(tokens))
    pieces = asyncio.run(client.generate(server, progress, num_samples))
    return pieces, *client._http.bodies[0]


def sglang_answer(prompt_tokens):
    meta = {"output_token_logprobs": [[-0.5, 3, None]], "finish_reason": {"type": "stop"}, "weight_version": "0"}
    return {"output_ids": [3], "meta_info": {**meta, "prompt_tokens": prompt_tokens}}


def test_sglang_gets_one_placeholder_for_each_image():
    _, url, body = ask(SGLangClient, "sglang", sglang_answer(9), tokens=[4])
    assert url.endswith("/generate") and body["input_ids"] == [*COLLAPSED, 4]
    assert body["image_data"] == [to_data_url(image) for image in IMAGES]
    _, _, body = ask(SGLangClient, "sglang", [sglang_answer(8)] * 2, num_samples=2)
    assert body["image_data"] == [[to_data_url(image) for image in IMAGES]]


def test_the_embedded_server_gets_the_ids_of_the_trainer():
    _, _, body = ask(SGLangClient, "arealite", sglang_answer(8))
    assert body["input_ids"] == REQUEST.input_ids and len(body["image_data"]) == 2


def test_a_server_that_reads_another_prompt_is_refused():
    with pytest.raises(RequestError, match="as 10 tokens, but the model's processor makes 8"):
        ask(SGLangClient, "sglang", sglang_answer(10))
    with pytest.raises(RequestError, match="2 images and 0 image_spans"):
        ask(SGLangClient, "sglang", sglang_answer(8), ModelRequest([5], images=IMAGES))


def test_vllm_gets_content_parts():
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [3], "logprobs": {"content": [{"logprob": -0.5}]}}
    answer = {"choices": [choice], "prompt_token_ids": REQUEST.input_ids}
    pieces, url, body = ask(VLLMClient, "vllm", answer)
    assert url.endswith("/inference/v1/generate") and body["token_ids"] == COLLAPSED and pieces[0].tokens == [3]
    assert body["content_parts"] == [{"type": "image_url", "url": to_data_url(image)} for image in IMAGES]
    with pytest.raises(RequestError, match="as 3 tokens"):
        ask(VLLMClient, "vllm", {**answer, "prompt_token_ids": [1, 2, 3]})
    with pytest.raises(RequestError, match="which requests with images need"):
        ask(VLLMClient, "vllm by completions", answer)
