"""The processor expands placeholders as Hugging Face's does, and batches share image sets."""

import pickle

import pytest
import torch
from transformers import InternVLProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from arealite.api.errors import ConfigError, RequestError
from arealite.utils.data import concat_padded, select_rows, split_groups
from arealite.utils.images.encoded import decode_image
from arealite.utils.vision import VisionProcessor
from tests.tiny_model import make_model, make_tokenizer
from tests.tiny_vision import KINDS, make_vision_model, picture, placeholder


@pytest.fixture(scope="module")
def processors(tmp_path_factory):
    loaded = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        make_vision_model(folder, kind)
        loaded[kind] = VisionProcessor.load(str(folder))
    return loaded


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_pixels_are_those_of_the_processor(processors, kind):
    processor = processors[kind]
    text = f"ab{placeholder(kind)}c{placeholder(kind)}{placeholder(kind)}d"
    images = [picture(0), picture(1, (48, 24)), picture(2, (200, 30), "JPEG")]
    own = processor.encode(text, images)
    outputs = processor.processor(text=[text], images=[decode_image(i) for i in images], return_tensors="pt")
    assert outputs["input_ids"][0].tolist() == own.input_ids
    assert all(torch.equal(outputs[key], value) for key, value in own.inputs.items())
    token = processor.image_token_id
    assert [own.input_ids[a:b] for a, b in own.spans] == [[token] * (b - a) for a, b in own.spans]
    assert sum(b - a for a, b in own.spans) == own.input_ids.count(token)
    assert processor.match(own.input_ids, images).spans == own.spans


@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_travels_to_other_processes(processors, kind):
    again = pickle.loads(pickle.dumps(processors[kind]))
    text = f"{placeholder(kind)}a"
    assert again.encode(text, [picture(0)]).input_ids == processors[kind].encode(text, [picture(0)]).input_ids


def test_bad_prompts_and_images_are_refused(processors, tmp_path):
    processor = processors["qwen2_vl"]
    with pytest.raises(RequestError, match=r"2 image placeholders .* for 1 images"):
        processor.encode(placeholder("qwen2_vl") * 2, [picture(0)])
    with pytest.raises(RequestError, match="65 images in one request"):
        processor.encode(placeholder("qwen2_vl") * 65, [picture(0)] * 65)
    with pytest.raises(RequestError, match="aspect ratio"):
        processor.encode(placeholder("qwen2_vl"), [picture(0, (900, 4))])
    make_model(tmp_path)
    with pytest.raises(ConfigError, match="cannot load the image processor"):
        VisionProcessor.load(str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_marks_in_messages_are_the_places_of_images(processors, kind):
    processor, images, at = processors[kind], [picture(0), picture(1, (48, 24))], placeholder(kind)

    def ids(*messages):
        row = {"images": images, "messages": [{"role": role, "content": content} for role, content in messages]}
        return processor.encode_row(row).input_ids

    def expected(text):
        return processor.encode(text.replace("#", at), images).input_ids

    assert ids(("user", "a<image>b<image>c")) == expected("<user>a#b#c<assistant>")
    turns = [("user", "<image>a"), ("assistant", "b"), ("user", "c<image>")]
    assert ids(*turns) == expected("<user>#a<assistant>b<user>c#<assistant>")
    # Without marks they come first, also if content is a list of texts.
    in_parts = [("system", [{"type": "text", "text": "s"}]), ("user", [{"type": "text", "text": "a"}])]
    assert ids(*in_parts) == expected("<system>s<user>##a<assistant>")
    placed = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]
    assert ids(("user", placed)) == expected("<user>a#b#<assistant>")
    with pytest.raises(RequestError, match=r"1 image placeholders .* for 0 images"):
        processor.encode_row({"messages": [{"role": "user", "content": "<image>a"}]})


def test_processors_that_write_more_than_placeholders_are_refused():
    """InternVL cuts images into tiles and writes <img> and </img> around them, which would be missing."""
    tokenizer = make_tokenizer()
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<c>",
        "video_token": "<v>",
    }
    tokenizer.add_special_tokens({"additional_special_tokens": list(names.values())})
    for name, token in names.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, name + "_id", tokenizer.convert_tokens_to_ids(token))
    image_only = type("InternVL", (InternVLProcessor,), {"check_argument_for_proper_class": lambda *_: None})
    images = GotOcr2ImageProcessorPil(size={"height": 8, "width": 8})
    processor = VisionProcessor(image_only(images, tokenizer, None, image_seq_length=4), "folder")
    for size, message in (((8, 8), "1 tile.* 6 tokens of which 4 are <c>"), ((40, 24), "7 tile")):
        with pytest.raises(ConfigError, match=message):
            processor.encode("a<c>b", [picture(0, size)])


def rows(length: int, count: int, **images):
    ids = torch.arange(count * length).view(count, length)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "group_ids": ids[:, 0], **images}


def test_rows_share_image_sets_through_join_split_and_select():
    one = {"pixel_values": torch.full((1, 4, 2), 1.0), "image_index": torch.tensor([0, 0])}
    one["image_grid_thw"] = torch.tensor([[[1, 2, 2]]])
    two = {"pixel_values": torch.full((2, 6, 2), 2.0), "image_index": torch.tensor([1, -1, 0])}
    two["image_grid_thw"] = torch.tensor([[[1, 2, 3], [0, 0, 0]], [[1, 1, 1], [1, 1, 1]]])
    two["pixel_values"][1] = 3.0
    batch = concat_padded([rows(3, 2, **one), rows(5, 2), rows(4, 3, **two)])
    assert batch["image_index"].tolist() == [0, 0, -1, -1, 2, -1, 1]
    assert batch["pixel_values"].shape == (3, 6, 2) and batch["image_grid_thw"].shape == (3, 2, 3)
    assert batch["pixel_values"][0, 4:].eq(0).all()
    part = select_rows(batch, [6, 2, 1, 0])
    assert part["image_index"].tolist() == [1, -1, 0, 0]
    assert part["pixel_values"][:, 0, 0].tolist() == [1.0, 2.0]
    text = select_rows(batch, [2, 5])
    assert text["image_index"].tolist() == [-1, -1] and len(text["pixel_values"]) == 0
    again = concat_padded([text, part])
    assert again["image_index"].tolist() == [-1, -1, 1, -1, 0, 0]
    batch["group_ids"] = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    for share in split_groups(batch, 3):
        assert len(share["pixel_values"]) == len(share["image_index"][share["image_index"] >= 0].unique())
