"""Device memory without a GPU: a segment that cannot be mapped is refused with a reason."""

import json

import pytest
import torch

from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.weights import device_memory
from arealite.weights.device_memory import DeviceWeights
from arealite.weights.host_memory import SharedWeights
from arealite.weights.layout import TensorLayout
from arealite.weights.sync import make_transport, read_probe


def open_segment(path):
    meta = WeightUpdateMeta("shm", str(path))
    return make_transport(meta).open(meta)


def test_a_segment_of_another_gpu_is_refused_by_name(tmp_path):
    path = tmp_path / "weights.cuda"
    layout = TensorLayout.of({"w": torch.empty(2)}).to_json()
    path.write_text(json.dumps({"gpu": "GPU-elsewhere", "handle": "AA==", "layout": layout}))
    with pytest.raises(WeightUpdateError, match="GPU-elsewhere"):
        open_segment(path)
    assert "GPU-elsewhere" in read_probe(str(path))


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\x00", '{"gpu": 1}'])
def test_a_torn_file_is_refused(text, tmp_path):
    path = tmp_path / "weights.cuda"
    path.write_text(text)
    with pytest.raises(WeightUpdateError, match=r"cannot map|does not see"):
        open_segment(path)
    assert read_probe(str(tmp_path / "missing.cuda"))


def test_a_name_without_the_suffix_is_shared_memory(tmp_path):
    made = SharedWeights.create(tmp_path / "weights", {"w": torch.ones(3)})
    made.tensors["w"].fill_(7)
    assert open_segment(tmp_path / "weights")["w"].tolist() == [7, 7, 7]
    made.unlink()


def test_tensors_are_views_of_one_buffer():
    layout = TensorLayout.of({"a": torch.empty(2, 3).bfloat16(), "b": torch.tensor(0.0)}, align=256)
    buffer = torch.zeros(512, dtype=torch.uint8)
    weights = DeviceWeights("x", buffer, layout)
    weights.tensors["a"].fill_(1.5)
    weights.tensors["b"].fill_(-2)
    again = DeviceWeights("x", buffer, layout).tensors
    assert again["a"].tolist() == [[1.5] * 3] * 2 and again["b"].item() == -2
    assert buffer[12:256].sum() == 0


def test_a_file_that_is_removed_is_written_again_by_the_process_that_has_the_buffer(tmp_path, monkeypatch, caplog):
    path, layout = tmp_path / "weights.cuda", TensorLayout.of({"w": torch.empty(2)})
    made = DeviceWeights(path, torch.zeros(layout.size_bytes, dtype=torch.uint8), layout)
    made._text = "{}"
    monkeypatch.setattr(device_memory, "_created", {path: made})
    assert DeviceWeights.attach(path) is made
    assert path.read_text() == "{}" and path.stat().st_mode & 0o777 == 0o600
    assert "making them again" in caplog.text
    DeviceWeights.restore(tmp_path / "of another process.cuda")
    assert [p.name for p in tmp_path.iterdir()] == ["weights.cuda"]
