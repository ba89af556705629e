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


def _cut_and_remove(path):
    path.unlink()


def _replace_by_link(path):
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("remove", [_cut_and_remove, _replace_by_link])
def test_a_segment_that_is_removed_is_made_again_with_its_values(tmp_path, caplog, remove):
    path = tmp_path / "w"
    made = SharedWeights.create(path, LIKE)
    made.tensors["a"].copy_(torch.arange(15.0).view(3, 5))
    made.tensors["b"].fill_(1.5)
    SharedWeights.restore(path)
    assert SharedWeights.attach(path) is made and not caplog.text
    remove(path)
    SharedWeights.restore(path)
    assert "making them again" in caplog.text and not path.is_symlink()
    os.link(path, tmp_path / "other name")
    seen = SharedWeights.attach(tmp_path / "other name").tensors
    assert torch.equal(seen["a"], made.tensors["a"]) and torch.equal(seen["b"], made.tensors["b"])
    # Writes of the trainer reach readers again.
    SharedWeights.attach(path).tensors["a"].zero_()
    assert seen["a"].count_nonzero() == 0
    SharedWeights.attach(path).unlink()


@pytest.mark.parametrize("folder", ["missing", "file/below", "/proc"])
def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightUpdateError, match=r"cannot create shared weights .*: .*weight_update=disk"):
        SharedWeights.create(tmp_path / folder / "w", LIKE)


def test_a_segment_that_does_not_fit_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightUpdateError, match="No space left"):
        SharedWeights.create(tmp_path / "w", LIKE)
    assert not list(tmp_path.iterdir())
