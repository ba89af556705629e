"""What every process does first: the limit on open files, and folders for caches that are its own."""

import gc
import os
import subprocess
import sys
import tempfile

import pytest

from arealite.utils import startup
from arealite.utils.startup import Phase, cache_folder, prepare_process, take_startup_phases


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A temporary folder as all users share it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_the_cache_folder_is_private_and_used_again(shared):
    path = cache_folder()
    assert path.parent == shared and path.stat().st_mode & 0o777 == 0o700
    assert cache_folder() == path


@pytest.mark.parametrize("trap", ["link", "open", "file", "foreign"])
def test_a_cache_folder_that_others_could_write_is_not_used(shared, tmp_path, caplog, trap):
    path, victim = shared / f"arealite-{os.geteuid()}", tmp_path / "victim"
    victim.mkdir()
    if trap == "link":
        path.symlink_to(victim)
    elif trap == "file":
        path.write_text("")
    else:
        path.mkdir()
        path.chmod(0o777)
    if trap == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can make a folder of another user")
        path.chmod(0o700)
        os.chown(path, 65534, 65534)
    made = cache_folder()
    assert made != path and made.parent == shared and made.stat().st_mode & 0o777 == 0o700
    assert not list(victim.iterdir()) and "is not used for caches" in caplog.text


def test_a_machine_without_a_temporary_folder_is_no_error(monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    prepare_process()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and "no folder for compiled code" in caplog.text


def test_compiled_code_and_fonts_are_kept_in_folders_of_ones_own(tmp_path):
    code = (
        "import os; from arealite.utils.config import run_main;"
        "run_main(lambda argv: print(os.environ['TORCHINDUCTOR_CACHE_DIR']), [])"
    )
    env = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    command = [sys.executable, "-c", code]
    for given in ({}, {"TORCHINDUCTOR_CACHE_DIR": "/chosen"}):
        settings = {**env, "TMPDIR": str(tmp_path), **given}
        done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
        expected = given or {"": str(tmp_path / f"arealite-{os.geteuid()}" / "torchinductor")}
        assert done.stdout.strip() == next(iter(expected.values()))


def test_what_the_start_has_left_is_exempt_from_garbage_collection(monkeypatch):
    phase = Phase("load", 1.0, 2.0)
    monkeypatch.setattr(startup, "_phases", [phase])
    gc.unfreeze()
    try:
        assert take_startup_phases() == [phase]
        frozen = gc.get_freeze_count()
        assert frozen > 10_000
        # The start is over once.
        assert take_startup_phases() == [] and gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
