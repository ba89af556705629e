"""AdamW with its two moments in bfloat16: a third of the optimizer memory of fp32 weights, half of it for bf16 ones.

Used for `optimizer.type=adamw_bf16`. All arithmetic is fp32; what is stored in bfloat16 (moments, and weights where those are
bfloat16) is rounded stochastically, so that small updates are kept on average instead of lost.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


class LowMemoryAdamW(torch.optim.Optimizer):
    """Decoupled weight decay (arXiv 1711.05101), moments in bfloat16. Works on sharded parameters."""

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None, "this optimizer takes no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.nn.Parameter, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        count = float(state["step"])
        beta1, beta2 = group["betas"]
        weight, grad = _local(parameter), _local(parameter.grad).float()
        first, second = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
        mean = first.float().lerp_(grad, 1.0 - beta1)
        square = second.float().mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        store_rounded(first, mean)
        store_rounded(second, square)
        step = mean.div_(1.0 - beta1**count)
        step.div_((square.div_(1.0 - beta2**count)).sqrt_().add_(group["eps"]))
        updated = weight.float() * (1.0 - group["lr"] * group["weight_decay"]) - group["lr"] * step
        store_rounded(weight, updated)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def store_rounded(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy fp32 `value` into `target`; into bfloat16 it goes up or down at random, right on average."""
    if target.dtype != torch.bfloat16:
        target.copy_(value)
        return
    noise = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device)
    bits = (value.contiguous().view(torch.int32) + noise) & -(1 << 16)
    target.copy_(bits.view(torch.float32))
