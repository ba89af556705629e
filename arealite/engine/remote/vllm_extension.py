"""AReaLite's part inside a vLLM worker: loads published weights.

vLLM finds it by `--worker-extension-cls` and by the name of its weight transfer. Runs in vLLM's process and
environment: imports nothing but torch, vLLM and the room `weights`. `VLLMClient` calls
`WeightLoading` over /collective_rpc (disk, shared memory), and `GroupTransfer` over /init_weight_transfer_engine …
/finish_weight_update (broadcast). vLLM's own transfer needs NCCL, and vLLM in the trainer's process; this one is a
torch process group, gloo on CPU. On CPU a reload leaves the packed head of a model with tied embeddings unchanged;
fixed here.
"""

from dataclasses import dataclass
from typing import Any

import torch

from arealite.weights.fingerprint import fingerprints
from arealite.weights.host_memory import SharedWeights
from arealite.weights.layout import TensorLayout
from arealite.weights.process_group import RECEIVE_TIMEOUT_S, GroupSettings, WeightGroup

try:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
except ImportError:
    # An older vLLM: its client refuses rollout.weight_update=broadcast.
    WeightTransferEngine = WeightTransferEngineFactory = None


class WeightLoading:
    """Mixed into vLLM's worker: `self` is the worker."""

    reload_weights: Any
    model_runner: Any
    vllm_config: Any

    def arealite_device(self) -> str:
        """Return the device type of the model. An answer also shows that this class is mixed in."""
        return next(self.model_runner.get_model().parameters()).device.type

    def arealite_load_folder(self, path: str) -> None:
        """Load weights from a Hugging Face folder."""
        self.reload_weights(weights_path=path)
        _repack_head(self.model_runner.get_model())

    def arealite_load_segment(self, path: str) -> None:
        """Load weights from shared memory."""
        SharedWeights.release_removed()
        shared = SharedWeights.attach(path)
        copies = ((name, tensor.clone()) for name, tensor in shared.tensors.items())
        self.reload_weights(weights_iterator=copies)
        _repack_head(self.model_runner.get_model())

    def arealite_fingerprints(self) -> dict[str, tuple[str, str]] | None:
        """Return the fingerprint of each tensor of this worker; None if it holds shards."""
        if self.vllm_config.parallel_config.world_size > 1:
            return None
        model = self.model_runner.get_model()
        # On CPU, vLLM packs matrices for its kernels and empties them: only norms, biases and embeddings can be
        # compared.
        named = model.named_parameters()
        tensors = {n: p for n, p in named if p.is_cuda or (p.dim() == 1 and p.numel())}
        for name, module in model.named_modules():
            if hasattr(module, "org_vocab_size") and hasattr(module, "weight"):
                # Without the rows that pad the vocabulary.
                tensors[f"{name}.weight"] = module.weight[: module.org_vocab_size]
        return fingerprints(tensors.items())


def _repack_head(model: torch.nn.Module) -> None:
    """Pack the head's weight again for CPU kernels: vLLM's reload does not do it for a tied head."""
    if next(model.parameters()).device.type != "cpu":
        return
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None and hasattr(method, "process_weights_after_loading"):
        method.process_weights_after_loading(head)


if WeightTransferEngine is not None:

    @dataclass
    class Portion:
        """The tensors that the trainer broadcasts next, in this order."""

        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]

    class GroupTransfer(WeightTransferEngine):
        """Receives weights over a torch process group, as vLLM's own transfers do over NCCL."""

        init_info_cls = GroupSettings
        update_info_cls = Portion
        group: WeightGroup | None = None

        def init_transfer_engine(self, init_info: GroupSettings) -> None:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            device = self.device if init_info.backend == "nccl" else "cpu"
            self.group = WeightGroup(init_info, init_info.rank_offset + rank, RECEIVE_TIMEOUT_S, device)

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Portion) -> None:
            if self.group is None:
                raise RuntimeError("this worker has joined no group: call /init_weight_transfer_engine first")
            layout = TensorLayout.from_lists(update_info.names, update_info.dtype_names, update_info.shapes)
            received = self.group.receive(layout)
            self.model.load_weights((name, t.to(self.device)) for name, t in received.items())

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_head(self.model)

        def shutdown(self) -> None:
            self.group = None

    WeightTransferEngineFactory.register_engine("arealite", GroupTransfer)  # pyright: ignore
