"""Images in later turns: environments and black-box agents show them, trainer and engine agree on every token."""

import openai
import pytest
import torch

from arealite.agents.session import Session
from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, ServerConfig
from arealite.api.errors import RequestError
from arealite.api.io_struct import ModelResponse
from arealite.api.rollout_api import Environment
from arealite.api.trajectory import Trajectory
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.images.encoded import to_data_url
from arealite.utils.vision import VisionProcessor
from arealite.workflow.agentic import AgenticWorkflow
from arealite.workflow.openai import AgentWorkflow
from tests.engine.engine_testing import SPEC, engine_config
from tests.tiny_vision import make_vision_model, picture

# Greedy: a sampled token might be the placeholder of images, which ends a conversation.
GCONFIG = GenerationHyperparameters(n_samples=2, max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module", params=("qwen2_vl", "llava"))
def folder(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp(request.param))
    make_vision_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    server = ServerConfig(model_path=folder, device="cpu", max_total_tokens=8192)
    made = EmbeddedEngine(InferenceEngineConfig(batch_timeout_s=60, max_head_offpolicyness=2), server)
    made.initialize(train_batch_size=4)
    yield made
    made.destroy()


def shown(seed: int, size=(32, 32)) -> dict:
    """A message of the user with a picture between two texts."""
    image = {"type": "image", "image": picture(seed, size)}
    return {"role": "user", "content": [{"type": "text", "text": "see "}, image, {"type": "text", "text": " what?"}]}


class Gallery(Environment):
    """Shows a picture, and another one after each answer."""

    async def reset(self, *, seed=None, options=None):
        self.number, self.left = options["number"], options["turns"]
        return shown(self.number), {}

    async def step(self, action):
        self.left -= 1
        return shown(self.number + 10 * self.left, (16, 32)), 1.0, self.left == 0, False, {}


async def gallery_agent(row, base_url, api_key):
    """Ask about a picture, then about another one."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=60) as api:
        messages = []
        for turn in range(2):
            url = to_data_url(picture(row["number"] + 10 * turn, (32, 16 + 16 * turn)))
            parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
            messages.append({"role": "user", "content": parts})
            answer = await api.chat.completions.create(model="policy", messages=messages)
            messages.append(answer.choices[0].message.model_dump())
    return 1.0


def check_log_probs(folder: str, batch) -> None:
    """Compare the trainer's log-probs with those of the engine, and train."""
    trainer = FSDPLMEngine(engine_config(folder, max_tokens_per_mb=512))
    trainer.initialize(SPEC)
    mask = batch["loss_mask"].bool()
    found = trainer.forward(batch)["logp"]
    torch.testing.assert_close(found[mask], batch["logprobs"][mask], atol=2e-4, rtol=1e-3)
    losses = [trainer.train_lm(batch)["loss"] for _ in range(3)]
    assert losses[-1] < losses[0]


def test_an_environment_shows_images_in_later_turns(folder, engine):
    workflow = AgenticWorkflow(Gallery, GCONFIG, None, max_turns=4, processor=folder)
    batch = engine.rollout_batch([{"number": 1, "turns": 1}, {"number": 2, "turns": 3}], workflow)
    image = workflow.processor.image_token_id
    runs = [(row[1:] == image) & (row[:-1] != image) for row in batch["input_ids"]]
    # The picture behind the last answer is left out.
    assert [int(run.sum()) for run in runs] == [1, 1, 3, 3]
    assert batch["image_index"].tolist() == [0, 0, 1, 1]
    assert batch["rewards"].tolist() == [1, 1, 3, 3]
    check_log_probs(folder, batch)


def test_a_black_box_agent_sends_images_in_later_turns(folder, engine):
    workflow = AgentWorkflow(gallery_agent, GCONFIG, None, timeout_s=60, processor=folder)
    batch = engine.rollout_batch([{"number": 1}, {"number": 2}], workflow)
    assert batch["image_index"].tolist() == [0, 0, 1, 1]
    assert batch["loss_mask"].sum(1).min() > 2 and batch["stats/drift_calls"].sum() == 0
    check_log_probs(folder, batch)


def answer_to(ids: list[int], tokens: list[int]) -> ModelResponse:
    return ModelResponse(ids, tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")


def test_equal_text_with_another_image_is_another_branch(folder):
    processor = VisionProcessor.load(folder)
    session = Session(processor.tokenizer, processor=processor)

    def question_with(seed: int):
        url = to_data_url(picture(seed))
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    def ask(seed: int, session: Session = session):
        question = question_with(seed)
        # An answer in another form, so that tokens are compared.
        return session.open_chat([question, {"role": "assistant", "content": "b", "name": "x"}, question])

    first = session.open_chat([question_with(1)])
    rendered = ask(1, Session(processor.tokenizer, processor=processor)).ids
    sampled = rendered[len(first.ids) :][:1]
    assert rendered[: len(first.ids)] == first.ids
    reply = session.add(first, answer_to(first.ids, sampled), "a", [{"role": "assistant", "content": "b"}])
    assert reply.images == first.images and len(first.images) == 1
    same, other = ask(1), ask(2)
    assert same.ids == other.ids
    assert same.parent is reply and other.parent is None
    assert [image.data for image in other.images] == [picture(2)] * 2


def test_errors_name_the_reason(folder):
    processor = VisionProcessor.load(folder)
    with pytest.raises(RequestError, match="need a processor"):
        Trajectory(processor.tokenizer).observe(shown(1))
    with pytest.raises(RequestError, match="this session: its workflow has no processor"):
        part = {"type": "image_url", "image_url": {"url": to_data_url(picture(1))}}
        Session(processor.tokenizer).open_chat([{"role": "user", "content": [part]}])
    with pytest.raises(RequestError, match="text must not contain it"):
        Trajectory(processor=processor).observe({"role": "user", "content": processor.image_token})
    for url in ("file:///etc/passwd", "/etc/passwd", "http://host/a.png"):
        with pytest.raises(RequestError, match="not supported: use data:image"):
            part = {"type": "image_url", "image_url": {"url": url}}
            Session(processor.tokenizer, processor=processor).open_chat([{"role": "user", "content": [part]}])
        with pytest.raises(RequestError, match="not supported: use data:image"):
            Trajectory(processor=processor).observe({"role": "user", "content": [{"type": "image", "image": url}]})
    row = Trajectory(processor=processor).observe(shown(1))
    request = row.request(GCONFIG)
    assert set(processor.placeholder_ids) <= set(request.gconfig.stop_token_ids)
    row.add(answer_to(list(row.ids), [5, processor.image_token_id]))
    with pytest.raises(RequestError, match="sampled the image placeholder"):
        row.request(GCONFIG)
