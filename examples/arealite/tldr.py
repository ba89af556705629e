"""Summaries of Reddit posts (TL;DR): supervised training, a reward model, then DPO or RL with that model.

    python examples/arealite/tldr.py sft,dpo train_dataset.path=rows.jsonl trainer.sft.model.path=/path/to/model
    python examples/arealite/tldr.py sft,rw,grpo

configs/tldr.yaml has the settings of all stages; `key=value` overrides them.
"""

from stages import run_stages

from arealite.utils.config import run_main

if __name__ == "__main__":
    run_main(lambda argv: run_stages("tldr", argv))
