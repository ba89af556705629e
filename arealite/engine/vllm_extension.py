"""What AReaLite adds inside a vLLM worker, through vLLM's own `--worker-extension-cls`: loading weights that the trainer published.

Runs in vLLM's process and environment: imports nothing but torch and two small files of utils. `RemotevLLMEngine` calls it over /collective_rpc. vLLM's own
`reload_weights` does the work; on CPU it leaves the packed head of a model with tied embeddings as it was, which is mended here.
"""

from __future__ import annotations

from typing import Any

import torch

from arealite.utils.fingerprint import fingerprints
from arealite.utils.shared_weights import SharedWeights


class WeightLoading:
    """Mixed into vLLM's worker: `self` is the worker."""

    reload_weights: Any
    model_runner: Any
    vllm_config: Any

    def arealite_load(self, kind: str, path: str) -> None:
        """Load weights from a Hugging Face folder (`disk`) or from shared memory (`shm`)."""
        if kind == "shm":
            shared = SharedWeights.attach(path)
            copies = ((name, tensor.clone()) for name, tensor in shared.tensors.items())
            self.reload_weights(weights_iterator=copies)
        else:
            self.reload_weights(weights_path=path)
        model = self.model_runner.get_model()
        if next(model.parameters()).device.type == "cpu":
            _repack_head(model)

    def arealite_fingerprints(self) -> dict[str, tuple[str, str]] | None:
        """What this worker holds, tensor by tensor; None where it holds shards of them."""
        if self.vllm_config.parallel_config.world_size > 1:
            return None
        model = self.model_runner.get_model()
        # On CPU, matrices are packed for the kernels and emptied: norms, biases and embeddings can be compared.
        tensors = {
            n: p for n, p in model.named_parameters() if p.is_cuda or (p.dim() == 1 and p.numel())
        }
        for name, module in model.named_modules():
            if hasattr(module, "org_vocab_size") and hasattr(module, "weight"):
                # without the rows that pad the vocabulary
                tensors[f"{name}.weight"] = module.weight[: module.org_vocab_size]
        return fingerprints(tensors.items())


def _repack_head(model: torch.nn.Module) -> None:
    """CPU kernels use a packed copy of the head's weight; a tied head is no layer that vLLM's reload would pack anew."""
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None and hasattr(method, "process_weights_after_loading"):
        method.process_weights_after_loading(head)
