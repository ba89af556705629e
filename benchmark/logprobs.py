"""Compares the log-probs of the embedded engine with those of the trainer.

    python benchmark/logprobs.py model=FOLDER questions=gsm8k/test.jsonl     real weights, real questions
    python benchmark/logprobs.py shape=0.5b                                   random weights, random prompts

The engine samples at temperature 1. The training engine (packed, as in training), the Hugging Face model in the same
dtype, and the Hugging Face model in float32 (the reference) compute the log-probs of the same tokens. Prints a table
and one JSON line.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import describe_machine, gap, print_table
from inference import Options as Shape
from inference import make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.api.cli_args import ServerConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.inference.engine import Engine
from arealite.inference.sequence import Request, SamplingParams
from arealite.utils.config import load_config
from arealite.utils.data import concat_padded


@dataclass
class Options:
    """Options of the benchmark."""

    model: str = field(default="", metadata={"help": "Folder of real weights; empty: random ones."})
    shape: str = field(default="0.5b", metadata={"help": "Shape of random weights."})
    questions: str = field(default="", metadata={"help": "Lines of JSON with a `question`; empty: random prompts."})
    device: str = field(default="auto", metadata={"help": "cpu, cuda or auto."})
    samples: int = field(default=64, metadata={"help": "Number of answers."})
    max_new_tokens: int = field(default=256, metadata={"help": "Maximum tokens of an answer."})


@dataclass
class Answer:
    """Sampled tokens of one prompt, with the engine's log-probs."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def main() -> None:
    options = load_config(sys.argv[1:], Options)
    cuda = options.device != "cpu" and torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if cuda else ("cpu", "float32")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or scratch
        if not options.model:
            make_model(Shape(shape=options.shape), device).save_pretrained(folder)
        answers = sample(folder, make_prompts(options, folder), options, device, dtype)
        engine = torch.cat([torch.tensor(answer.logprobs) for answer in answers])
        trainer = trainer_logprobs(folder, answers, device, dtype)
        plain = model_logprobs(folder, answers, device, dtype)
        exact = model_logprobs(folder, answers, device, "float32")
    results = {
        "engine against the training engine": gap(trainer - engine),
        "engine against float32": gap(exact - engine),
        "training engine against float32": gap(exact - trainer),
        f"Hugging Face in {dtype} against float32": gap(exact - plain),
        f"Hugging Face in {dtype} against the training engine": gap(trainer - plain),
    }
    rows = [[name, *(f"{value:.2g}" for value in row.values())] for name, row in results.items()]
    print_table(["|difference|", "mean", "p99", "max", "mismatch KL"], rows)
    what = {"model": Path(options.model).name or options.shape, "prompts": options.questions}
    about = what | {"tokens": len(engine), "mean_logprob": engine.mean().item(), "dtype": dtype}
    print(json.dumps({"benchmark": "logprobs", **about, "results": results, **describe_machine()}))


def make_prompts(options: Options, folder: str) -> list[list[int]]:
    if not options.questions:
        generator = torch.Generator().manual_seed(1)
        vocab = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
        shape = (options.samples, 128)
        return torch.randint(0, vocab, shape, generator=generator).tolist()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = Path(options.questions).read_text().splitlines()[: options.samples]
    chats = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]  # fmt: skip
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def sample(folder: str, prompts: list[list[int]], options: Options, device: str, dtype: str) -> list[Answer]:
    config = ServerConfig(model_path=folder, device=device, dtype=dtype, context_length=2048)
    engine = Engine(config).start()
    settings = SamplingParams(max_new_tokens=options.max_new_tokens, ignore_eos=not options.questions)
    try:
        futures = [engine.submit(Request(prompt, settings)) for prompt in prompts]
        outputs = [future.result(600)[0] for future in futures]
    finally:
        engine.close()
        del engine
        free_memory()
    pairs = zip(prompts, outputs, strict=True)
    return [Answer(prompt, output.token_ids, output.logprobs) for prompt, output in pairs]


def trainer_logprobs(folder: str, answers: list[Answer], device: str, dtype: str) -> torch.Tensor:
    """Compute log-probs with the training engine on packed sequences, as `compute_logp` does."""
    config = TrainEngineConfig(path=folder, device=device, dtype=dtype, optimizer=None)
    engine = FSDPEngine(config)
    engine.initialize(FinetuneSpec(1, 1, 1))
    rows = []
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.tokens])
        mask = torch.ones_like(ids)
        mask[:, : len(answer.prompt)] = 0
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": mask})
    batch = concat_padded(rows)
    found = engine.forward(batch)["logp"][batch["loss_mask"].bool()]
    engine.destroy()
    del engine
    free_memory()
    return found.float()


@torch.inference_mode()
def model_logprobs(folder: str, answers: list[Answer], device: str, dtype: str) -> torch.Tensor:
    """Compute log-probs with the Hugging Face model, one sequence at a time; logits are float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device)
    weight, found = model.get_output_embeddings().weight, []
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.tokens], device=device)
        states = model.base_model(ids).last_hidden_state[0, len(answer.prompt) - 1 : -1]
        logits = states.float() @ weight.float().t()
        chosen = logits.gather(1, ids[0, len(answer.prompt) :, None])[:, 0]
        found.append((chosen - logits.logsumexp(-1)).cpu())
    del model
    free_memory()
    return torch.cat(found)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
