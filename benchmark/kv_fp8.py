"""Measures what a KV cache in FP8 (`server.kv_cache_dtype=fp8`) does to log-probs, without a GPU.

    python benchmark/kv_fp8.py model=FOLDER questions=gsm8k/test.jsonl

A Hugging Face model computes log-probs of the answers twice: with exact keys and values, and with those of every head
and token rounded to FP8 (e4m3) with a scale, as the CUDA engine stores them. Only this rounding differs: all else is
float32 on both sides. Prints a table and one JSON line.
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
    exact, changed = [], []
    for line in lines:
        row = json.loads(line)
        prompt = tokenizer.encode(row["question"] + "\n")
        ids = torch.tensor(prompt + tokenizer.encode(row["answer"]))
        for name, found in (("sdpa", exact), ("fp8", changed)):
            model.set_attn_implementation(name)
            found.append(logprobs(model, ids, len(prompt)))
    result = gap(torch.cat(changed) - torch.cat(exact))
    mean = torch.cat(exact).mean().item()
    print_table(["|difference|", *result], [["FP8 cache", *(f"{value:.2g}" for value in result.values())]])
    about = {"tokens": sum(map(len, exact)), "mean_logprob": mean, "results": result}
    print(json.dumps({"benchmark": "kv_fp8", **asdict(options), **about, **describe_machine()}))


if __name__ == "__main__":
    main()
