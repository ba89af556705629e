"""Routing of mixtures of experts in training: replays recorded experts, balances the load.

`Routing` hooks into every router of a model. Given the experts that tokens took on the server, it uses these, with
weights computed from the trainer's own router logits, so that gradients reach the router as usual. It also counts the
load of the experts of each layer in training passes, adds the load-balancing loss of `router_aux_loss_coef`, and moves
the correction biases by `router_bias_update_rate`. Used by `PackedModel`.

N packed tokens, L layers with experts, E experts of a layer, K experts of a token.
"""

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import ConfigError, TrainingError
from arealite.api.io_struct import Stats
from arealite.engine.fsdp.parallel import Layout
from arealite.utils.routing import expert_blocks, num_experts


def _share_of_all(router: Any, logits: Tensor, index: Tensor) -> Tensor:
    weights = logits.float().softmax(dim=-1).gather(1, index)
    return weights / weights.sum(dim=-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _share_of_chosen(router: Any, logits: Tensor, index: Tensor) -> Tensor:
    return logits.gather(1, index).softmax(dim=-1)


def _sigmoid(router: Any, logits: Tensor, index: Tensor) -> Tensor:
    weights = logits.sigmoid().gather(1, index)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


# The buffer of routers that are balanced without a loss (arXiv 2408.15664). The optimizer does not train it.
_BIAS = "e_score_correction_bias"
# How a family computes the weights [N, K] of the chosen experts from router logits [N, E].
WEIGHTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "qwen2_moe": _share_of_all,
    "qwen3_moe": _share_of_all,
    "olmoe": _share_of_all,
    "mixtral": _share_of_all,
    "gpt_oss": _share_of_chosen,
    "deepseek_v3": _sigmoid,
    "glm4_moe": _sigmoid,
}


class Routing:
    """The routers of one model, if it has any. `load` and `totals` grow from `begin_step` to `end_step`.

    On a rank of a pipeline only the layers `own` have hooks. Statistics are those of all layers.
    """

    def __init__(self, model: PreTrainedModel, config: TrainEngineConfig, own: Container[int] | None = None):
        blocks = expert_blocks(model)
        if config.router_bias_update_rate and not any(hasattr(b.router, _BIAS) for b in blocks):
            raise ConfigError(
                f"router_bias_update_rate={config.router_bias_update_rate} moves the correction biases of routers, "
                f"but {type(model).__name__} has none: leave it out, or set router_aux_loss_coef"
            )
        self.aux_loss_coef, self.bias_rate = config.router_aux_loss_coef, config.router_bias_update_rate
        # Weight of the load-balancing loss of one layer and micro-batch.
        self.balance: Tensor | None = None
        self.model_type = model.config.get_text_config().model_type
        self.num_experts = num_experts(model.config)
        self.top_k = int(getattr(model.config.get_text_config(), "num_experts_per_tok", 0))
        self.num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
        # Layers with experts of the whole model, and which of them are on this rank.
        self.layers = [int(block.layer.self_attn.layer_idx) for block in blocks]  # pyright: ignore
        self.rows = [row for row, layer in enumerate(self.layers) if own is None or layer in own]
        blocks = [blocks[row] for row in self.rows]
        self.routers = [block.router for block in blocks]
        self.load = [torch.zeros(self.num_experts, device="cpu") for _ in blocks]
        # Entropy of the router, tokens, tokens with a record, recorded experts that the trainer would not have chosen.
        self.totals = [torch.zeros(4, device="cpu") for _ in blocks]
        for number, block in enumerate(blocks):
            block.layer.register_forward_pre_hook(partial(_take_layout, block.router, number), with_kwargs=True)
            block.router.register_forward_hook(partial(self._after_router, number))

    def unpack(self, record: Tensor) -> Tensor:
        """Return recorded experts `[N, L · K]` as `[own layers, N, K]`.

        SGLang records layers without experts too.
        """
        if not self.layers or self.model_type not in WEIGHTS:
            raise ConfigError(
                f"rollout.routing_replay does not know how {self.model_type} weighs experts: it supports "
                f"{', '.join(sorted(WEIGHTS))}. Set routing_replay=false"
            )
        count, rest = divmod(record.shape[1], self.top_k)
        if rest or count not in (len(self.layers), self.num_layers):
            raise TrainingError(
                f"a recorded token has {record.shape[1]} experts, but the trained model has {len(self.layers)} layers "
                f"with {self.top_k} experts of a token: server and trainer must run the same model"
            )
        layers = record.long().unflatten(1, (count, self.top_k)).transpose(0, 1)
        layers = layers if count == len(self.layers) else layers[self.layers]
        return layers[self.rows]

    def _after_router(self, number: int, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """Put recorded experts in the place of the router's own."""
        logits, weights, index = output
        record = router.recorded_experts
        is_counted, known, changed = router.training and torch.is_grad_enabled(), None, None
        if record is not None:
            known = ((record >= 0) & (record < self.num_experts)).all(dim=1)
            own, index = index, torch.where(known[:, None], record, index)
            weights = WEIGHTS[self.model_type](router, logits, index).to(weights.dtype)
            changed = (index[:, :, None] != own[:, None]).all(dim=2) if is_counted else None
        if self.balance is not None and torch.is_grad_enabled():
            weights = _AddLoss.apply(weights, self.balance * _balance_loss(logits, index, router.real_tokens))
        if is_counted:
            self._count(number, logits.detach(), index, known, changed, router.real_tokens)
        return logits, weights, index

    @torch.no_grad()
    def _count(
        self, number: int, logits: Tensor, index: Tensor, known: Tensor | None, changed: Tensor | None,
        real: Tensor | None,
    ) -> None:  # fmt: skip
        logp = logits.float().log_softmax(dim=-1)
        counts = torch.ones_like(logp[:, 0]) if real is None else real.to(logp)
        one_hot = torch.zeros_like(logp).scatter_add_(1, index, counts[:, None].expand(index.shape))
        totals = [-((logp * logp.exp()).sum(dim=1) * counts).sum(), counts.sum()]
        totals.append(logp.new_zeros(()) if known is None else (known * counts).sum())
        totals.append(logp.new_zeros(()) if changed is None else (changed * counts[:, None]).sum())
        self.load[number] = self.load[number].to(logits.device) + one_hot.sum(dim=0)
        self.totals[number] = self.totals[number].to(logits.device) + torch.stack(totals)

    def begin_step(self, num_micro_batches: int, factor: float) -> None:
        """Begin the passes of a training step, whose gradients are divided by `factor` after them."""
        # With `compile` log-probs are computed by the graph of training, which has counted their tokens too.
        for part in (*self.load, *self.totals):
            part.zero_()
        if self.aux_loss_coef and self.layers:
            # FSDP averages gradients over its ranks, so this is a mean over ranks, micro-batches and layers.
            self.balance = torch.tensor(factor * self.aux_loss_coef / (num_micro_batches * len(self.layers)))

    @torch.no_grad()
    def end_step(self, layout: Layout | None, moves_biases: bool) -> Stats:
        """Return statistics of the training passes since the last call, over all ranks; may move biases."""
        if not self.layers:
            return {}
        self.balance = None
        load, totals = self._take_counts(layout)
        if self.bias_rate and moves_biases:
            for router, own in zip(self.routers, load[self.rows], strict=True):
                getattr(router, _BIAS).add_(self.bias_rate * torch.sign(own.mean() - own))
        imbalance = load.amax(dim=1) / load.mean(dim=1).clamp(min=1e-9)
        entropy, tokens, recorded, changed = totals.tolist()
        stats = {
            "moe/load_imbalance": imbalance.mean().item(),
            "moe/load_imbalance/max": imbalance.max().item(),
            "moe/idle_experts": (load == 0).float().mean().item(),
            "moe/router_entropy": entropy / max(tokens, 1.0),
        }
        if layout is not None and layout.experts is not None:
            ranks = load.unflatten(1, (layout.strategy.expert * layout.strategy.tensor, -1)).sum(dim=2)
            stats["moe/rank_imbalance"] = (ranks.amax(dim=1) / ranks.mean(dim=1).clamp(min=1e-9)).mean().item()
        if recorded:
            changed /= recorded * self.top_k
            stats |= {"moe/replayed": recorded / tokens, "moe/changed_experts": changed}
        return stats

    def _take_counts(self, layout: Layout | None) -> tuple[Tensor, Tensor]:
        """Return `load [L, E]` and the sum of `totals` over layers, of all ranks; clear them."""
        device = self.load[0].device if layout is None else layout.mesh.device_type
        load, totals = torch.zeros(len(self.layers), self.num_experts, device=device), torch.zeros(4, device=device)
        for row, own_load, own_totals in zip(self.rows, self.load, self.totals, strict=True):
            load[row] += own_load.to(device)
            totals += own_totals.to(device)
        self.load = [torch.zeros_like(part) for part in self.load]
        self.totals = [torch.zeros_like(part) for part in self.totals]
        if layout is not None:
            for group in (layout.fsdp.get_group(), layout.pp_group):
                for part in (load, totals):
                    dist.all_reduce(part, group=group)
        return load, totals


def _balance_loss(logits: Tensor, index: Tensor, real: Tensor | None) -> Tensor:
    """Return E · Σ share of choices · mean probability over `real` tokens (arXiv 2101.03961, eq. 4).

    It is 1 for equal load, and 0 without any token.
    """
    chosen = torch.zeros_like(logits).scatter_add_(1, index, torch.ones_like(index, dtype=logits.dtype)).float()
    probs = logits.float().softmax(dim=-1)
    if real is None:
        chosen, probs = chosen.mean(dim=0), probs.mean(dim=0)
    else:
        share = real.float()[:, None] / real.sum().clamp(min=1)
        chosen, probs = (chosen * share).sum(dim=0), (probs * share).sum(dim=0)
    return logits.shape[1] * (chosen / index.shape[1] * probs).sum()


class _AddLoss(torch.autograd.Function):
    """Identity that adds a loss: its gradient is 1, whatever the gradient of the value is."""

    @staticmethod
    def forward(ctx, value, loss):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], grads[0].new_ones((), dtype=torch.float32)


def _take_layout(router: Any, number: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Hand the layer's recorded experts, and which tokens are real, to its router.

    With each call of the layer, because recomputed layers run again in the backward pass, after other micro-batches.
    """
    layout = kwargs.get("packed_layout")
    record = None if layout is None else layout.routed_experts
    router.recorded_experts = None if record is None else record[number]
    router.real_tokens = None if layout is None else layout.real_tokens
