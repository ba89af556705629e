"""Replaces SGLang's compiled kernels where there are none (a CPU without AMX).

SGLang imports names from here at start-up and calls two operators that set up threads. All names exist; calling one
raises an error that says what is missing.
"""

import torch

__version__ = "0.4.10"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this CPU")

    return missing


_ops = torch.library.Library("sgl_kernel", "FRAGMENT")
_ops.define("init_cpu_threads_env(str cpuids) -> str")
_ops.impl("init_cpu_threads_env", lambda cpuids: "", "CompositeExplicitAutograd")
_ops.define("initialize(int size, int rank) -> ()")
_ops.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def _without_pinning(make):
    def made(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)

    return made


# Its LoRA layers ask for pinned memory, which only an accelerator has.
if not torch.cuda.is_available():
    for _name in ("tensor", "empty", "zeros", "ones", "full", "arange"):
        setattr(torch, _name, _without_pinning(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
