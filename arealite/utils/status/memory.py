"""Files in memory (memfd) by which the doctor reads a process of the same user on the same machine.

One holds the status as JSON. Into the other one, `faulthandler` writes the stacks of all threads when the process gets
`STACK_SIGNAL`. That needs neither the GIL nor the disk, so it works in a process that hangs in C code.
"""

import contextlib
import faulthandler
import fcntl
import os
import signal

STATUS_NAME, STACKS_NAME = "arealite-status", "arealite-stacks"
# Neither the package nor torch, Ray or Slurm use a real-time signal.
STACK_SIGNAL = signal.SIGRTMIN + 5
# The process, and its descriptor.
_stacks: tuple[int, int] | None = None


def make_memory(name: str) -> int:
    """Return the descriptor of a new file in memory; what is written is appended."""
    descriptor = os.memfd_create(name)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def replace_content(descriptor: int, content: bytes) -> None:
    """Replace what the file holds. A reader may find it empty or cut for a moment, and reads again."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, content)


def dump_stacks_on_signal() -> int:
    """Have this process write its stacks on `STACK_SIGNAL`; returns the descriptor of the file."""
    global _stacks
    if _stacks is not None and _stacks[0] == os.getpid():
        return _stacks[1]
    descriptor = make_memory(STACKS_NAME)
    _stacks = os.getpid(), descriptor
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)
    return descriptor
