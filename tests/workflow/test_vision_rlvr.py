"""Episodes with images: trainer and engine agree, and images pass ledger, workers and ranks without copies."""

import pytest
import torch
from safetensors.torch import load as load_tensors

from arealite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, ServerConfig
from arealite.api.errors import DatasetError, RequestError, TrainingError
from arealite.core.episode import TrajectoryError, check_trajectories, to_bytes
from arealite.engine.embedded import EmbeddedEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.images.encoded import decode_image
from arealite.utils.vision import VisionProcessor
from arealite.workflow.vision_rlvr import VisionRLVRWorkflow
from tests.engine.engine_testing import SPEC, engine_config
from tests.tiny_vision import KINDS, make_vision_model, picture, placeholder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {}
    for kind in KINDS:
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        make_vision_model(folders[kind], kind)
    return folders


@pytest.fixture
def make(folders, tmp_path):
    made = []

    def build(kind: str, **config):
        server = ServerConfig(model_path=folders[kind], device="cpu", max_total_tokens=8192)
        settings = InferenceEngineConfig(batch_timeout_s=60, max_head_offpolicyness=2, **config)
        engine = EmbeddedEngine(settings, server, ledger_path=tmp_path / "run.sqlite")
        engine.initialize(train_batch_size=4)
        made.append(engine)
        return engine

    yield build
    for engine in made:
        engine.destroy()


def count_reward(completion: str, answer: str, **data) -> float:
    assert "images" not in data and "problem" in data
    return float(len(completion))


def rows(count: int):
    """Rows with one image, none, or two."""
    found = []
    for i in range(count):
        row = {"problem": f"how many? {i}", "answer": str(i)}
        if i % 3 != 1:
            row["images"] = [picture(i, (32, 16 + 8 * (i % 4)))] * (1 + (i % 3 == 2))
        found.append(row)
    return found


def make_workflow(folder: str, **settings) -> VisionRLVRWorkflow:
    gconfig = GenerationHyperparameters(n_samples=3, max_new_tokens=12)
    return VisionRLVRWorkflow(count_reward, gconfig, folder, **{"reward_inline": True, **settings})


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_the_engine_are_those_of_the_trainer(make, folders, kind):
    engine = make(kind)
    batch = engine.rollout_batch(rows(6), make_workflow(folders[kind]))
    # Answers to one prompt share its images.
    assert batch["image_index"].tolist() == [0] * 3 + [-1] * 3 + [1] * 3 + [2] * 3 + [-1] * 3 + [3] * 3
    assert len(batch["pixel_values"]) == 4
    trainer = FSDPLMEngine(engine_config(folders[kind], max_tokens_per_mb=128))
    trainer.initialize(SPEC)
    mask = batch["loss_mask"].bool()
    found = trainer.forward(batch)["logp"]
    torch.testing.assert_close(found[mask], batch["logprobs"][mask], atol=2e-4, rtol=1e-3)
    losses = [trainer.train_lm(batch)["loss"] for _ in range(3)]
    assert losses[-1] < losses[0]


def test_an_answer_that_ends_in_a_placeholder_can_be_trained_on(make, folders):
    workflow = make_workflow(folders["qwen2_vl"])
    batch = make("qwen2_vl").rollout_batch(rows(1), workflow)
    image = workflow.processor.image_token_id
    last = int(batch["attention_mask"][0].sum()) - 1
    trainer = FSDPLMEngine(engine_config(folders["qwen2_vl"], max_tokens_per_mb=256))
    trainer.initialize(SPEC)
    before = trainer.forward(batch)["logp"]
    batch["input_ids"][0, last] = image
    after = trainer.forward(batch)["logp"]
    mask = batch["loss_mask"].bool()
    mask[0, last] = False
    torch.testing.assert_close(before[mask], after[mask])
    batch["input_ids"][0, last - 1] = image
    with pytest.raises(TrainingError, match="goes on after the image placeholder"):
        trainer.forward(batch)


def test_a_bad_image_costs_its_own_episode(make, folders):
    engine = make("llava")
    good, bad = rows(3)[0], {"problem": "?", "answer": "", "images": [b"no image"]}
    batch = engine.rollout_batch(
        [good, bad, {**good, "images": ["http://host/a.png"]}], make_workflow(folders["llava"])
    )
    assert len(batch["rewards"]) == 3


def test_images_are_stored_once_per_group(make, folders):
    batch = make("qwen2_vl").rollout_batch(rows(1), make_workflow(folders["qwen2_vl"]))
    assert batch["pixel_values"].shape[0] == 1 and batch["image_index"].tolist() == [0, 0, 0]
    del batch["group_ids"]
    size = batch["pixel_values"].numel() * 4
    stored = to_bytes(batch)  # in the ledger, and on the way from worker processes
    assert size < len(stored) < 3 * size
    restored = check_trajectories(load_tensors(stored)).batch
    assert all(torch.equal(restored[key], batch[key]) for key in batch)
    with pytest.raises(TrajectoryError, match="there are 1 image sets"):
        check_trajectories({**batch, "image_index": torch.tensor([0, 1, 0])})
    with pytest.raises(TrajectoryError, match="one entry for each image set"):
        check_trajectories({**batch, "image_grid_thw": torch.zeros(2, 1, 3)})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_all_forms_become_the_same_prompt(folders, kind):
    processor, image = VisionProcessor.load(folders[kind]), picture(1)
    part = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}
    forms = [
        {"images": [image], "problem": "how many?"},
        {"images": [image], "problem": "<image>how many?"},
        {"images": [{"bytes": image, "path": None}], "messages": [{"role": "user", "content": "how many?"}]},
        {"images": [decode_image(image)], "messages": [part]},
        {"image": image, "question": "how many?"},
        {"images": None, "image": image, "question": "how many?"},
        {"images": [], "image": [image], "question": "how many?"},
        {"image": image, "prompt": f"<user>{placeholder(kind)}how many?<assistant>"},
    ]
    prompts = [processor.encode_row(row) for row in forms]
    assert all(prompt.input_ids == prompts[0].input_ids for prompt in prompts)
    assert all(torch.equal(p.inputs["pixel_values"], prompts[0].inputs["pixel_values"]) for p in prompts)
    assert placeholder(kind) in processor.tokenizer.decode(prompts[0].input_ids).replace(
        processor.image_token * (prompts[0].spans[0][1] - prompts[0].spans[0][0]), processor.image_token
    )
    with pytest.raises(DatasetError, match="expected `messages`"):
        processor.encode_row({"images": [image]})
    with pytest.raises(RequestError, match="2 image placeholders"):
        processor.encode_row({"images": [image], "problem": "<image> and <image>"})
