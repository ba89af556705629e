"""The device that a model trains on, its allocator, and whether its kernels repeat their results."""

import os
import sys

import torch

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import ConfigError

# cuBLAS reads it when a process first multiplies. With other sizes of its workspace it may add in another order.
_CUBLAS_ENV, _CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
# Where users set torch's allocator.
_ALLOCATOR_ENVS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def choose_device(config: TrainEngineConfig) -> str:
    """Return cpu or cuda, and make it the device of this process."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device: set device=cpu or auto")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        _grow_segments()
        # The backward pass needs the interpreter for every layer: a busy thread of rollouts must give it back soon.
        sys.setswitchinterval(1e-4)
    if config.deterministic and device == "cuda":
        repeat_results()
    return device


def _grow_segments() -> None:
    """Have the allocator extend its segments, unless a user has set it.

    Micro-batches have different sizes. With segments of fixed size, an eighth of the memory was in gaps that nothing
    fitted into.
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR_ENVS):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def repeat_results() -> None:
    """Have kernels of this process add in a fixed order: attention, embeddings, repeated rows."""
    os.environ.setdefault(_CUBLAS_ENV, _CUBLAS_WORKSPACE)
    # A kernel that cannot is named in a warning; a replay shows whether it matters.
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would overwrite all new memory; no code here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
