"""GPU memory that other processes can map, by CUDA's driver functions for inter-process memory.

torch can share tensors as well, but it counts the processes that map them in a way that fits one producer and one
consumer: it keeps memory that nobody uses any more, and warns at exit. Here the process that allocates the memory
decides how long it lives, and `DeviceWeights` tells the others by its file.
"""

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

_HANDLE_BYTES = 64
_OUT_OF_MEMORY = 2
_LAZY_PEER_ACCESS = 1
_Pointer = ctypes.c_uint64


class _Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * _HANDLE_BYTES)]


class DeviceMemory:
    """A range of GPU memory that is freed, or unmapped, when nothing refers to it any more."""

    def __init__(self, address: int, size: int, device: int, release: str):
        self.address, self.size, self.device = address, size, device
        # The end of the process releases it as well.
        weakref.finalize(self, _release, release, address, device).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """Return the bytes as a tensor, which keeps this object alive."""
        return torch.as_tensor(self, device=f"cuda:{self.device}")

    def handle(self) -> bytes:
        """Return what another process needs to map this memory."""
        handle = _Handle()
        _call("cuIpcGetMemHandle", ctypes.byref(handle), _Pointer(self.address), device=self.device)
        return bytes(handle.bytes)


def allocate(size: int) -> DeviceMemory:
    """Allocate memory on the current GPU."""
    address, device = _Pointer(), torch.cuda.current_device()
    arguments = (ctypes.byref(address), ctypes.c_size_t(size))
    if _status("cuMemAlloc_v2", *arguments, device=device) == _OUT_OF_MEMORY:
        torch.cuda.empty_cache()  # memory that torch has cached and nobody uses
        _call("cuMemAlloc_v2", *arguments, device=device)
    return DeviceMemory(address.value, size, device, "cuMemFree_v2")


def open_handle(handle: bytes, size: int, device: int) -> DeviceMemory:
    """Map memory of another process; raises `ValueError` if it is smaller than `size`."""
    if len(handle) != _HANDLE_BYTES:
        raise ValueError(f"a CUDA IPC handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    address, found = _Pointer(), ctypes.c_size_t()
    opened = _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle))
    _call(
        "cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS), device=device
    )  # fmt: skip
    memory = DeviceMemory(address.value, size, device, "cuIpcCloseMemHandle")
    _call("cuMemGetAddressRange_v2", None, ctypes.byref(found), address, device=device)
    if found.value < size:
        raise ValueError(f"the mapped memory has {found.value} bytes, {size} are needed")
    return memory


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _status(function: str, *arguments: Any, device: int) -> int:
    # Makes torch's context current in this thread.
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        return getattr(_driver(), function)(*arguments)


def _call(function: str, *arguments: Any, device: int) -> None:
    status = _status(function, *arguments, device=device)
    if status:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        raise RuntimeError(f"{function}: {(name.value or b'error').decode()} ({status})")


def _release(function: str, address: int, device: int) -> None:
    """Free or unmap memory.

    The status is not looked at: it is an error if the other process has ended, which releases the memory too.
    """
    _status(function, _Pointer(address), device=device)
