"""Images of kept rollouts: each is one file of the run directory, and the dashboard shows it."""

import io
import random

import pytest
import torch
from PIL import Image

from arealite.api import vision_api
from arealite.api.vision_api import PlacedImage, image_columns, kept_images
from arealite.core.ledger.images import ImageFolder, image_name
from arealite.core.ledger.reading import open_ledger, read_rollout
from arealite.core.ledger.store import Ledger
from arealite.utils.data import concat_padded, select_rows
from tests.core.conftest import Echo
from tests.dashboard.client import Dashboard


def picture(seed: int, kind: str = "PNG") -> bytes:
    rng, buffer = random.Random(seed), io.BytesIO()
    Image.frombytes("RGB", (8, 4), rng.randbytes(96)).save(buffer, kind)
    return buffer.getvalue()


def placed(*images: bytes) -> list[PlacedImage]:
    inputs = {"pixel_values": torch.zeros(4, 3), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    return [PlacedImage(image, 0, 1, inputs) for image in images]


class Pictures(Echo):
    """Echo, with as many images in the prompt as the row has."""

    async def arun_episode(self, engine, data):
        batch = await super().arun_episode(engine, data)
        return batch | image_columns([placed(*data["images"])] * len(batch["rewards"]))


def train(executor, rows):
    batch = executor.prepare_batch([rows], Pictures())
    executor.accounts.record_trained()
    return batch


def test_files_and_names_of_image_sets_are_read_again():
    a, b, c = picture(0), picture(1, "JPEG"), picture(2)
    one = {"attention_mask": torch.ones(2, 3)} | image_columns([placed(a, b), placed(a, b)])
    two = {"attention_mask": torch.ones(2, 3)} | image_columns([placed(c), []])
    joined = concat_padded([one, two])
    assert sorted(kept_images(joined).values()) == sorted([a, b, c])
    assert list(kept_images(select_rows(joined, [2])).values()) == [c]
    assert kept_images(select_rows(joined, [3])) == {}
    assert len(joined["image_files"]) == len(joined["image_names"]) == 2


def test_an_image_that_is_too_large_has_no_name(monkeypatch):
    small, large = picture(0), picture(0) + bytes(1000)
    monkeypatch.setattr(vision_api, "MAX_KEPT_IMAGE", 500)
    columns = image_columns([placed(large, small), placed(large)])
    assert (columns["image_names"] != 0).tolist() == [[False, True], [False, False]]
    assert list(kept_images(columns).values()) == [small]


def test_images_of_rollouts_are_kept_once_and_shown(tmp_path, executors):
    run = tmp_path / "exp" / "trial"
    ledger = Ledger(run / "run.sqlite")
    executor = executors(batch_size=2, ledger=ledger)
    shared, other = picture(0), picture(1, "JPEG")
    batch = train(executor, [{"x": 1, "images": [shared, other]}, {"x": 2, "images": [shared]}])
    assert "image_files" not in batch, "trainers get no encoded images"
    executor.stop()
    files = sorted((run / "rollouts" / "images").iterdir())
    assert len(files) == 2 and all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert shared in [file.read_bytes() for file in files]
    db = open_ledger(ledger.path)
    first, second = (read_rollout(db, "stream", episode, 0) for episode in range(2))
    db.close()
    assert first is not None and second is not None
    assert first["images"] == 2 and second["images"] == 1 and first["image_names"][:1] == second["image_names"]
    (run / "config.yaml").write_text("experiment_name: exp\n")
    with Dashboard(tmp_path) as page:
        run_id = page.run_id("exp/trial")
        detail = page.json(f"/api/runs/{run_id}/rollouts/stream/0/0")
        assert detail["num_images"] == 2 and len(detail["images"]) == 2
        assert page.get("/" + detail["images"][0]).body == shared
        (run / "rollouts" / "images" / f"{first['image_names'][1]}.png").unlink()
        assert len(page.json(f"/api/runs/{run_id}/rollouts/stream/0/0")["images"]) == 1


def test_images_of_an_evaluation_are_kept(tmp_path, executors):
    executor = executors(batch_size=2, ledger=Ledger(tmp_path / "run.sqlite"))
    batch = executor.rollout_batch([{"x": 1, "images": [picture(0)]}], Pictures())
    executor.stop()
    assert "image_files" not in batch
    (file,) = (tmp_path / "rollouts" / "images").iterdir()
    assert file.read_bytes() == picture(0)


def test_episodes_of_an_older_checkpoint_join_with_new_ones(tmp_path, executors):
    class Mixed(Pictures):
        async def arun_episode(self, engine, data):
            batch = await super().arun_episode(engine, data)
            dropped = ("image_names", "image_files") if data["x"] == 1 else ()
            return {key: value for key, value in batch.items() if key not in dropped}

    executor = executors(batch_size=2, ledger=Ledger(tmp_path / "run.sqlite"))
    batch = executor.prepare_batch([[{"x": x, "images": [picture(x)]} for x in (1, 2)]], Mixed())
    assert len(batch["pixel_values"]) == 2 and "image_names" not in batch


def test_a_full_folder_takes_no_more_images(tmp_path, caplog):
    images = {number: picture(number) for number in range(1, 6)}
    folder = ImageFolder(tmp_path, max_bytes=2 * len(images[1]))
    folder.keep(images)
    assert sorted(file.stem for file in folder.path.iterdir()) == [image_name(1), image_name(2)]
    assert caplog.text.count("further images of rollouts are not kept") == 1
    # What an earlier attempt has written counts.
    again = ImageFolder(tmp_path, max_bytes=2 * len(images[1]))
    again.keep({7: picture(7)})
    assert len(list(folder.path.iterdir())) == 2


@pytest.mark.parametrize("data", [b"", b"no image", b"GIF89a"])
def test_bytes_that_are_no_image_are_left_out(tmp_path, data):
    folder = ImageFolder(tmp_path)
    folder.keep({1: data, 2: picture(2)})
    assert [file.stem for file in folder.path.iterdir()] == [image_name(2)]


def test_a_folder_that_cannot_be_written_costs_images_only(tmp_path, caplog):
    (tmp_path / "rollouts").write_text("a file")
    ImageFolder(tmp_path).keep({1: picture(1)})
    assert "cannot be written" in caplog.text
