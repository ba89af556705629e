"""Programs that try to leave the sandbox. Each prints ESCAPED if it does anything that it must not.

As a script (`python attacks.py LEVEL`) it runs all of them as the user who starts it, and prints those that escape.
"""

import os
import socket
import sys
import tempfile
from pathlib import Path

from arealite.reward.sandbox import run_python

CALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) >= 0:
        print("ESCAPED", name)
def attempt(function, *args, **options):
    try:
        print("ESCAPED", function, args, function(*args, **options))
    except (OSError, ValueError) as error:
        print(type(error).__name__)
import os, signal
"""
# Filled in: SECRET (a file that everybody may read), OUTSIDE (a folder that everybody may write), PARENT (a pid), PORT.
ESCAPES = {
    "tcp": "import socket\nattempt(socket.create_connection, ('127.0.0.1', PORT), 2)",
    "udp": """
import socket
attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT)))
""",
    "unix socket": "import socket\nattempt(lambda: socket.socket(socket.AF_UNIX).connect(OUTSIDE + '/socket'))",
    "abstract socket": "import socket\nattempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0arealite-PORT'))",
    "datagram of a pair": """
import socket
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
attempt(a.sendto, b"x", OUTSIDE + "/datagrams")
attempt(a.connect, OUTSIDE + "/datagrams")
""",
    "netlink": "import socket\nattempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "passwords": "attempt(lambda: open('/etc/passwd').read())\nattempt(lambda: open('/etc/shadow').read())",
    "run directory": "attempt(lambda: open(SECRET).read())\nattempt(os.listdir, OUTSIDE)",
    "environment": "if 'TOP_KEY' in str(os.environ): print('ESCAPED')",
    "proc": """
for pid in (PARENT, 1, "self/../PARENT"):
    for name in ("environ", "mem", "maps", "cmdline", "fd/0", "root/etc/passwd", "cwd"):
        attempt(lambda: open(f"/proc/{pid}/{name}", "rb").read(100) or "empty")
""",
    "write": """
attempt(open, OUTSIDE + "/new", "w")
attempt(open, SECRET, "a")
attempt(os.mkdir, OUTSIDE + "/folder")
attempt(os.mkfifo, OUTSIDE + "/fifo")
attempt(os.unlink, SECRET)
attempt(os.rename, SECRET, SECRET + "2")
attempt(os.truncate, SECRET, 0)
attempt(open, os.__file__, "a")
attempt(open, "/new", "w")
""",
    "attributes": """
attempt(os.chmod, SECRET, 0)
attempt(os.utime, SECRET)
attempt(os.setxattr, SECRET, "user.x", b"x")
attempt(os.chown, SECRET, os.getuid(), os.getgid())
""",
    "links": """
os.symlink(SECRET, "link")
attempt(lambda: open("link").read())
attempt(os.link, SECRET, "hard")
os.symlink("/proc/PARENT/environ", "environ")
attempt(lambda: open("environ").read())
os.symlink("../" * 20 + SECRET, "up")
attempt(lambda: open("up").read())
""",
    "signals": """
for pid in (PARENT, -1, -PARENT):
    attempt(os.kill, pid, 0)
attempt(os.killpg, PARENT, 0)
""",
    "other processes": """
import resource
call("ptrace", 16, PARENT, 0, 0)
attempt(os.sched_setaffinity, PARENT, {0})
attempt(resource.prlimit, PARENT, resource.RLIMIT_CPU)
attempt(os.setpriority, os.PRIO_PROCESS, PARENT, 10)
attempt(lambda: os.pidfd_open(PARENT))
buffer = ctypes.create_string_buffer(16)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 16)
call("process_vm_readv", PARENT, vector, 1, vector, 1, 0)
""",
    "rights": """
attempt(os.setuid, 0)
attempt(os.setgid, 0)
attempt(os.chroot, "/tmp")
call("unshare", 0x10000000)
call("unshare", 0x20000)
call("setns", 0, 0)
call("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, 0)
call("syscall", {"x86_64": 317, "aarch64": 277}[os.uname().machine], 0, 0, 0)
call("prctl", 24, 21, 0, 0, 0)
attempt(os.sethostname if hasattr(os, "sethostname") else open, "/escaped")
""",
    "limits": """
import resource
attempt(resource.setrlimit, resource.RLIMIT_NPROC, (10000, 10000))
attempt(resource.setrlimit, resource.RLIMIT_AS, (-1, -1))
attempt(os.memfd_create, "memory")
call("shmget", 1, 1 << 30, 0o1600)
""",
    "descriptors": """
for descriptor in range(3, 256):
    try:
        os.fstat(descriptor)
    except OSError:
        continue
    print("ESCAPED", descriptor)
""",
    "another program": """
import sys
text = "try:\\n print('ESCAPED', open(SECRET).read())\\nexcept OSError: pass\\nimport socket\\nsocket.socket()"
try:
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", text])
except OSError:
    pass
""",
    "shell": "os.system('cat SECRET_PATH /etc/passwd; echo x > OUTSIDE_PATH/shell; cat /etc/passwd && echo ESCAPED')",
}


def fill(code: str, **values: object) -> str:
    for name, value in values.items():
        code = code.replace(f"{name}_PATH", str(value)).replace(
            name, repr(value) if isinstance(value, str) else str(value)
        )
    return CALL + code


def run_escapes(level: str, outside: Path) -> dict[str, str]:
    """Run all programs, and return what those print that escape, and what they leave."""
    outside.chmod(0o777)
    secret = outside / "secret"
    secret.write_text("ESCAPED: the content of a file")
    secret.chmod(0o666)
    os.environ["TOP_KEY"] = "key"
    escaped = {}
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
    ):
        port = server.getsockname()[1]
        named.bind(str(outside / "socket"))
        abstract.bind(f"\0arealite-{port}")
        datagrams.bind(str(outside / "datagrams"))
        for sock in (named, abstract):
            sock.listen()
        before = {path.name: path.stat().st_mode for path in outside.iterdir()}
        for name, code in ESCAPES.items():
            program = fill(code, SECRET=str(secret), OUTSIDE=str(outside), PARENT=os.getpid(), PORT=port)
            result = run_python(program, timeout_s=60.0, level=level)
            if "ESCAPED" in result.stdout or "SyntaxError" in result.stderr or "NameError" in result.stderr:
                escaped[name] = f"{result.stdout}\n{result.stderr}"
        after = {path.name: path.stat().st_mode for path in outside.iterdir()}
    del os.environ["TOP_KEY"]
    if before != after or secret.read_text() != "ESCAPED: the content of a file":
        escaped["what is left"] = f"{before} became {after}"
    return escaped


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = run_escapes(sys.argv[1], Path(folder))
    for name, text in found.items():
        print(name, text)
    print("done")
