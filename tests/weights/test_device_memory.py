"""Segments on a GPU, as far as they can be seen without one: what cannot be mapped is refused with a reason, never waited for or crashed over."""

import json

import pytest
import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.device_memory import DeviceWeights, attach, read_probe
from arealite.weights.host_memory import SharedWeights


def test_a_segment_of_another_gpu_is_refused_by_name(tmp_path):
    path = tmp_path / "weights.cuda"
    layout = {"w": {"dtype": "float32", "shape": [2], "offset": 0}}
    path.write_text(json.dumps({"gpu": "GPU-elsewhere", "handle": ["AA=="], "tensors": layout}))
    with pytest.raises(WeightUpdateError, match="GPU-elsewhere"):
        attach(str(path))
    assert "GPU-elsewhere" in read_probe(str(path))


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\x00", '{"gpu": 1}'])
def test_a_torn_file_is_refused(text, tmp_path):
    path = tmp_path / "weights.cuda"
    path.write_text(text)
    with pytest.raises(WeightUpdateError, match=r"cannot map|does not see"):
        attach(str(path))
    assert read_probe(str(tmp_path / "missing.cuda"))


def test_a_name_without_the_suffix_is_shared_memory(tmp_path):
    made = SharedWeights.create(tmp_path / "weights", {"w": torch.ones(3)})
    made.tensors["w"].fill_(7)
    assert attach(str(tmp_path / "weights"))["w"].tolist() == [7, 7, 7]
    made.unlink()


def test_tensors_are_views_of_one_buffer():
    layout = {
        "a": {"dtype": "bfloat16", "shape": [2, 3], "offset": 0},
        "b": {"dtype": "float32", "shape": [], "offset": 256},
    }
    buffer = torch.zeros(512, dtype=torch.uint8)
    weights = DeviceWeights("x", buffer, layout)
    weights.tensors["a"].fill_(1.5)
    weights.tensors["b"].fill_(-2)
    again = DeviceWeights("x", buffer, layout).tensors
    assert again["a"].tolist() == [[1.5] * 3] * 2 and again["b"].item() == -2
    assert buffer[12:256].sum() == 0
