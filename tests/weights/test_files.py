"""Files that a request names: what is not a weight file of this user is refused, quickly and without its content."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from arealite.api.errors import WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.weights import device_memory, files, host_memory
from arealite.weights.device_memory import DeviceWeights
from arealite.weights.disk import read_tensors
from arealite.weights.host_memory import SharedWeights
from arealite.weights.segment import release_removed
from arealite.weights.sync import make_transport, read_probe
from tests import warm_python

SECRET = "do-not-tell"
PRIVATE = [
    f"{SECRET}\n".encode() * 99,
    b"\xff\xfe" + SECRET.encode(),
    b"8 bytes " + SECRET.encode() + b"\xff",
    json.dumps({SECRET: SECRET}).encode(),
    json.dumps({"gpu": f"{SECRET} {SECRET}", "handle": [SECRET], "layout": {"tensors": {SECRET: 1}}}).encode(),
    json.dumps({"weight_map": {SECRET: f"../{SECRET}"}}).encode(),
    json.dumps({"weight_map": SECRET}).encode(),
]


def as_safetensors(header: object) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


PRIVATE += [
    as_safetensors({SECRET: {"dtype": SECRET, "shape": [1], "data_offsets": [0, 4]}}),
    as_safetensors({SECRET: {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}),
    as_safetensors({SECRET: {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}),
    as_safetensors([SECRET]),
]


def refusals(folder: Path, content: bytes) -> list[str]:
    """Return the messages of everything that reads a file with this content."""
    messages = []
    for name in ("segment", "segment.cuda"):
        (folder / name).write_bytes(content)
        messages.append(read_probe(str(folder / name)))
        with pytest.raises(WeightUpdateError) as caught:
            make_transport(WeightUpdateMeta("shm", str(folder / name))).open(
                WeightUpdateMeta("shm", str(folder / name))
            )
        messages.append(str(caught.value))
    for name in ("model.safetensors.index.json", "model.safetensors"):
        (folder / name).write_bytes(content)
        with pytest.raises(WeightUpdateError) as caught:
            read_tensors(folder, "model")
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("content", PRIVATE)
def test_a_refusal_does_not_quote_the_file(content, tmp_path):
    for message in refusals(tmp_path, content):
        assert message and SECRET not in message and SECRET not in repr(message)


def test_a_large_private_file_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0)
        file.write(b"-----BEGIN PRIVATE KEY-----")
    amounts: list[int] = []
    read = os.pread
    monkeypatch.setattr(files.os, "pread", lambda fd, count, at: amounts.append(count) or read(fd, count, at))
    assert "does not hold shared weights" in read_probe(str(path))
    assert max(amounts) <= 8
    os.rename(path, f"{path}.cuda")
    assert "at most" in read_probe(f"{path}.cuda")


def segment_of(folder: Path, kind: str) -> Path:
    path = folder / "segment"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            (folder / "target").write_bytes(as_safetensors({}))
            path.symlink_to(folder / "target")
        case "device":
            path = Path("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "device"])
def test_only_regular_files_are_opened_and_opening_never_waits(kind, tmp_path):
    path = segment_of(tmp_path, kind)
    with pytest.raises(WeightUpdateError, match=r"not a regular file|cannot attach"):
        SharedWeights.attach(path)
    with pytest.raises((WeightUpdateError, OSError)), files.opened(path):
        pass
    if kind in ("fifo", "link"):
        path.rename(tmp_path / "model.safetensors")
        with pytest.raises(WeightUpdateError):
            read_tensors(tmp_path, "model")


def test_a_segment_of_another_user_is_refused(tmp_path, monkeypatch):
    made = SharedWeights.create(tmp_path / "w", {"a": torch.ones(2)})
    SharedWeights.detach(tmp_path / "w")
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(WeightUpdateError, match=f"belongs to user {os.getuid()}"):
        SharedWeights.attach(tmp_path / "w")
    made.unlink()


def test_a_written_file_follows_no_link_and_is_readable_by_its_owner_only(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "w.cuda"
    victim.write_text("private")
    path.symlink_to(victim)
    files.replace_private(path, "{}")
    assert victim.read_text() == "private" and path.read_text() == "{}"
    assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        files.replace_private(tmp_path / "folder", "{}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "victim", "w.cuda"]


def test_a_truncated_file_is_refused_before_it_is_mapped(tmp_path):
    save_file({"a": torch.ones(100_000)}, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(WeightUpdateError, match="cannot read"):
        read_tensors(tmp_path, "model")


def test_a_segment_that_shrinks_after_it_was_mapped_is_refused(tmp_path):
    """In a process of its own: without the check it dies of SIGBUS."""
    code = """
import os, sys, torch
from arealite.weights.host_memory import SharedWeights
SharedWeights.create(sys.argv[1], {"a": torch.ones(100_000)}).tensors["a"].fill_(1)
os.truncate(sys.argv[1], 5000)
try:
    print(SharedWeights.attach(sys.argv[1]).tensors["a"].sum())
except Exception as error:
    print(type(error).__name__)
"""
    done = warm_python.run(["-c", code, tmp_path / "w"], timeout=60)
    assert done.returncode != -signal.SIGBUS
    assert done.stdout == "WeightUpdateError\n", done.stderr


def mapped_bytes(path: Path) -> int:
    """Return the address space of this process that maps the file, also after its removal."""
    pattern = re.compile(rf"^([0-9a-f]+)-([0-9a-f]+) .* {re.escape(str(path))}( \(deleted\))?$", re.MULTILINE)
    text = Path("/proc/self/maps").read_text()
    return sum(int(end, 16) - int(start, 16) for start, end, _ in pattern.findall(text))


def test_maps_of_removed_segments_are_released(tmp_path):
    for name in ("ended", "running"):
        SharedWeights.create(tmp_path / name, {"a": torch.ones(1 << 20)})
        # From here on as in another process.
        SharedWeights.detach(tmp_path / name)
        SharedWeights.attach(tmp_path / name)
    (tmp_path / "ended").unlink()
    assert mapped_bytes(tmp_path / "ended") > 1 << 20
    release_removed()
    assert mapped_bytes(tmp_path / "ended") == 0
    assert mapped_bytes(tmp_path / "running") > 1 << 20
    SharedWeights.attach(tmp_path / "running").unlink()


def test_handles_of_removed_device_segments_are_released(tmp_path, monkeypatch):
    gone, kept = tmp_path / "gone.cuda", tmp_path / "kept.cuda"
    kept.touch()
    monkeypatch.setattr(device_memory, "_mapped", {gone: (b"", object()), kept: (b"", object())})
    DeviceWeights.release_removed()
    assert list(device_memory._mapped) == [kept]
    assert not host_memory._mapped.keys() & {gone, kept}
