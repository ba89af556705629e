"""Tensors as SGLang takes them in `/update_weights_from_tensor`: in shared memory, with a pickle that says where.

Only ever made here, never read: SGLang's own reader on the other side accepts nothing but tensors. The memory is freed when the returned tensors are.
"""

from __future__ import annotations

import base64
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing

from arealite.weights.process_group import Spec


def share(tensors: dict[str, torch.Tensor], specs: list[Spec], num_ranks: int) -> tuple[list[str], list[torch.Tensor]]:
    """One description for each rank of the server, and the copies that must live until the server has answered."""
    copies = [(name, tensors[name].clone()) for name, _, _ in specs]
    before = torch.multiprocessing.get_sharing_strategy()
    # By name: descriptors of files pass between parent and child only.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        pickles = [bytes(ForkingPickler.dumps(copies)) for _ in range(num_ranks)]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    return [base64.b64encode(p).decode() for p in pickles], [tensor for _, tensor in copies]
