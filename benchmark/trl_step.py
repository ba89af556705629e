"""Time an optimizer step of TRL's GRPOTrainer without generation. benchmark/training.py runs it in a process.

    python benchmark/trl_step.py MODEL_FOLDER BATCH.pt ROWS [compile]

The batch replaces what the trainer would generate and score. Everything after that is the trainer's own code: `ROWS`
sequences at a time through the model (with its fused log-prob kernel), the GRPO loss, backward, clipping, fused AdamW
and metrics. Weights and arithmetic are bf16 on CUDA, without autocast and gradient checkpointing. The trainer pads
and does not pack. With FlashAttention, which is not part of torch and not used here, it could skip padding in
attention only. Prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

GROUP_SIZE, STEPS, WARMUP = 8, 4, 2


class FixedBatchTrainer(trl.GRPOTrainer):
    """Trains on the same batch in each step instead of generating."""

    fixed_batch: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs):
        return {k: v.to(self.accelerator.device) for k, v in self.fixed_batch.items()}


class Stopwatch(TrainerCallback):
    """Measures the time from the first micro-batch of a step to the end of the optimizer step."""

    def __init__(self):
        self.seconds: list[float] = []
        self.norm = None

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = _now()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(_now() - self._start)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.norm = self.norm or (logs or {}).get("grad_norm")


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def as_trl(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad prompts on the left and completions on the right, each to the longest of the batch, as the trainer does."""
    trained = batch["loss_mask"].bool()
    total, answer = batch["attention_mask"].sum(1), trained.sum(1)
    prompt = total - answer
    p, c = torch.arange(int(prompt.max())), torch.arange(int(answer.max()))
    # [B, P] position in the row; negative on the padding.
    source = p - (len(p) - prompt[:, None])
    prompt_mask, completion_mask = source >= 0, c < answer[:, None]
    last = batch["input_ids"].shape[1] - 1
    ids = batch["input_ids"]
    return {
        "prompt_ids": ids.gather(1, source.clamp(min=0)) * prompt_mask,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": ids.gather(1, (prompt[:, None] + c).clamp(max=last)) * completion_mask,
        "completion_mask": completion_mask.long(),
        "advantages": batch["scores"],
        "num_items_in_batch": answer.sum(),
    }


def main(folder: str, batch_file: str, rows: str, *options: str) -> None:
    batch = torch.load(batch_file, weights_only=True)
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if cuda else torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")),
        pad_token="a", eos_token="b", padding_side="left",
    )  # fmt: skip
    num_rows = len(batch["input_ids"])
    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=not cuda, bf16=False, num_generations=GROUP_SIZE,
        per_device_train_batch_size=int(rows), gradient_accumulation_steps=num_rows // int(rows),
        loss_type="grpo", beta=0.0, epsilon=0.2, temperature=1.0, learning_rate=1e-5, adam_beta2=0.95,
        weight_decay=0.01, max_grad_norm=1.0, lr_scheduler_type="constant", max_steps=WARMUP + STEPS,
        gradient_checkpointing=False,
        torch_compile="compile" in options, report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    stopwatch = Stopwatch()
    trainer = FixedBatchTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * (num_rows * (WARMUP + STEPS))),
        processing_class=tokenizer,
        callbacks=[stopwatch],
    )
    trainer.fixed_batch = as_trl(batch)
    trainer.train()
    result = {
        "trl": trl.__version__,
        "attention": model.config._attn_implementation,
        "seconds": statistics.median(stopwatch.seconds[WARMUP:]),
        "grad_norm": stopwatch.norm,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }
    print("TRL " + json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
