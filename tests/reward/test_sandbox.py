"""The sandbox: nothing leaves it, everything ends, and every level of isolation that this machine has is tried."""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from arealite.api.errors import SandboxError
from arealite.reward import sandbox, sandbox_child
from arealite.reward.sandbox import run_python
from tests import warm_python
from tests.reward.attacks import run_escapes

ROOT = Path(__file__).parents[2]


def works(level):
    try:
        return run_python("print(1)", timeout_s=60.0, level=level, allow_weak=True).stdout == "1\n"
    except SandboxError:
        return False


AVAILABLE = {level for level in sandbox.LEVELS if works(level)}


def param(name, is_slow=False):
    return pytest.param(
        name, marks=[pytest.mark.skipif(name not in AVAILABLE, reason=f"no {name}")] + [pytest.mark.slow] * is_slow
    )


STRONG = [param(name) for name in sandbox.LEVELS[:3]]
# Limits are the same code for all levels: one with and one without namespaces are enough for every day.
ALL = [param(name, is_slow=name in ("bubblewrap", "rlimits")) for name in sandbox.LEVELS]


def run(code, level, **options):
    """Run code with a long deadline: the machine that tests may be busy."""
    return run_python(code, level=level, allow_weak=True, **{"timeout_s": 60.0, **options})


@pytest.fixture(scope="module", autouse=True)
def own_child():
    """Give sandboxes a file of their own, by which their processes are told from those of other pytest processes."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        os.chmod(folder, 0o755)
        patch.setattr(sandbox, "_CHILD", shutil.copy(sandbox_child.__file__, folder))
        sandbox._installation.cache_clear()
        yield
        sandbox._installation.cache_clear()


def wait_until_all_ended():
    """Wait until no process of a sandbox of this module is left."""
    deadline = time.monotonic() + 60
    while left := find_sandboxed():
        assert time.monotonic() < deadline, f"{left} run on"
        time.sleep(0.02)


def find_sandboxed():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if sandbox._CHILD.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("level", STRONG)
def test_nothing_escapes(level):
    # Short: the path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory() as folder:
        assert run_escapes(level, Path(folder)) == {}


def python_for_everybody():
    """Return an interpreter that other users can start, if there is one of a version that works."""
    for path in (sandbox._python(), "/usr/bin/python3"):
        command = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        options = {"user": 54321, "group": 54321, "extra_groups": []} if os.geteuid() == 0 else {}
        try:
            if subprocess.run(command, cwd="/", capture_output=True, **options).returncode == 0:
                return path, options
        except OSError:
            continue
    pytest.skip("no Python that other users can start")


@pytest.mark.parametrize("level", STRONG)
def test_nothing_escapes_from_an_ordinary_user(level, tmp_path):
    python, options = python_for_everybody()
    if subprocess.run(["ls", ROOT], cwd="/", capture_output=True, **options).returncode:
        pytest.skip("other users cannot read this checkout")
    done = subprocess.run(
        [python, "-B", "-m", "tests.reward.attacks", level], cwd=ROOT, env={}, capture_output=True, text=True,
        timeout=200, **options,
    )  # fmt: skip
    assert done.stdout == "done\n", done.stdout + done.stderr


@pytest.mark.parametrize("level", ALL)
def test_a_program_runs_as_it_would_elsewhere(level):
    code = """
import sys, os, subprocess, threading, asyncio, json, exit_codes_are_kept
"""
    assert run(code, level).exit_code == 1
    assert run("import sys; sys.exit(7)", level).exit_code == 7
    assert run("exit(3)", level).exit_code == 3
    result = run("import sys; print(sys.stdin.read()[::-1], __name__); print('é', file=sys.stderr)", level, stdin="añb")
    assert (result.stdout, result.stderr, result.exit_code, result.stopped_by) == ("bña __main__\n", "é\n", 0, None)
    result = run("import os\nos.kill(0, 9)", level)
    assert result.exit_code == 137
    result = run("def f():\n    raise KeyError('reason')\nf()", level)
    assert "main.py" in result.stderr and result.stderr.endswith("KeyError: 'reason'\n")
    assert "sandbox_child" not in result.stderr


@pytest.mark.parametrize("level", STRONG)
def test_ordinary_libraries_work(level):
    code = """
import asyncio, concurrent.futures, os, subprocess, sys, tempfile, threading, random, math, decimal
async def add(a, b):
    await asyncio.sleep(0)
    return a + b
print(asyncio.run(add(1, 2)))
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    print(list(pool.map(abs, [-1, 2])))
with tempfile.TemporaryFile("w+") as file:
    file.write("text"); file.seek(0); print(file.read())
print(len(os.urandom(4)), open("/dev/null", "w").write("gone"), open("/dev/zero", "rb").read(2))
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, b"child"); os._exit(0)
print(os.read(read, 10), os.wait()[1])
print(subprocess.run([sys.executable, "-I", "-S", "-c", "print(6 * 7)"], capture_output=True, text=True).stdout)
"""
    result = run(code, level)
    assert result.stdout.split("\n") == ["3", "[1, 2]", "text", "4 4 b'\\x00\\x00'", "b'child' 0", "42", "", ""], (
        result.stderr
    )


def test_packages_can_be_made_available(tmp_path):
    package = tmp_path / "packages"
    package.mkdir()
    (package / "useful.py").write_text("VALUE = 5")
    for level in AVAILABLE - {"rlimits"}:
        assert run("import useful; print(useful.VALUE)", level).exit_code == 1
        assert run("import useful; print(useful.VALUE)", level, python_path=[str(package)]).stdout == "5\n"
        assert run(f"open({str(package)!r} + '/new', 'w')", level, python_path=[str(package)]).exit_code == 1


ENDLESS = {
    "computes": "while True: pass",
    "sleeps": "import time\nwhile True: time.sleep(100)",
    "ignores signals": """
import _signal as signal, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
while True: time.sleep(1)
""",
    "closes everything": "import os\nos.closerange(0, 1000)\nwhile True: pass",
    "stops": "import os, _signal as signal\nos.kill(0, signal.SIGSTOP)",
    "forks": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "makes threads": """
import _thread, time
while True:
    try: _thread.start_new_thread(time.sleep, (99,))
    except (RuntimeError, MemoryError): pass
""",
}


@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("code", ENDLESS.values(), ids=ENDLESS)
def test_what_does_not_end_is_ended(level, code):
    result = run(code, level, timeout_s=0.5)
    assert result.timed_out or result.stopped_by == "memory", result
    assert result.exit_code == 137
    wait_until_all_ended()


@pytest.mark.parametrize("level", ALL)
def test_processes_are_counted(level):
    code = """
import os, time
count = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
    except OSError as error:
        break
    count += 1
print(count)
"""
    result = run(code, level, max_processes=8)
    assert int(result.stdout) <= 8, result
    wait_until_all_ended()


@pytest.mark.parametrize("level", ALL)
def test_background_processes_end_with_the_program(level):
    code = """
import os, time
if os.fork() == 0:
    try: os.setsid()
    except OSError: pass
    if os.fork() == 0:
        os.closerange(0, 1000)
        time.sleep(1000)
    os._exit(0)
print("over")
"""
    result = run(code, level)
    assert (result.stdout, result.exit_code, result.stopped_by) == ("over\n", 0, None)
    wait_until_all_ended()


def start_sleeper(level, **variables):
    """Return a process that runs a program in the sandbox which does not end."""
    code = "import os, time\nos.fork()\ntime.sleep(1000)"
    call = f"sandbox.run_python({code!r}, timeout_s=1000, level={level!r}, allow_weak=True)"
    script = f"from arealite.reward import sandbox\nsandbox._CHILD = {sandbox._CHILD!r}\n{call}"
    process = warm_python.start(["-c", script], env={**os.environ, **variables})
    deadline = time.monotonic() + 60
    try:
        while not find_sandboxed():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    except BaseException:
        process.kill()
        raise
    return process


@pytest.mark.parametrize("level", ALL)
def test_a_killed_parent_leaves_nothing(level):
    parent = start_sleeper(level)
    parent.kill()
    parent.wait()
    wait_until_all_ended()


@pytest.mark.parametrize("level", ALL)
def test_memory_is_limited(level):
    for code in (
        "x = bytearray(10 ** 10)",
        "x = []\nwhile True: x.append(bytearray(10 ** 7))",
        "x = 'a'\nwhile True: x += x",
    ):
        result = run(code, level, memory_mb=256)
        assert "MemoryError" in result.stderr or result.stopped_by == "memory", (code, result)
        assert result.exit_code != 0
    many = """
import os, time
for _ in range(6):
    if os.fork() == 0: break
x = bytearray(b"x") * (100 << 20)
time.sleep(1000)
"""
    assert run(many, level, memory_mb=256).stopped_by == "memory"
    wait_until_all_ended()


ZIP_BOMB = """
import zlib, io, os
packer, packed = zlib.compressobj(1), b""
for _ in range(200):
    packed += packer.compress(bytes(1 << 20))
packed += packer.flush()
print(len(packed))
zlib.decompress(packed)
"""


@pytest.mark.parametrize("level", STRONG)
def test_a_zip_bomb_is_contained(level):
    result = run(ZIP_BOMB, level, memory_mb=128)
    assert int(result.stdout) < 2 << 20
    assert result.exit_code != 0 and ("MemoryError" in result.stderr or result.stopped_by == "memory")


@pytest.mark.parametrize("level", ALL)
def test_files_are_limited(level):
    huge = "f = open('huge', 'wb')\nfor _ in range(10 * 1024): f.write(bytes(1 << 20))"
    sparse = "f = open('huge', 'wb')\nf.truncate(10 << 30)\nf.seek((10 << 30) - 1)\nf.write(b'x')"
    for code in (huge, sparse):
        result = run(code, level, max_file_mb=8)
        assert result.exit_code != 0 and ("OSError" in result.stderr or result.stopped_by == "disk"), result
    many = "i = 0\nwhile True:\n  with open(str(i := i + 1), 'wb') as f: f.write(bytes(1 << 20))"
    result = run(many, level, max_file_mb=8)
    assert "No space left" in result.stderr or result.stopped_by == "disk", result


@pytest.mark.parametrize("level", ALL)
def test_output_is_limited(level):
    for code in (
        "while True: print('x' * 1000)",
        "import os\nwhile True: os.write(2, b'x' * 1000)",
        "import sys\nsys.exit('x' * 10 ** 8)",
    ):
        result = run(code, level, max_output_bytes=10_000)
        assert result.stopped_by == "output" and len(result.stdout) + len(result.stderr) <= 20_000
        assert result.exit_code == 137


@pytest.mark.parametrize("level", ALL)
def test_odd_programs_and_input(level):
    assert run("def f(): f()\nf()", level).stderr.endswith("RecursionError: maximum recursion depth exceeded\n")
    crash = "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n  def __eq__(self, o): return A() == o\nA() == 1"
    assert run(crash, level).exit_code != 0
    assert run("print('\0')", level).exit_code == 1
    assert run("(" * 100_000, level).exit_code == 1
    assert run("print('\ud800')", level).stdout == "?\n"
    assert run("import os\nos.write(1, b'\\xff\\xfe\\x00')", level).stdout == "��\0"
    assert run("x = 1\n" * 100_000 + "print(x)", level).exit_code == 0
    assert run("#" + "x" * (10 << 20) + "\nprint(2)", level).stdout == "2\n"
    assert run("print('not read')", level, stdin="x" * (10 << 20)).stdout == "not read\n"
    assert run("import sys\nprint(len(sys.stdin.read()))", level, stdin="x" * (10 << 20)).stdout == f"{10 << 20}\n"
    assert run("import os\nos.closerange(0, 1000)", level).stopped_by is None


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files, into which the users of sandboxes may go."""
    tmp_path.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if os.geteuid() == 0:
        for parent in tmp_path.parents[:3]:
            parent.chmod(parent.stat().st_mode | 0o011)
    return tmp_path


@pytest.mark.parametrize("level", [param("landlock"), param("rlimits")])
def test_folders_of_killed_processes_are_removed(level, temporary):
    process = start_sleeper(level, TMPDIR=str(temporary))
    (stale,) = temporary.iterdir()
    # Of a process that lives, of nobody, and a link: none of them is removed.
    kept = [temporary / f"{sandbox._folder_prefix()}{os.getpid()}-x", temporary / "arealite-sandbox-x"]
    link = temporary / f"{sandbox._folder_prefix()}{process.pid}-x"
    link.symlink_to(temporary, target_is_directory=True)
    for folder in kept:
        folder.mkdir()
    sandbox._remove_stale_folders.cache_clear()
    run("", level)
    assert stale.exists()
    process.kill()
    process.wait()
    wait_until_all_ended()
    sandbox._remove_stale_folders.cache_clear()
    run("", level)
    assert sorted(temporary.iterdir()) == sorted([*kept, link])


@pytest.mark.parametrize("level", ALL[2:])
def test_its_folder_is_removed_whatever_is_in_it(level, temporary):
    code = """
import os
os.mkdir("closed", 0)
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
print("made")
"""
    assert run(code, level, max_file_mb=256).stdout == "made\n"
    assert os.listdir(temporary) == []


def test_only_limits_must_be_allowed(monkeypatch, caplog):
    monkeypatch.setattr(sandbox, "LEVELS", ("rlimits",))
    sandbox.isolation.cache_clear()
    try:
        with pytest.raises(SandboxError, match=r"bubblewrap.*allow_weak=True"):
            run_python("print(1)")
        assert sandbox.isolation().is_weak
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert run_python("print(1)", allow_weak=True).stdout == "1\n"
    finally:
        sandbox.isolation.cache_clear()


# Refuses what containers refuse: new namespaces and mounts.
IN_A_CONTAINER = """
import ctypes, platform
from arealite.reward import sandbox, seccomp
libc = ctypes.CDLL(None)
code = seccomp.seccomp_filter(platform.machine(), True)
buffer = ctypes.create_string_buffer(code, len(code))
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(code) // 8, ctypes.addressof(buffer))), 0, 0) == 0
found = sandbox.isolation()
print(found.level, sorted(found.missing))
print(sandbox.run_python("open('/etc/passwd')").stderr.strip().splitlines()[-1])
"""


@pytest.mark.skipif("landlock" not in AVAILABLE, reason="no Landlock")
def test_where_namespaces_are_forbidden_landlock_is_used():
    done = subprocess.run([sys.executable, "-c", IN_A_CONTAINER], cwd=ROOT, capture_output=True, text=True, timeout=100)
    first, second = done.stdout.splitlines()
    assert first == "landlock ['bubblewrap', 'namespaces']", done.stderr
    assert second.startswith("PermissionError")


def test_the_strongest_level_is_found():
    found = sandbox.isolation()
    assert found.level == next(level for level in sandbox.LEVELS if level in AVAILABLE)
    assert set(found.missing) == set(sandbox.LEVELS[: sandbox.LEVELS.index(found.level)])
    assert found.has_seccomp == (platform.machine() in ("x86_64", "aarch64"))
    if not shutil.which("bwrap"):
        assert found.missing["bubblewrap"] == "bwrap is not installed"
    assert sandbox_child.DEVICES
