import fcntl
import itertools
import os
import resource
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from arealite.api.cli_args import SFTConfig
from arealite.api.errors import ConfigError
from arealite.utils.config import load_config
from arealite.utils.rundir import RunDir, make_new_folder, write_file


def config(root, name="e"):
    return load_config(
        [f"experiment_name={name}", "trial_name=t", "train_dataset.path=d", "model.path=m", f"cluster.fileroot={root}"],
        SFTConfig,
    )  # fmt: skip


def test_all_paths_are_inside_and_the_configuration_reads_back(tmp_path):
    made = RunDir(config(tmp_path)).create(config(tmp_path))
    assert made.path == tmp_path / "e" / "t"
    assert len(vars(made)) > 8
    outside = [name for name, path in vars(made).items() if not path.is_relative_to(made.path)]
    assert not outside
    assert load_config(["--config", str(made.config_path)], SFTConfig) == config(tmp_path)
    assert RunDir(made.path).db_path == made.db_path


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "'a b'"])
def test_names_that_cannot_be_folders(tmp_path, name):
    with pytest.raises(ConfigError, match="becomes a folder"):
        RunDir(config(tmp_path, name))


def test_unwritable_root_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cluster\.fileroot"):
        RunDir(config(tmp_path / "file")).create()


@pytest.mark.parametrize(
    "content",
    ["", "process x on {host}", "process -1 on {host}", "process 99999999999999999999 on {host}", "\x1b[2J\0"],
)
def test_a_damaged_lock_file_is_replaced(tmp_path, content):
    (tmp_path / "lock").write_text(content.format(host=os.uname().nodename))
    with RunDir(tmp_path).lock():
        assert (tmp_path / "lock").read_text() == f"process {os.getpid()} on {os.uname().nodename}"
        (tmp_path / "lock").write_text(content.format(host=os.uname().nodename))
        with pytest.raises(ConfigError, match="another run uses") as refusal, RunDir(tmp_path).lock():
            pass
        assert "\x1b" not in str(refusal.value) and "\0" not in str(refusal.value)


def test_a_lock_that_is_no_regular_file(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "lock").symlink_to(victim)
    with RunDir(tmp_path).lock():
        assert victim.read_text() == "precious" and not (tmp_path / "lock").is_symlink()
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    with RunDir(tmp_path).lock():
        assert (tmp_path / "lock").is_file()
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()
    with pytest.raises(ConfigError, match="cannot write to the run directory"), RunDir(tmp_path).lock():
        pass


def test_the_key_of_a_run_is_private(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.private.mkdir(mode=0o755)
    run_dir.write_key("secret")
    assert run_dir.read_key() == "secret"
    assert stat.S_IMODE(run_dir.private.stat().st_mode) == 0o700
    assert stat.S_IMODE(run_dir.key_path.stat().st_mode) == 0o600
    run_dir.write_key(None)
    assert run_dir.read_key() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_run_directory_of_another_user_is_refused(tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b" / "private"):
        folder.mkdir(parents=True)
        os.chown(folder, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another user"):
        RunDir(tmp_path / "a").create()
    with pytest.raises(ConfigError, match="belongs to another user"):
        RunDir(tmp_path / "b").write_key("secret")


def test_the_name_in_shared_memory_is_random_and_the_same_for_all_processes_of_a_run(tmp_path):
    path = RunDir(tmp_path / "a").shared_weights
    assert path.parent == Path("/dev/shm") and not path.exists()
    assert RunDir(tmp_path / "a").shared_weights == path
    assert RunDir(tmp_path / "b").shared_weights != path
    kept = tmp_path / "a" / "private" / "segment"
    assert kept.read_text().startswith(f"{path.name} ") and kept.stat().st_mode & 0o777 == 0o600


def test_a_copy_of_a_run_directory_has_shared_memory_of_its_own_and_a_moved_one_keeps_it(tmp_path):
    path = RunDir(tmp_path / "a").shared_weights
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copied = RunDir(tmp_path / "copy").shared_weights
    assert copied != path and RunDir(tmp_path / "copy").shared_weights == copied
    (tmp_path / "a").rename(tmp_path / "moved")
    assert RunDir(tmp_path / "moved").shared_weights == path


@pytest.mark.parametrize("text", ["", "../../etc/passwd", "arealite-1", "\0"])
def test_a_damaged_name_in_shared_memory_is_replaced(tmp_path, text):
    first = RunDir(tmp_path).shared_weights
    (tmp_path / "private" / "segment").write_text(text)
    second = RunDir(tmp_path).shared_weights
    assert second != first and RunDir(tmp_path).shared_weights == second


@pytest.mark.parametrize("trap", ["link", "foreign"])
def test_a_name_in_shared_memory_that_is_taken_is_given_up(tmp_path, trap):
    taken = RunDir(tmp_path).shared_weights
    if trap == "link":
        taken.symlink_to("/etc/passwd")
    elif os.geteuid() != 0:
        pytest.skip("only root can make a file of another user")
    else:
        taken.touch()
        os.chown(taken, 65534, 65534)
    try:
        assert RunDir(tmp_path).shared_weights != taken
    finally:
        taken.unlink()


def test_each_of_many_gets_a_folder_of_its_own(tmp_path):
    (tmp_path / "1").mkdir()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_new_folder(tmp_path / str(n) for n in itertools.count(1)), range(24)))
    assert sorted(int(path.name) for path in made) == list(range(2, 26))


def test_a_look_at_the_lock_does_not_refuse_a_run(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path)
    with run_dir.lock():
        pass
    # What `is_in_use` of another process holds for a moment; the lock file names this process.
    looker = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(looker, fcntl.LOCK_SH)
    flock = fcntl.flock

    def flock_and_end(descriptor, operation):
        try:
            flock(descriptor, operation)
        finally:
            flock(looker, fcntl.LOCK_UN)

    monkeypatch.setattr(fcntl, "flock", flock_and_end)
    with run_dir.lock():
        assert run_dir.is_in_use()
    os.close(looker)


def test_what_is_no_lock_is_not_in_use(tmp_path):
    lock = tmp_path / "lock"
    for make in (lambda: os.mkfifo(lock), lambda: lock.symlink_to("elsewhere"), lock.mkdir):
        make()
        assert not RunDir(tmp_path).is_in_use()
        lock.rmdir() if lock.is_dir() else lock.unlink()
    assert not RunDir(tmp_path).is_in_use()


def test_a_file_that_does_not_fit_leaves_nothing_behind(tmp_path):
    path = tmp_path / "file"
    write_file(path, "before", private=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, limits[1]))
        with pytest.raises(OSError, match="too large"):
            write_file(path, bytes((1 << 24) + 1), private=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
