"""Tests of the formulas for activations against transformers' layers, run on tensors that have no data."""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.utils.memory.estimate import activation_bytes, backward_bytes
from arealite.utils.memory.model_size import ModelSize

TOKENS, LAYERS, HIDDEN = 16384, 4, 64
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": 352, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 32768,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
CONFIGS = {"qwen2": Qwen2Config(**SIZES), "qwen3": Qwen3Config(**SIZES), "experts": Qwen3MoeConfig(**SIZES, **EXPERTS)}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that exist, and the most that existed at once."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            if id(storage) not in self._known:
                self._known.add(id(storage))
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size


class Kernel(torch.autograd.Function):
    """Allocates and keeps what variable-length attention does."""

    @staticmethod
    def forward(ctx, query, key, value):
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx, *grads):
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:3])


def attend(module, query, key, value, mask, **kwargs):
    query, key, value = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return Kernel.apply(query, key, value).unsqueeze(0), None


AttentionInterface.register("kernel_of_a_test", attend)
AttentionMaskInterface.register("kernel_of_a_test", lambda *args, **kwargs: None)


def measure(config, recomputes: bool) -> tuple[float, float]:
    """Return the bytes per token that layers keep, and the most that exist in the backward pass."""
    counter = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), counter:
        model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="kernel_of_a_test").train()
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.norm = torch.nn.Identity()
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        before = counter.now
        hidden = model(input_ids=ids, position_ids=torch.arange(TOKENS)[None], use_cache=False).last_hidden_state
        kept = counter.now - before
        counter.peak = 0
        hidden.sum().backward()
    return kept / TOKENS, (counter.peak - before) / TOKENS


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_layers_keep_and_recompute_what_the_formulas_say(kind, recomputes):
    kept, peak = measure(CONFIGS[kind], recomputes)
    size, config = ModelSize.of(CONFIGS[kind].to_dict()), TrainEngineConfig(path="", optimizer=OptimizerConfig())
    # Besides, there are the output of the last layer, positions and rotary angles.
    others = 2 * HIDDEN + 8 + 4 * size.head_dim
    estimated = activation_bytes(size, config, recomputes)
    assert estimated == pytest.approx(kept - others, rel=0.05)
    assert 0.97 < (estimated + backward_bytes(size, config, recomputes) + others) / peak < 1.05
