"""Train the demo's task with TRL's GRPOTrainer and the demo's settings. benchmark/demo.py runs it in a process.

    python benchmark/trl_reverse.py MODEL_FOLDER OUT.jsonl [SEED]

Writes one line per generation batch: {"seconds": since train() began, "reward": mean}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "arealite"))
from reverse import make_rows

NUM_PROMPTS, GROUP_SIZE, MINIBATCHES, GENERATIONS = 64, 8, 2, 120


def main(model_folder: str, out_path: str, seed: str = "1") -> None:
    # One process for training and generation: it gets both cores.
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    log, start = [], time.perf_counter()

    def reward(completions: list[str], answer: list[str], **_) -> list[float]:
        rewards = [float(c == a) for c, a in zip(completions, answer, strict=True)]
        log.append({"seconds": time.perf_counter() - start, "reward": sum(rewards) / len(rewards)})
        return rewards

    args = GRPOConfig(
        output_dir=str(Path(out_path).parent / "trl"),
        use_cpu=True,
        bf16=False,
        num_generations=GROUP_SIZE,
        per_device_train_batch_size=NUM_PROMPTS * GROUP_SIZE // MINIBATCHES,
        steps_per_generation=MINIBATCHES,
        max_completion_length=7,
        temperature=1.0,
        learning_rate=4e-4,
        lr_scheduler_type="linear",
        warmup_steps=6 * MINIBATCHES,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        max_steps=GENERATIONS * MINIBATCHES,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=int(seed),
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(make_rows(8192, seed=1)),
        processing_class=tokenizer,
    )
    start = time.perf_counter()
    trainer.train()
    Path(out_path).write_text("".join(json.dumps(row) + "\n" for row in log))


if __name__ == "__main__":
    main(*sys.argv[1:])
