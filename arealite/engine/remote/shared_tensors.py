"""Tensors in the form of SGLang's `/update_weights_from_tensor`: shared memory and its name.

Pickles are only written here, never read; SGLang's reader accepts nothing but tensors.
"""

from __future__ import annotations

import base64
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing


def share(tensors: dict[str, torch.Tensor], num_ranks: int) -> tuple[list[str], list[torch.Tensor]]:
    """Copy tensors into shared memory.

    Returns one description for each rank of the server, and the copies: their memory is freed with them, so they must
    live until the server has answered.
    """
    copies = [(name, tensor.clone()) for name, tensor in tensors.items()]
    before = torch.multiprocessing.get_sharing_strategy()
    # By name: file descriptors pass between parent and child only.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        pickles = [bytes(ForkingPickler.dumps(copies)) for _ in range(num_ranks)]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return [base64.b64encode(p).decode() for p in pickles], [tensor for _, tensor in copies]
