"""Weights in a mapped file: one mapping per process; a new file under the same name is noticed."""

import os

import pytest
import torch

from arealite.api.errors import WeightUpdateError
from arealite.weights.host_memory import SharedWeights

LIKE = {"a": torch.empty(3, 5), "none": torch.empty(0, 4), "b": torch.empty(7, dtype=torch.bfloat16)}


def test_a_process_maps_a_file_once_and_reads_what_was_written(tmp_path):
    made = SharedWeights.create(tmp_path / "w", LIKE)
    made.tensors["a"].copy_(torch.arange(15.0).view(3, 5))
    made.tensors["b"].fill_(1.5)
    assert SharedWeights.attach(tmp_path / "w") is made
    linked = tmp_path / "other name"
    os.link(tmp_path / "w", linked)  # as another process would map it
    seen = SharedWeights.attach(linked).tensors
    assert seen["a"].tolist() == torch.arange(15.0).view(3, 5).tolist()
    assert seen["b"].dtype == torch.bfloat16 and seen["b"].sum() == 10.5
    assert seen["none"].shape == (0, 4)
    made.unlink()
    with pytest.raises(WeightUpdateError, match="cannot attach"):
        SharedWeights.attach(tmp_path / "w")


def test_a_new_file_is_mapped_again_and_the_old_mapping_stays_readable(tmp_path):
    old = SharedWeights.create(tmp_path / "w", {"a": torch.empty(4)})
    old.tensors["a"].fill_(1.0)
    reader = SharedWeights.attach(tmp_path / "w").tensors["a"]
    new = SharedWeights.create(tmp_path / "w", {"a": torch.empty(2)})
    new.tensors["a"].fill_(2.0)
    assert SharedWeights.attach(tmp_path / "w").tensors["a"].tolist() == [2.0, 2.0]
    assert reader.tolist() == [1.0] * 4
    new.unlink()
