"""`TensorLayout`: packing, views, portions, and its forms as text."""

import json

import pytest
import torch
from safetensors import safe_open

from arealite.weights.layout import TensorLayout

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(2**40),
}


def equal(one, other):
    assert list(one) == list(other)
    return all(torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one)


@pytest.mark.parametrize("align", [8, 256])
def test_packed_tensors_are_views_of_one_buffer(align):
    layout = TensorLayout.of(TENSORS, align)
    buffer = layout.pack(TENSORS)
    assert equal(layout.views(buffer), TENSORS)
    assert all(spec.offset % align == 0 for spec in layout.specs.values())
    layout.views(buffer)["b"].fill_(3)
    assert layout.views(buffer)["b"].tolist() == [3] * 5


def test_a_transposed_tensor_is_packed_row_by_row():
    tensors = {"t": torch.arange(6).view(2, 3).t()}
    layout = TensorLayout.of(tensors)
    assert equal(layout.views(layout.pack(tensors)), tensors)


def test_text_forms_give_the_same_layout():
    layout = TensorLayout.of(TENSORS)
    assert TensorLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert TensorLayout.from_lists(*layout.to_lists()) == layout
    assert layout != TensorLayout.of(TENSORS | {"a": torch.empty(3, 2)})
    assert layout != TensorLayout.of(TENSORS | {"a": torch.empty(2, 3, dtype=torch.float64)})


def test_a_safetensors_header_is_read_by_safetensors(tmp_path):
    tensors = {name: TENSORS[name] for name in ("scalar", "a", "none", "b")}
    layout = TensorLayout.of(tensors, align=1)
    header = layout.to_safetensors()
    (tmp_path / "file").write_bytes(header + layout.pack(tensors).numpy().tobytes())
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert equal({name: file.get_tensor(name) for name in tensors}, tensors)
    assert TensorLayout.from_safetensors(header[8:], layout.size_bytes) == layout


@pytest.mark.parametrize(
    ("dtype", "shape", "offsets"),
    [
        ("F32", [3], [0, 8]),
        ("F32", [2], [-4, 4]),
        ("F32", [-2], [0, 8]),
        ("nn", [2], [0, 8]),
        (3, [2], [0, 8]),
        ("F32", [2], []),
    ],
)
def test_a_wrong_layout_is_refused(dtype, shape, offsets):
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    for tensors in ({"a": entry}, {"a": {}}):
        with pytest.raises((ValueError, KeyError)):
            TensorLayout.from_json({"size_bytes": 8, "tensors": tensors})
    with pytest.raises(KeyError):
        TensorLayout.from_json({})


@pytest.mark.parametrize("lists", [(None, [], []), (["a"], [], []), (["a"], ["load"], [[1]]), ([1], ["int8"], [[1]])])
def test_wrong_lists_are_refused(lists):
    with pytest.raises(ValueError):
        TensorLayout.from_lists(*lists)


def test_portions_hold_all_tensors_in_order():
    layout = TensorLayout.of(TENSORS)
    for max_bytes in (1, 12, 30, 1 << 20):
        portions = list(layout.portions(max_bytes))
        assert [name for portion in portions for name in portion.specs] == list(TENSORS)
        sizes = [sum(s.size_bytes for s in portion.specs.values()) for portion in portions]
        assert all(size <= max_bytes or len(p.specs) == 1 for size, p in zip(sizes, portions, strict=True))
        assert TensorLayout.join(portions) == layout
