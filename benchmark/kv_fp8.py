"""Measures what FP8 (`server.kv_cache_dtype=fp8`, `server.weight_dtype=fp8`) does to log-probs, without a GPU.

    python benchmark/kv_fp8.py model=FOLDER questions=gsm8k/test.jsonl

A Hugging Face model computes log-probs of the answers exactly, and with numbers rounded to FP8 (e4m3) as in the CUDA
engine: keys and values of every head and token with a scale each; weights of linear layers with a scale for each output
channel, and their inputs with one for each token; and all of these. Only this rounding differs: all else is float32.
Prints a table and one JSON line. `rollout_fp8.py` measures the engine itself on a GPU.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import describe_machine, gap, print_table
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from arealite.utils.config import load_config

LARGEST = 448.0  # of e4m3


@dataclass
class Options:
    """Options of the benchmark."""

    model: str = field(metadata={"help": "Folder of real weights."})
    questions: str = field(metadata={"help": "Lines of JSON with a `question` and an `answer`."})
    samples: int = field(default=16, metadata={"help": "Number of questions."})


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round vectors (last dimension) to FP8 with a scale each."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def round_weights(model: Any) -> None:
    """Round the weights of linear layers but the head, and their inputs from now on."""
    layers = [m for m in model.base_model.layers.modules() if isinstance(m, torch.nn.Linear)]
    for layer in layers:
        layer.weight.data = rounded(layer.weight.data)
        layer.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))


def attend_rounded(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any:
    return sdpa_attention_forward(module, query, rounded(key), rounded(value), *args, **options)


@torch.inference_mode()
def logprobs(model: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Log-probs of the tokens from `start` on."""
    logits = model(ids[None], use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
    return logits.gather(1, ids[start:, None])[:, 0]


def main() -> None:
    options = load_config(sys.argv[1:], Options)
    AttentionInterface.register("fp8", attend_rounded)
    AttentionMaskInterface.register("fp8", sdpa_mask)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    lines = Path(options.questions).read_text().splitlines()[: options.samples]
    texts = [
        (tokenizer.encode(row["question"] + "\n"), tokenizer.encode(row["answer"])) for row in map(json.loads, lines)
    ]

    def compute(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        return torch.cat([logprobs(model, torch.tensor(prompt + answer), len(prompt)) for prompt, answer in texts])

    exact, changed = compute("sdpa"), {"FP8 cache": compute("fp8")}
    round_weights(model)
    changed |= {"FP8 weights": compute("sdpa"), "both": compute("fp8")}
    results = {name: gap(values - exact) for name, values in changed.items()}
    rows = [[name, *(f"{value:.2g}" for value in found.values())] for name, found in results.items()]
    print_table(["|difference|", *results["both"]], rows)
    about = {"tokens": len(exact), "mean_logprob": exact.mean().item(), "results": results}
    print(json.dumps({"benchmark": "kv_fp8", **asdict(options), **about, **describe_machine()}))


if __name__ == "__main__":
    main()
