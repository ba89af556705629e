"""Records which experts each token takes, for the trainer's routing replay.

The record lies beside the KV cache, one row for each of its tokens. So it is shared with cached prefixes, copied with
blocks and written again when keys are computed again. Made by the runners; a request reads its rows when it ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from arealite.api.errors import ConfigError
from arealite.utils.routing import expert_blocks, index_dtype, num_experts


class RoutingRecord:
    """Experts `[cache tokens, L · K]` of all tokens in the KV cache."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int):
        blocks = expert_blocks(model)
        if not blocks:
            raise ConfigError(
                f"record_routing records the experts of tokens, but {type(model).__name__} has no routers: leave "
                "routing_replay and record_routing out"
            )
        self.top_k = int(model.config.get_text_config().num_experts_per_tok)
        dtype = index_dtype(num_experts(model.config))
        shape = (num_blocks, block_size, len(blocks) * self.top_k)
        self.blocks = torch.zeros(shape, dtype=dtype, device=next(model.parameters()).device)
        self._rows = self.blocks.flatten(0, 1)
        self._write_to: torch.Tensor | None = None
        self._hooks = [
            block.router.register_forward_hook(partial(self._after_router, i)) for i, block in enumerate(blocks)
        ]

    @contextmanager
    def writing(self, write_to: torch.Tensor) -> Iterator[None]:
        """Write the experts of the pass in this block to the token positions `write_to [N]` of the cache."""
        self._write_to = write_to
        yield
        self._write_to = None

    def _after_router(self, layer: int, router: Any, args: Any, outputs: Any) -> None:
        self.write(layer, outputs[2])

    def write(self, layer: int, index: torch.Tensor) -> None:
        """Record the experts `[N, K]` of a layer, the `layer`-th one with experts."""
        if self._write_to is not None:
            columns = slice(layer * self.top_k, (layer + 1) * self.top_k)
            self._rows[self._write_to, columns] = index.to(self._rows.dtype)

    def read(self, blocks: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return the rows of the first tokens in these blocks of the cache. Waits for the device."""
        rows = self.blocks[torch.from_numpy(blocks).to(self.blocks.device)]
        return rows.flatten(0, 1)[:num_tokens].cpu().numpy()

    def close(self) -> None:
        """Take the hooks out of the model, which another runner will use."""
        for hook in self._hooks:
            hook.remove()
