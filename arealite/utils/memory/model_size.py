"""Sizes of a model, read from the JSON of its folder: what memory estimates need.

Needs neither torch nor transformers, so launchers can estimate before they start a process. Training engines use the
same class for the model that they have loaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from arealite.api.alloc_mode import ParallelStrategy

# A header that is longer is damaged.
_LONGEST_HEADER = 1 << 28
# Families whose layers have two matrices after attention instead of three.
_WITHOUT_GATE = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "phi", "falcon", "bloom", "starcoder2")
# Families that normalize queries and keys.
_WITH_HEAD_NORMS = ("qwen3", "gemma3", "olmo2", "olmo3")

# Tested families that the trainer cannot divide over tensor ranks: transformers has no plan for their layers, or one in
# styles that the trainer does not have.
_WITHOUT_TENSOR_RANKS = ("glm4", "gpt2", "gpt_bigcode", "gpt_oss", "olmo2", "olmo3", "opt", "phi3")

# Linear layers of Llama and most others, by their second width besides `hidden`.
_KEY_LAYERS, _INNER_LAYERS = ("k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelSize:
    """Widths of a decoder's layers and its number of parameters."""

    hidden: int
    # Width of the layer after attention; of mixtures of experts, of all experts that a token takes.
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    # Parameters of a layer's attention.
    attention: int
    vocab: int
    context: int
    is_tied: bool
    # All parameters, also of a vision tower.
    parameters: int
    # Of mixtures of experts: experts of a layer, the width of one, and how many a token takes.
    experts: int = 0
    expert_inner: int = 0
    chosen_experts: int = 0
    # Numbers from which a layer makes the keys and values of a token (latent attention of DeepSeek); 0 for others.
    latent: int = 0
    # Whether queries and keys are normalized.
    has_head_norms: bool = False
    # `model_type` of the decoder; empty for sizes without a config.json.
    family: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int | None = None) -> "ModelSize":
        """Return the sizes of the model of a config.json; its parameters are counted unless given."""
        text = config.get("text_config") or config

        def number(*names: str, default: int = 0) -> int:
            found = next((text[name] for name in names if text.get(name)), default)
            return max(found) if isinstance(found, list) else found

        hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head", default=1)
        vocab, layers = number("vocab_size"), number("num_hidden_layers", "n_layer")
        inner = number("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        kv_heads = number("num_key_value_heads", default=heads)
        # The cache has one width: that of the widest layers (Gemma 4).
        wide = [layer.get("head_dim", 0) for layer in (text.get("per_layer_config") or {}).values()]
        head_dim = max(number("head_dim", default=hidden // heads), number("global_head_dim"), *wide)
        latent, attention = 0, 2 * hidden * (heads + kv_heads) * head_dim
        if text.get("kv_lora_rank"):
            kv_heads, head_dim = heads, number("qk_nope_head_dim") + number("qk_rope_head_dim")
            latent, attention = _latent_attention(text)
        experts = number("num_experts", "num_local_experts", "n_routed_experts")
        expert = number("moe_intermediate_size", default=inner)
        shared = number("shared_expert_intermediate_size") or expert * number("n_shared_experts")
        all_inner = experts * expert + shared if experts else inner
        is_tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))
        if parameters is None:
            matrices = 2 if text.get("model_type") in _WITHOUT_GATE else 3
            layer = attention + matrices * hidden * all_inner + 2 * hidden
            parameters = layers * layer + vocab * hidden * (1 if is_tied else 2)
        chosen = number("num_experts_per_tok", "top_k_experts", default=1) if experts else 0
        return cls(
            hidden=hidden,
            inner=chosen * expert + shared if experts else inner,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            attention=attention,
            vocab=vocab,
            context=number("max_position_embeddings", "n_positions", default=2048),
            is_tied=is_tied,
            parameters=parameters,
            experts=experts,
            expert_inner=expert if experts else 0,
            chosen_experts=chosen,
            latent=latent,
            has_head_norms=str(text.get("model_type")).startswith(_WITH_HEAD_NORMS) or bool(text.get("use_qk_norm")),
            family=str(text.get("model_type") or ""),
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts that tokens choose, as if every layer had some."""
        return min(self.parameters - self.ends, 3 * self.layers * self.hidden * self.experts * self.expert_inner)

    def gathered_parameters(self, expert_ranks: int) -> float:
        """Parameters that FSDP gathers for a pass if experts are divided over so many ranks."""
        return self.parameters - self.expert_parameters * (1 - 1 / expert_ranks)

    def gathered_at_once(self, layout: ParallelStrategy, stage: float) -> float:
        """Return for how many parameters of a stage a rank needs room in the compute type during a pass.

        FSDP frees a layer that is divided over ranks before it gathers the next but one; embedding and head stay. Their
        gradients, in the compute type and in 32 bits, count as three more. A pipeline stage, and what `d` and `c` do
        not divide, is there for all of a step.
        """
        if layout.pipeline > 1 or layout.data * layout.context == 1:
            return stage / layout.tensor
        at_once = self.ends + 2 * max(0.0, stage - self.ends) / self.layers
        return min(stage, 4 * at_once) / layout.tensor

    def cached_numbers(self, tensor: int, keeps_latent: bool = False) -> float:
        """Return how many numbers a server keeps of a token on each of its tensor ranks.

        `keeps_latent`: SGLang and vLLM keep the latent of a token, on every rank. The embedded engine keeps all heads.
        """
        if keeps_latent and self.latent:
            return self.layers * self.latent
        return 2.0 * self.layers * -(-self.kv_heads // tensor) * self.head_dim

    def copies(self, expert_ranks: int) -> float:
        """Ranks of an expert group to which a token is sent, if all experts are equally likely."""
        return expert_ranks * (1 - (1 - 1 / expert_ranks) ** self.chosen_experts)

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding; an untied head has as many again."""
        return self.vocab * self.hidden

    @property
    def ends(self) -> int:
        """Parameters outside of layers: embedding and head."""
        return self.embedding * (1 if self.is_tied else 2)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    def undivided(self, tensor: int, copies_keys: bool = False) -> str:
        """Return what so many tensor ranks cannot divide; empty if they can divide all.

        `copies_keys`: SGLang and vLLM copy key-value heads, and divide each expert.
        """
        counts = {"attention heads": self.heads, "intermediate size": 0 if self.experts else self.inner}
        counts |= {} if copies_keys else {"key-value heads": self.kv_heads, "experts": self.experts}
        return next((f"{what} ({count})" for what, count in counts.items() if count % tensor), "")

    def untrainable(self, tensor: int) -> str:
        """Say why the trainer cannot divide the model over so many tensor ranks; empty if nothing is known."""
        if tensor == 1 or self.family not in _WITHOUT_TENSOR_RANKS:
            return ""
        return (
            f"t{tensor} of the trainers: model type {self.family!r} has no tensor-parallel plan that the trainer "
            "supports. Use t1 and give those ranks to d (FSDP shards the weights over them too) or c"
        )

    def with_scalar_head(self) -> "ModelSize":
        """Return the sizes of a critic or reward model: its head has one row, so an untied one is not there."""
        return self if self.is_tied else replace(self, parameters=self.parameters - self.embedding, is_tied=True)

    def adapter_parameters(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Parameters of LoRA adapters of these layers, by default of all linear layers but the head.

        A name that is not one of Llama's counts as all layers.
        """
        return rank * self.layers * sum(self.hidden + width for width in self._adapted_widths(targets))

    def adapted_parameters(self, targets: Sequence[str] = ()) -> int:
        """Parameters of the layers that LoRA adapters of these names change."""
        return self.layers * sum(self.hidden * width for width in self._adapted_widths(targets))

    def _adapted_widths(self, targets: Sequence[str]) -> list[int]:
        widths = {"q_proj": self.query_width, "o_proj": self.query_width} | dict.fromkeys(_KEY_LAYERS, self.key_width)
        widths |= dict.fromkeys(_INNER_LAYERS, self.inner)
        names = [target.rpartition(".")[2] for target in targets]
        chosen = names if names and widths.keys() >= set(names) else list(widths)
        return [widths[name] for name in chosen]


def _latent_attention(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers that a layer keeps of a token, and the parameters of its attention."""
    hidden, heads, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    plain, rotary, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    query, width = text.get("q_lora_rank"), heads * (plain + rotary)
    queries = query * (hidden + width) if query else hidden * width
    return rank + rotary, queries + hidden * (rank + rotary) + heads * (rank * (plain + value) + value * hidden)


def read_model_size(path: str) -> ModelSize | None:
    """Return the sizes of the model in a folder or in the hub's cache; None if they are not known.

    That is, there is no such folder, or its config.json leaves them to the defaults of the model's class.
    """
    folder = _local_folder(path)
    if folder is None:
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = ModelSize.of(config)
    if not (size.hidden and size.layers and size.vocab):
        return None
    # Some repositories have the weights twice (consolidated.safetensors), and a cache may have some of the files only.
    files = list(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / name for name in names]
    counts = [_count_numbers(file) for file in files]
    return ModelSize.of(config, sum(counts)) if all(counts) and sum(counts) > size.ends else size


def read_model_dtype(path: str) -> str | None:
    """Return the type of the weights in a folder or in the hub's cache, if that is known."""
    folder = _local_folder(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder is not None else {}
    return config.get("dtype") or config.get("torch_dtype")


def _local_folder(path: str) -> Path | None:
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if not path or path.count("/") > 1 or path.startswith(("/", ".", "~")):
        return None
    found = try_to_load_from_cache(path, "config.json")
    return Path(found).parent if isinstance(found, str) else None


def _count_numbers(file: Path) -> int:
    """Return how many numbers a safetensors file holds; 0 if its header cannot be read."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 0 < length < _LONGEST_HEADER else {}
        total = 0
        for name, tensor in header.items():
            count = 1 if name != "__metadata__" else 0
            for width in tensor.get("shape", ()):
                count *= width
            total += count
        return total
    except (OSError, ValueError, AttributeError, TypeError):
        return 0
