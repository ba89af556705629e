"""Images over HTTP: base64, data URLs and files of a folder. Bad ones get an answer and cost nothing else."""

import base64
import json
import urllib.error
import urllib.request

import pytest

from arealite.api.cli_args import ServerConfig
from arealite.inference.engine import Engine
from arealite.utils.images.encoded import MAX_IMAGES, to_data_url
from tests.inference.conftest import served
from tests.tiny_vision import make_vision_model, picture, placeholder

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def server(request, tmp_path_factory):
    """The kind of the model, a function that posts a body, the engine, and the folder of images."""
    folder = tmp_path_factory.mktemp(request.param)
    make_vision_model(folder, request.param)
    images = folder / "images"
    images.mkdir()
    (images / "a.png").write_bytes(picture(0))
    config = ServerConfig(model_path=str(folder), device="cpu", max_total_tokens=4096, image_folder=str(images))
    engine = Engine(config).start()
    with served(engine) as address:

        def post(path: str, body: dict, expect: int = 200):
            data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
            try:
                with urllib.request.urlopen(
                    urllib.request.Request(f"http://{address}{path}", data, headers), timeout=60
                ) as answer:
                    status, raw = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                status, raw = error.code, error.read()
            assert status == expect, raw
            return json.loads(raw)

        yield request.param, post, engine, images


def test_text_and_ids_with_images_in_every_form_give_the_same_answer(server):
    kind, post, engine, folder = server
    text, image = f"ab{placeholder(kind)}c", picture(0)
    ids = engine.processor.encode(text, [image]).input_ids
    encoded = base64.b64encode(image).decode()
    forms = [encoded, [encoded], [[encoded]], to_data_url(image), "file://a.png", f"file://{folder}/a.png"]
    bodies = [{"text": text, "image_data": form} for form in forms]
    bodies += [{"input_ids": ids, "image_data": form} for form in forms]
    answers = [post("/generate", {**body, "sampling_params": GREEDY}) for body in bodies]
    assert all(answer["output_ids"] == answers[0]["output_ids"] for answer in answers)
    assert all(answer["meta_info"]["prompt_tokens"] == len(ids) for answer in answers)
    assert answers[-1]["meta_info"]["cached_tokens"] > 0
    other = post("/generate", {"text": text, "image_data": to_data_url(picture(1)), "sampling_params": GREEDY})
    first = [entry[0] for entry in answers[0]["meta_info"]["output_token_logprobs"]]
    assert [entry[0] for entry in other["meta_info"]["output_token_logprobs"]] != first


def test_bad_images_are_refused(server):
    kind, post, _, _ = server
    text = f"{placeholder(kind)}a"
    good = to_data_url(picture(0))
    bad = {
        "never fetched": "http://127.0.0.1:1/a.png",
        "not valid base64": "§§§",
        "damaged or of another format": base64.b64encode(b"no image at all").decode(),
        "outside of the folder": "file://../config.json",
        "cannot be read": "file://none.png",
        "got int": 7,
        f"at most {MAX_IMAGES}": [good] * (MAX_IMAGES + 1),
        "1 image placeholders": [good, good],
        "for 0 images": [],
    }
    for message, images in bad.items():
        answer = post("/generate", {"text": text, "image_data": images, "sampling_params": GREEDY}, expect=400)
        assert message in answer["message"], answer
    missing = post("/generate", {"text": text, "sampling_params": GREEDY}, expect=400)
    assert "no images: send them too" in missing["message"]
    assert post("/generate", {"text": text, "image_data": good, "sampling_params": GREEDY})["output_ids"]


def test_chat_with_images_in_parts(server):
    _, post, engine, _ = server
    image = picture(0)
    parts = [{"type": "image_url", "image_url": {"url": to_data_url(image)}}, {"type": "text", "text": "how many?"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 6}
    answer = post("/v1/chat/completions", {**body, "return_token_ids": True, "ignore_eos": True})
    asked = [{"role": "user", "content": [{"type": "image"}, parts[1]]}]
    ids = engine.processor.encode_messages(asked, [image]).input_ids
    assert answer["usage"]["prompt_tokens"] == len(ids)
    native = post("/generate", {"input_ids": ids, "image_data": to_data_url(image), "sampling_params": GREEDY})
    assert answer["choices"][0]["token_ids"] == native["output_ids"]
    for url, message in (("http://host/a.png", "never fetched"), ("data:image/png;base64,AAAA", "another format")):
        bad = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        assert message in post("/v1/chat/completions", {**body, "messages": bad}, expect=400)["message"]


def test_all_chat_endpoints_read_the_same_images(server):
    _, post, engine, _ = server
    url = to_data_url(picture(0))
    text, image = {"type": "text", "text": "ab"}, {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    common = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def user(*content):
        return [{"role": "user", "content": [*content]}]

    chat = post("/v1/chat/completions", {**common, "max_tokens": 4, "messages": user(text, image)})["choices"][0]
    assert chat["prompt_token_ids"].count(engine.processor.image_token_id) > 1
    parts = {"type": "input_text", "text": "ab"}, {"type": "input_image", "image_url": url}
    others = [
        post("/v1/responses", {**common, "max_output_tokens": 4, "input": user(*parts)}),
        post("/v1/messages", {**common, "max_tokens": 4, "messages": user(text, {"type": "image", "source": source})}),
    ]
    for other in others:
        assert other["prompt_token_ids"] == chat["prompt_token_ids"] and other["token_ids"] == chat["token_ids"]
