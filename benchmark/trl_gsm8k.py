"""Train GSM8K with TRL's GRPOTrainer and vLLM. benchmark/versus_trl.py runs it in a process.

    python benchmark/trl_gsm8k.py MODEL_FOLDER TRAIN.jsonl OUT.jsonl STEPS [compile]

The settings are those of examples/arealite/configs/gsm8k_grpo.yaml: 64 prompts × 8 answers of at most 512 tokens, two
optimizer steps on each, learning rate 2e-6 with warm-up, clip range 0.2, no KL, AdamW, float32 parameters with bf16
arithmetic. vLLM runs in the trainer's process, TRL's default. Micro-batches have 32 sequences, activations are kept.
Writes one line per generation: {"seconds": since train() began, "reward": mean, "samples": trained samples}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1]))
from arealite.api.cli_args import DatasetConfig
from arealite.dataset import get_gsm8k_rl
from arealite.reward.gsm8k import gsm8k_reward

PROMPTS, GROUP_SIZE, MINIBATCHES, ROWS = 64, 8, 2, 32


class Recorder(TrainerCallback):
    """Writes time and reward after the last optimizer step on each generation."""

    def __init__(self, path: str):
        self.file = open(path, "w")  # noqa: SIM115 - open for the whole run
        self.start, self.reward, self.num_steps = time.perf_counter(), 0.0, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "loss" not in logs:
            return
        # Only the first optimizer step on a generation logs its reward.
        self.reward, self.num_steps = logs.get("reward", self.reward), self.num_steps + 1
        if self.num_steps % MINIBATCHES == 0:
            seconds = time.perf_counter() - self.start
            row = {"seconds": seconds, "reward": float(self.reward), "samples": PROMPTS * GROUP_SIZE}
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
            print(row, flush=True)


def reward(prompts, completions, completion_ids, answer, **_):
    texts = [completion[0]["content"] for completion in completions]
    return [gsm8k_reward("", text, [], [], answer=a) for text, a in zip(texts, answer, strict=True)]


def main(model: str, data: str, out: str, steps: str, *options: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    rows = get_gsm8k_rl(DatasetConfig(path=data, max_length=1024), tokenizer)
    dataset = Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows])
    samples = PROMPTS * GROUP_SIZE
    args = GRPOConfig(
        output_dir="/tmp/trl-gsm8k", num_generations=GROUP_SIZE, per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=samples // MINIBATCHES // ROWS, steps_per_generation=samples // ROWS,
        max_completion_length=512, temperature=1.0, beta=0.0, epsilon=0.2, loss_type="dapo", learning_rate=2e-6,
        lr_scheduler_type="constant_with_warmup", warmup_steps=max(1, int(steps) // 10), weight_decay=0.017,
        adam_beta2=0.999, max_grad_norm=1.0, bf16=True, gradient_checkpointing=False,
        max_steps=MINIBATCHES * int(steps), torch_compile="compile" in options, seed=1,
        model_init_kwargs={"dtype": "float32"}, use_vllm=True,
        vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=2048,
        report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=reward, args=args, train_dataset=dataset, processing_class=tokenizer,
        callbacks=[Recorder(out)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
