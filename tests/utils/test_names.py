import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from arealite.api.errors import AReaLiteError, ConfigError, WaitTimeout
from arealite.engine.remote import membership
from arealite.utils.names import ELASTIC_PREFIX, FileNames, elastic_names, wait_for_names
from arealite.utils.rundir import RunDir


def test_publish_list_withdraw(tmp_path):
    names, other = FileNames(tmp_path), FileNames(tmp_path)
    names.publish("servers/0", "a:1")
    names.publish("servers/1", "b:2")
    names.publish("master", "c:3")
    names.publish("servers/1", "b:9")
    assert other.list("servers/") == {"servers/0": "a:1", "servers/1": "b:9"}
    assert other.get("master") == "c:3" and other.get("nobody") is None
    names.withdraw("master")
    assert other.get("master") is None
    names.close()
    assert other.list("") == {}


def test_a_lease_that_is_not_renewed_expires(tmp_path):
    names, other = FileNames(tmp_path, ttl_s=10), FileNames(tmp_path)
    names.publish("a", "1")
    names.publish("b", "2")
    for name in ("a", "b"):
        os.utime(tmp_path / name, (time.time() - 60, time.time() - 60))
    assert other.list("") == {}, "not renewed for a minute"
    names.renew()
    assert other.list("") == {"a": "1", "b": "2"}
    os.utime(tmp_path / "a", (time.time() - 60, time.time() - 60))
    assert other.claim("a", "3") and other.get("a") == "3", "an expired name may be claimed"


@pytest.mark.parametrize("expired", [False, True])
def test_one_claim_of_many_wins(tmp_path, expired):
    if expired:
        FileNames(tmp_path).publish("node/0", "before")
        os.utime(tmp_path / "node@0", (time.time() - 60, time.time() - 60))
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda i: FileNames(tmp_path).claim("node/0", str(i)), range(64)))
    assert won.count(True) == 1
    assert FileNames(tmp_path).get("node/0") == str(won.index(True))


def test_waiting_across_processes(tmp_path):
    code = f"from arealite.utils.names import FileNames; FileNames({str(tmp_path)!r}).publish('servers/1', 'x:1')"
    process = subprocess.Popen([sys.executable, "-c", code])
    names = FileNames(tmp_path)
    names.publish("servers/0", "y:1")
    assert wait_for_names(names, ["servers/1", "servers/0"], 60, "the test") == {"servers/1": "x:1", "servers/0": "y:1"}
    process.wait()


def test_the_error_of_a_wait_lists_the_missing_names(tmp_path):
    names = FileNames(tmp_path)
    names.publish("servers/0", "y:1")
    # This name begins like the one that is waited for.
    names.publish("servers/10", "x:1")
    for wanted in (["servers/0", "servers/1"], ["servers/1"]):
        with pytest.raises(WaitTimeout, match=rf"node 1 waited 0 s for {len(wanted)} names; missing: servers/1$"):
            wait_for_names(names, wanted, 0, "node 1")


def test_the_client_looks_where_launchers_publish(tmp_path):
    launcher = elastic_names(RunDir(tmp_path))
    launcher.publish(f"{ELASTIC_PREFIX}10.0.0.1:80", "10.0.0.1:80")
    assert membership.Members(tmp_path).living() == {"10.0.0.1:80"}


def test_a_folder_that_is_gone_is_named(tmp_path):
    names = FileNames(tmp_path / "names")
    (tmp_path / "names").rmdir()
    for use in (lambda: names.publish("a", "1"), lambda: names.list("a"), lambda: names.get("a")):
        with pytest.raises(AReaLiteError, match=r"find each other, cannot be used: No such file"):
            use()


def test_an_entry_that_a_crash_left_empty_is_none(tmp_path):
    names = FileNames(tmp_path)
    names.publish("server/a", "a:1")
    (tmp_path / "server@b").touch()
    assert names.list("server/") == {"server/a": "a:1"} and names.get("server/b") is None
    assert names.claim("server/b", "b:1")


def test_a_server_joins_no_folder_that_is_not_a_run(tmp_path):
    """It would serve there, and no trainer would find it."""
    run = tmp_path / "runs" / "task" / "trial0"
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"join=.*/task: .* is not a run directory.* Runs below it: .*task/trial0"):
        membership.Lease(run.parent, "a:1")
    with pytest.raises(ConfigError, match="there is no run directory"):
        membership.Lease(tmp_path / "gone", "a:1")
    assert [path.name for path in run.parent.iterdir()] == ["trial0"]
    membership.Lease(run, "a:1")


def test_a_server_survives_an_error_of_the_shared_folder(tmp_path, monkeypatch):
    (tmp_path / "names").mkdir()

    async def hold():
        lease, stop, looks = membership.Lease(tmp_path, "a:1"), asyncio.Event(), []
        lease._names.ttl_s = 0.05

        def away():
            looks.append(len(looks))
            if len(looks) == 1:
                raise OSError(116, "Stale file handle")
            stop.set()

        monkeypatch.setattr(lease._names, "renew", away)
        await asyncio.wait_for(lease.hold(stop), 10)
        return looks

    assert asyncio.run(hold()) == [0, 1]


DAMAGED = {
    "empty": "",
    "cut": '{"value": "a:1", "tt',
    "list": "[1]",
    "number": "5",
    "without": "{}",
    "types": '{"value": 7, "ttl_s": 30}',
    "endless": '{"value": "a:1", "ttl_s": NaN}',
    "text": '{"value": "a:1", "ttl_s": "long"}',
    "nested": "[" * 4000,
    "huge": '{"value": "' + "x" * 10_000 + '", "ttl_s": 30}',
}


def test_damaged_entries_are_ignored_with_one_message(tmp_path, caplog):
    names = FileNames(tmp_path)
    names.publish("servers/9", "z:9")
    for name, text in DAMAGED.items():
        (tmp_path / f"servers@{name}").write_text(text)
    (tmp_path / "servers@bytes").write_bytes(b"\xff\xfe\0")
    (tmp_path / "servers@folder").mkdir()
    os.mkfifo(tmp_path / "servers@pipe")
    (tmp_path / "servers@link").symlink_to(tmp_path / "servers@9")
    for _ in range(2):
        assert names.list("servers/") == {"servers/9": "z:9"}
    assert len(caplog.records) == len(DAMAGED) + 4, "each is reported once"
    assert names.get("servers/list") is None
    assert names.claim("servers/cut", "a:1") and names.get("servers/cut") == "a:1", "a damaged entry is replaced"
    names.publish("servers/types", "b:1")
    assert names.get("servers/types") == "b:1"
    with pytest.raises(AReaLiteError, match="cannot be used"):
        names.claim("servers/folder", "c:1")


def test_only_the_owner_can_enter_the_folder(tmp_path):
    (tmp_path / "names").mkdir(mode=0o777)
    FileNames(tmp_path / "names")
    assert (tmp_path / "names").stat().st_mode & 0o777 == 0o700
