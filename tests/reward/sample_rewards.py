"""Misbehaving rewards, importable by worker processes."""

import asyncio
import os
import signal
import time
from pathlib import Path


def length(completion, **data):
    return float(len(completion))


def raises(completion, **data):
    raise KeyError("no such column")


def never_returns(completion, **data):
    time.sleep(3600)


def crashes(completion, **data):
    os.abort()


def exits(completion, **data):
    os._exit(7)


class Odd(BaseException):
    pass


def raises_odd(completion, **data):
    raise Odd("not even an Exception")


def leaves(completion, **data):
    raise SystemExit("enough")


def forks(completion, **data):
    return 1.0 if os.fork() else 2.0


def ends_the_fork_server(completion, **data):
    os.kill(os.getppid(), signal.SIGKILL)
    os.abort()


def closes_everything(completion, **data):
    os.closerange(3, 1000)
    return 1.0


def descriptors(path, **data):
    """Write where the descriptors of this process lead, one a line."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    Path(path).write_text("\n".join(os.readlink(link) for link in links if os.path.islink(link)))
    return 1.0


def writes(completion, stops=True, **data):
    """Write bytes (in hexadecimal) to the owner's socket, in place of or before an answer."""
    for name in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{name}"
        if os.path.islink(link) and os.readlink(link).startswith("socket:"):
            os.write(int(name), bytes.fromhex(completion))
    if stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def closes_and_runs_on(completion, **data):
    os.closerange(3, 1000)
    time.sleep(3600)


def returns_text(completion, **data):
    return "good"


def returns_nan(completion, **data):
    return float("nan")


def own_pid(completion, **data):
    return float(os.getpid())


def naps(completion, nap_s=0.2, **data):
    time.sleep(nap_s)
    return float(os.getpid())


def computes(completion, **data):
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
    return 1.0


async def remote_judge(completion, **data):
    if completion == "bad":
        raise KeyError("no such judge")
    if completion == "own timeout":
        raise TimeoutError("no answer of the judge")
    await asyncio.sleep(3600 if completion == "hang" else 0)
    return len(completion)


def raises_a_page(completion: str, **data):
    raise ValueError("a whole page " * 10**6)


def in_parts(completion, **data):
    return {"reward": 1.5, "length": len(completion), "format": True}


def without_total(completion, **data):
    return {"length": 1.0}


def with_a_bad_part(completion, **data):
    return {"reward": 1.0, "length": "long"}


class Judge:
    async def __call__(self, completion, **data):
        return {"reward": len(completion), "asked": 1}
