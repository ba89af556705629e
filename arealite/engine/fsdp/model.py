"""Finds, loads and shards Hugging Face models, and runs them on packed micro-batches.

`PackedModel` is the root module: its forward pass takes one packed micro-batch and returns per-token results. So FSDP
gathers the output head with the rest of the model, and `[N, V]` logits never exist. Used by `FSDPEngine`.

N packed tokens, M tokens whose log-prob is requested, H hidden size, V vocabulary.
"""

import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    logging,
)

from arealite.algo.logprobs import token_logprobs
from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import ROUTED_EXPERTS, Batch
from arealite.engine.fsdp.lora import add_adapters
from arealite.engine.fsdp.low_bit import quantize_frozen
from arealite.engine.fsdp.packed_attention import ATTENTION, PackedLayout
from arealite.engine.fsdp.parallel import Layout, sum_pieces, trades_heads
from arealite.engine.fsdp.ring import Piece, piece_multiple, piece_of
from arealite.engine.fsdp.routing import Routing
from arealite.engine.fsdp.shared_prefix import PrefixPlan
from arealite.engine.fsdp.tensor_parallel import find_rows
from arealite.engine.fsdp.vision import insert_images, vision_parameters
from arealite.utils.activity import activity
from arealite.utils.console import show_message
from arealite.utils.data import padding
from arealite.utils.decoders import (
    TRIAL_TOKENS,
    check_interface,
    check_trial,
    has_vision,
    load_decoder,
    model_errors,
    original_length,
    read_model_config,
)
from arealite.utils.model_config import check_model, reject_capped_attention

# The key that a micro-batch has if it holds no token of the batch.
FILLER = "is_filler"


class PackedModel(nn.Module):
    """A decoder with a language-model head (`logp`, `entropy`) or a scalar head (`values`).

    In a context-parallel group each rank computes an equal piece of the tokens, and all ranks get the full result.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainEngineConfig,
        layout: Layout | None = None,
        routing: Routing | None = None,
    ):
        """`routing` is that of all stages of a rank, if `model` is one of them."""
        super().__init__()
        self.model: Any = model
        self.chunk_size = config.logprob_chunk_size or 1024
        self.fused = config.compile
        self.context_group = layout.cp_group if layout is not None else None
        self.tensor_group = layout.tp_group if layout is not None else None
        self.ring = layout is not None and not trades_heads(model.config, layout.strategy)
        text = model.config.get_text_config()
        self.softcap = getattr(text, "final_logit_softcapping", None)
        # Cohere multiplies logits, Granite divides them.
        self.logit_scale = getattr(text, "logit_scale", 1.0) / getattr(text, "logits_scaling", 1.0)
        self.max_length = original_length(model.config)
        # torch's variable-length attention has neither sinks nor float32.
        has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
        self.padded = has_sinks or config.dtype == "float32"
        self.has_lm_head = model.get_output_embeddings() is not None
        self.routing = routing or Routing(model, config)
        # A reference or a critic is another model, which routes tokens itself.
        self.replays = config.optimizer is not None and self.has_lm_head
        # Set by `shard`: FSDP only converts types, it divides nothing.
        self.is_one_shard = False
        self.trains_vision = has_vision(model.config) and not config.freeze_vision

    def forward(
        self, mb: Batch, lengths: list[int], temperature: float, with_entropy: bool, prefixes: PrefixPlan | None = None
    ) -> Batch:
        hidden, piece = self.hidden_states(mb, lengths, prefixes)
        return self.results(hidden, piece, mb, temperature, with_entropy, prefixes)

    def results(
        self, hidden: torch.Tensor, piece: Piece | None, mb: Batch, temperature: float, with_entropy: bool,
        prefixes: PrefixPlan | None,
    ) -> Batch:  # fmt: skip
        """Return what the head makes of this rank's piece of the tokens; None if it has all."""
        ids, targets = mb["input_ids"], mb["target_positions"]
        if not self.has_lm_head:
            size = len(ids) if prefixes is None else len(prefixes.unique)
            tokens = torch.arange(size, device=hidden.device)
            rows, kept = _rows(tokens, piece)
            values = self.model.score(hidden[rows]).squeeze(-1).float()
            values = self._scatter(values, tokens[kept], size)
            return {"values": values if prefixes is None else values.index_select(0, prefixes.expand)}
        before, labels = targets - 1, ids[targets]
        if prefixes is not None:
            before, labels = prefixes.before, ids[prefixes.unique[prefixes.targets]]
        rows, kept = _rows(before, piece)
        # Rows may repeat (the last token before a branch): index_select adds up their gradients.
        states = hidden.index_select(0, rows)
        if self.logit_scale != 1.0:
            states = states * self.logit_scale
        logp, entropy = self._logprobs(states, labels[kept], temperature, with_entropy)
        outputs = {"logp": logp, "entropy": entropy} if with_entropy else {"logp": logp}
        return {key: self._spread(value, kept, targets, len(ids), prefixes) for key, value in outputs.items()}

    @torch.no_grad()
    def check_logprobs(self, device: str) -> None:
        """Implement the function `check_logprobs`; a method, because FSDP gathers parameters around methods."""
        self.eval()
        vocab_size = self.model.get_output_embeddings().weight.shape[0]
        ids = torch.arange(1, TRIAL_TOKENS + 1) * 7919 % vocab_size
        lengths = [TRIAL_TOKENS // 3, TRIAL_TOKENS]
        mb = {
            "input_ids": torch.cat([ids[: lengths[0]], ids]),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]),
            "cu_seqlens": torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32),
            "target_positions": lengths[0] + torch.arange(1, TRIAL_TOKENS),
        }
        mb = {key: value.to(device) for key, value in mb.items()}
        logp = self.forward(mb, lengths, temperature=1.0, with_entropy=False)["logp"]
        check_trial(self.model, ids.to(device), logp[mb["target_positions"]].cpu())

    def hidden_states(
        self, mb: Batch, lengths: list[int], prefixes: PrefixPlan | None, received: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Piece | None]:
        """Return the hidden states of this rank's piece of the tokens, and the piece; None if it has all.

        The layers begin with the embedded tokens, or with the states `received` from an earlier pipeline stage.
        """
        self._check_length(max(lengths))
        ids, positions, cu_seqlens = mb.get("model_ids", mb["input_ids"]), mb["position_ids"], mb["cu_seqlens"]
        segments, routed = None, mb.get(ROUTED_EXPERTS) if self.replays else None
        if prefixes is not None:
            ids, positions, segments = ids[prefixes.unique], positions[prefixes.unique], prefixes.attention
            routed = None if routed is None else routed[prefixes.unique]
        piece, size, missing = None, len(ids), 0
        if self.context_group is not None:
            # Pad the tokens to equal pieces; the padding is a sequence of its own.
            missing = -len(ids) % piece_multiple(dist.get_world_size(self.context_group), self.ring)
            if missing:
                ids = nn.functional.pad(ids, (0, missing))
                positions = torch.cat([positions, torch.arange(missing, device=ids.device)])
                cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + missing])
                lengths = [*lengths, missing]
                segments = None if segments is None else segments.filled(missing)
                if routed is not None:
                    none = padding(ROUTED_EXPERTS, routed)
                    routed = nn.functional.pad(routed, (0, 0, 0, missing), value=none)
            piece = piece_of(lengths if prefixes is None else [len(ids)], self.context_group, self.ring)
            ids, positions = piece.take(ids), piece.take(positions)
            routed = None if routed is None else piece.take(routed)
        inputs = {k: mb[k] for k in ("pixel_values", "image_grid_thw") if k in mb}
        has_images = bool(inputs)
        if received is not None:
            inputs = {"inputs_embeds": received[None]}
        elif "image_tokens" in mb:
            inputs = {"inputs_embeds": insert_images(self.model, ids, mb)[None]}
        else:
            inputs["input_ids"] = ids[None]
        positions = mb["rope_positions"][:, None] if "rope_positions" in mb else positions[None]
        layout = PackedLayout.make(
            cu_seqlens, lengths, segments, self.context_group, self.ring, self.fused, self.padded
        )
        layout.real_tokens = _real_tokens(0 if FILLER in mb else size, size + missing, piece, ids.device)
        if routed is not None:
            layout.routed_experts = self.routing.unpack(routed)
        outputs = self.model.base_model(position_ids=positions, use_cache=False, packed_layout=layout, **inputs)
        hidden = outputs.last_hidden_state.squeeze(0)
        if self.trains_vision and not has_images:
            # Other ranks may have images now, and FSDP needs a gradient from every rank.
            hidden = hidden + 0.0 * sum(p.sum() for p in vision_parameters(self.model))
        return hidden, piece

    def _check_length(self, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise ConfigError(
                f"a sequence has {length} tokens; beyond {self.max_length} this model's rotary angles depend on "
                "the other sequences of a batch: make prompts and answers shorter"
            )

    def _logprobs(self, states, labels, temperature: float, with_entropy: bool):
        """Return log-prob and entropy `[M]` of `labels` predicted from `states [M, H]`."""
        head = self.model.get_output_embeddings()
        settings = {"temperature": temperature, "softcap": self.softcap, "chunk_size": self.chunk_size}
        settings |= {"with_entropy": with_entropy}
        if self.tensor_group is None or not isinstance(head.weight, DTensor):
            return token_logprobs(states, head.weight, labels, head.bias, fused=self.fused, **settings)
        shard, group = head.weight.to_local(), self.tensor_group
        rows, here = find_rows(labels, len(shard), group)
        return token_logprobs(states, shard, rows, here=here, group=group, **settings)

    def _spread(
        self, values: torch.Tensor, kept: torch.Tensor | slice, targets: torch.Tensor, num_tokens: int,
        prefixes: PrefixPlan | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return `[N]` with the values of all `targets`, and zeros elsewhere.

        `values` are those of the targets `kept` on this rank; a target that several rows share has one value.
        """
        if prefixes is None:
            return self._scatter(values, targets[kept], num_tokens)
        shared = self._scatter(values, prefixes.targets[kept], len(prefixes.unique))
        return values.new_zeros(num_tokens).index_copy(0, targets, shared.index_select(0, prefixes.expand[targets]))

    def _scatter(self, values: torch.Tensor, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return `[num_tokens]` with `values` at `tokens` of all context-parallel ranks, and zeros elsewhere."""
        whole = values.new_zeros(num_tokens).index_copy(0, tokens, values)
        return whole if self.context_group is None else sum_pieces(whole, self.context_group)


def _real_tokens(num_real: int, size: int, piece: Piece | None, device: torch.device) -> torch.Tensor | None:
    """Return which tokens of this rank's piece are among the first `num_real`; None if all are."""
    if num_real == size:
        return None
    real = torch.arange(size, device=device) < num_real
    return real if piece is None else piece.take(real)


def _rows(tokens: torch.Tensor, piece: Piece | None) -> tuple[torch.Tensor, torch.Tensor | slice]:
    """Return the rows of computed `tokens` in this rank's piece, and which of the tokens are in it."""
    return (tokens, slice(None)) if piece is None else piece.rows(tokens)


def resolve_path(path: str) -> Path:
    """Return the local folder of a model; download it from the hub if `path` is not a folder."""
    check_model(path)
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model {path!r} is neither a local folder nor available from the hub ({error}): give an existing folder, "
            "or check the name and the network"
        ) from error


def load_config(folder: Path, scalar_head: bool) -> PreTrainedConfig:
    config = read_model_config(folder, scalar_head)
    text = config.get_text_config()
    reject_capped_attention(text.model_type, getattr(text, "attn_logit_softcapping", None))
    if scalar_head:
        config.num_labels = 1
    return config


@functools.cache
def _note_slow_type(device: str, dtype: str) -> None:
    """Say once what to set if this CPU emulates bfloat16, which is much slower than float32."""
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    if not on_cpu or dtype != "bfloat16" or not torch.backends.mkldnn.is_available():
        return
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # torch's own warning is a stack of C++ frames.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        show_message("note: bfloat16 is slow on this CPU: set the model's dtype to float32 (actor.dtype=float32)")


def load_model(
    folder: Path, hf_config: PreTrainedConfig, config: TrainEngineConfig, scalar_head: bool
) -> PreTrainedModel:
    """Load the full model on the host, in the dtype that the optimizer holds.

    Frozen layers are in low bits if the config says so.
    """
    # A run shows one live table on the console.
    logging.disable_progress_bar()
    _note_slow_type(config.device, config.dtype)
    attention: str | dict[str, str] = ATTENTION
    if scalar_head:
        cls = AutoModelForSequenceClassification
    elif has_vision(hf_config):
        cls = AutoModelForImageTextToText
        attention = {"": ATTENTION, "text_config": ATTENTION, "vision_config": "sdpa"}
    else:
        cls = AutoModelForCausalLM
    if type(hf_config) not in cls._model_mapping:
        raise ConfigError(
            f"transformers has no {cls.__name__} for model type {hf_config.model_type!r}: use another model"
        )
    model_class: Any = cls._model_mapping[type(hf_config)]
    check_interface(model_class)
    dtype = getattr(torch, config.param_dtype)
    if config.init_from_scratch:
        # Made on the current torch.device: the meta device allocates nothing.
        with model_errors(folder):
            model = cls.from_config(hf_config, dtype=dtype, attn_implementation=attention)
    else:
        options = {"config": hf_config, "dtype": dtype, "attn_implementation": attention}
        with activity.doing(f"loading {folder}"):
            model = load_decoder(cls, folder, has_new_head=scalar_head, **options)
    model.config.architectures = [model_class.__name__] if scalar_head else hf_config.architectures
    if has_vision(hf_config) and config.freeze_vision:
        for parameter in vision_parameters(model):
            parameter.requires_grad_(False)
    if config.lora_rank:
        add_adapters(model, config)
    if config.frozen_weight_dtype != "auto":
        quantize_frozen(model, config)
    model.train()
    return model


def disable_dropout(model: nn.Module) -> None:
    """Turn off all randomness of training mode: dropout, layer drop and router noise.

    The model stays in training mode, which gradient checkpointing needs, and its config keeps its values for export.
    """
    for module, name, _ in list(random_settings(model)):
        setattr(module, name, 0.0)


def random_settings(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """Yield owner, name and value of each probability of dropout, layer drop and router noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            yield module, "p", module.p
        for name, value in vars(module).items():
            if isinstance(value, float) and re.search("drop|jitter", name):
                yield module, name, value
