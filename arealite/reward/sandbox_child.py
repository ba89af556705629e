"""The program that `sandbox.run_python` starts: isolates itself, then runs code of a model.

It is run by path, in isolated mode, and imports nothing of the package. Its standard input begins with a header: a
number of bytes and a marshalled dict, the request. What follows is the standard input of the code. There are up to
three processes: this one waits and passes the exit code on; with namespaces, the first process of the new PID namespace
waits for the code, and the kernel kills all others with it; the last one gives up its rights and runs the code.

Every import counts, as this starts for every answer: `_signal` is `signal` without its enumerations.
"""

import _signal as signal
import _sitebuiltins
import builtins
import ctypes
import marshal
import os
import resource
import select
import sys

_libc = ctypes.CDLL(None, use_errno=True)

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_RECURSIVE, _MS_PRIVATE, _MNT_DETACH = 2, 4, 0x1000, 0x4000, 1 << 18, 2
_ATTR_READ_ONLY, _ATTR_NOSUID, _ATTR_NODEV, _AT_RECURSIVE, _AT_FDCWD = 1, 2, 4, 0x8000, -100
_SYS_PIVOT_ROOT, _SYS_CAPSET = ({"x86_64": (155, 126), "aarch64": (41, 91)}).get(os.uname().machine, (-1, -1))
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK = 442, 444
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 8, 22, 36, 38
_CAP_READ_ALL = 1 << 2
# Any directory that exists and is not needed any more.
_NEW_ROOT = "/proc"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Who the code is inside a user namespace, and outside where the user of the request does not exist.
_INNER_USER, NOBODY = 1000, 65534


def _check(result: int, action: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{action}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(action: str, *args: object) -> int:
    return _check(_libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in args)), action)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    args = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*args), f"mount {target}")


def _set_mount(path: str, attributes: int, flags: int = 0) -> None:
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    args = (_SYS_MOUNT_SETATTR, _AT_FDCWD, ctypes.c_char_p(path.encode()), flags, values, ctypes.sizeof(values))
    _syscall(f"mount_setattr {path}", *args)


def _enter_namespaces() -> None:
    """Unshare everything. Without root rights, in a user namespace in which this user is another one."""
    user, group = os.geteuid(), os.getegid()
    flags = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK
    if user != 0:
        flags |= _NEW_USER
    _check(_libc.unshare(flags), "unshare")
    if user != 0:
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"{_INNER_USER} {user} 1"), ("gid_map", f"{_INNER_USER} {group} 1")
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _change_root(paths: list[str], max_bytes: int) -> None:
    """Make a root folder that has only the given paths, read-only, some devices, and a `/tmp` in memory."""
    _mount("", "/", "", _MS_RECURSIVE | _MS_PRIVATE)
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=0755")
    # First, as paths may lie in it.
    os.mkdir(_NEW_ROOT + "/tmp")
    _mount("tmpfs", _NEW_ROOT + "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={max_bytes},nr_inodes=10000,mode=1777")
    for path in (*paths, *DEVICES):
        target = _NEW_ROOT + path
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, mode=0o755, exist_ok=True)
        else:
            open(target, "x").close()
        _mount(path, target, "", _MS_BIND | _MS_RECURSIVE)
        is_device = path in DEVICES
        _set_mount(target, _ATTR_NOSUID | (0 if is_device else _ATTR_READ_ONLY | _ATTR_NODEV), _AT_RECURSIVE)
    os.chdir(_NEW_ROOT)
    _syscall("pivot_root", _SYS_PIVOT_ROOT, ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    _set_mount("/", _ATTR_READ_ONLY)


def _landlock_rules(paths: list[str], folder: str) -> int:
    """Return a Landlock ruleset that allows to read some paths and to use one folder."""
    version = _syscall("Landlock", _SYS_LANDLOCK, 0, 0, 1)
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    # From version 6 also signals and abstract sockets.
    values = (ctypes.c_uint64 * 3)(handled, 0, 3 if version >= 6 else 0)
    rules = _syscall("Landlock", _SYS_LANDLOCK, values, 24 if version >= 6 else 8, 0)
    of_files, read = 0b1000_0000_0000_0111 | 1 << 14, 0b1101
    for path in (*paths, *DEVICES, folder):
        allowed = handled if path in (folder, *DEVICES) else read
        if not os.path.isdir(path):
            allowed &= of_files
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = allowed.to_bytes(8, "little") + opened.to_bytes(4, "little")
        _syscall(f"Landlock {path}", _SYS_LANDLOCK + 1, rules, 1, ctypes.c_char_p(rule), 0)
        os.close(opened)
    return rules


def _become_other_user(user: int, folder: str | None) -> None:
    """Give up root: change to a user who owns nothing but `folder`."""
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
    for candidate in (user, NOBODY):
        try:
            if folder:
                os.chown(folder, candidate, candidate)
            os.setgroups([])
            os.setresgid(candidate, candidate, candidate)
            os.setresuid(candidate, candidate, candidate)
            return
        except OSError:
            # A user namespace may have few users.
            if candidate == NOBODY:
                raise


def _set_capabilities(wanted: int) -> None:
    """Drop all capabilities but `wanted`, or all if this process does not have those."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    for capabilities in (wanted, 0):
        values = (ctypes.c_uint32 * 6)(capabilities, capabilities, 0, 0, 0, 0)
        if _libc.syscall(ctypes.c_long(_SYS_CAPSET), header, values) == 0:
            return
    raise OSError(ctypes.get_errno(), "capset")


def _set_limits(limits: dict[str, int], counts_user: bool) -> None:
    """Set the limits of this process and its children, in which they may only go lower."""
    if counts_user:
        # The kernel counts all processes of the user, not those of the sandbox.
        limits["RLIMIT_NPROC"] += _count_own_threads()
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def _count_own_threads() -> int:
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            # It has ended.
            continue
    return count


def _give_up_rights(request: dict, rules: int | None) -> None:
    """Apply limits and drop user, capabilities and system calls. The code runs with what remains."""
    level, folder = request["level"], request["folder"]
    is_root = os.geteuid() == 0
    _set_limits(request["limits"], counts_user=folder is not None and not is_root)
    if is_root:
        _become_other_user(request["user"], folder)
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if rules is not None:
        _syscall("Landlock", _SYS_LANDLOCK + 2, rules, 0)
        os.close(rules)
    # Python may be installed where other users cannot read; Landlock limits what this reaches.
    _set_capabilities(_CAP_READ_ALL if is_root and level == "landlock" else 0)
    if request["filter"]:
        filter_bytes = ctypes.create_string_buffer(request["filter"], len(request["filter"]))

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

        program = Program(len(request["filter"]) // 8, ctypes.addressof(filter_bytes))
        _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def _run_code(code: bytes, python_path: list[str]) -> None:
    """Run code as the main program. An error ends this process with exit code 1 and a traceback."""
    sys.argv[:] = ["main.py"]
    sys.path[:0] = python_path
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    text = code.decode(errors="replace")
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    try:
        exec(compile(text, "main.py", "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        raise
    # The code may raise anything.
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


def _wait_for(child: int) -> int:
    """Return the exit code of a child, or 128 and its signal; other children are reaped."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _fork_and_watch(is_group: bool) -> None:
    """Fork; the child returns. The parent waits for it, ends it on SIGTERM, and exits with its exit code.

    With `is_group` the child leads a process group, which ends with it.
    """
    alive, held = os.pipe()
    child = 0

    def end(*_: object) -> None:
        (os.killpg if is_group else os.kill)(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os._exit(128 + signal.SIGTERM)

    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    child = os.fork()
    if is_group:
        # In both processes, as either may be the first.
        os.setpgid(child, child)
    if child:
        signal.signal(signal.SIGTERM, end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        if is_group:
            os.killpg(child, signal.SIGKILL)
        os._exit(_wait_for(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    os.close(held)
    # The parent may have ended before the request was in place.
    if _is_other_end_closed(alive):
        os._exit(1)
    os.close(alive)


def _is_other_end_closed(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def _isolate(request: dict) -> None:
    """Return in a process that has the isolation which the request names."""
    level, paths, folder = request["level"], request["paths"], request["folder"]
    rules = None
    if level != "bubblewrap":
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0), "prctl")
        if os.getppid() != request["parent"]:
            os._exit(1)
        # If the machine has no memory left, this goes first.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    if level == "namespaces":
        _enter_namespaces()
        _fork_and_watch(is_group=False)
        _change_root(paths, request["max_file_bytes"])
        # The first process of a PID namespace ignores signals: the code runs in the second.
        first = os.fork()
        if first:
            os._exit(_wait_for(first))
    elif level == "bubblewrap":
        # Its own request to end with its parent may have come too late: then nobody reads the output.
        if _is_other_end_closed(1):
            os._exit(1)
    else:
        # Orphans stay below this process, where the memory of all is counted.
        _check(_libc.prctl(_PR_SET_SUBREAPER, 1, 0, 0, 0), "prctl")
        _fork_and_watch(is_group=True)
        if level == "landlock":
            rules = _landlock_rules(paths, folder)
    os.chdir(folder or "/tmp")
    _give_up_rights(request, rules)


def _read_exactly(count: int) -> bytes:
    parts = []
    while count:
        part = os.read(0, min(count, 1 << 20))
        if not part:
            os._exit(1)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def main() -> None:
    request = marshal.loads(_read_exactly(int.from_bytes(_read_exactly(8), "little")))
    nonce = request.pop("nonce")
    try:
        _isolate(request)
    except OSError as error:
        os.write(2, f"{nonce} {error}".encode())
        os._exit(125)
    del nonce
    _run_code(request["code"], request["python_path"])


if __name__ == "__main__":
    main()
