"""Imports torch's compiler in a thread, while a model is loaded.

Reading weights, copying them and starting CUDA are mostly outside of Python, so the import costs little beside them.
"""

import functools
import importlib
import threading

# `torch.compile` imports them when it is first called.
_MODULES = ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.compile_fx")


@functools.cache
def import_compiler() -> threading.Thread:
    """Start the import at the first call; return its thread, which the caller joins before it compiles."""
    thread = threading.Thread(target=_import, name="compiler-imports")
    thread.start()
    return thread


def _import() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    # Hashes of the files of torch and Triton, which are kept. The key of every cached graph contains both.
    importlib.import_module("torch._inductor.codecache").torch_key()
    triton = importlib.import_module("torch._inductor.runtime.triton_compat")
    if triton.HAS_TRITON:
        triton.triton_key()
