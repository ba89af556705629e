"""GRPO in five lines, without a launcher: a small model learns to write five letters backwards.

    python examples/arealite/five_lines.py [STEPS]

The model and its rows are made on the spot (`reverse.py`), and worked examples teach it the task a little (`demo.py`).
Put a model of the hub, rows and a reward of your own in their place; docs/python-api.md has the arguments.
"""

import sys
from pathlib import Path

from demo import supervise
from reverse import make_model, make_rows

from arealite import GRPOTrainer

folder = Path("runs") / "five_lines"
make_model(folder / "random", seed=1)
supervise(folder / "random", folder / "model", seed=1)


def letters_in_place(completion, answer, **data):
    """Return the share of letters that are right; an answer of another length earns less."""
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(len(completion), len(answer))


trainer = GRPOTrainer(
    model=folder / "model",
    train_dataset=make_rows(2048, seed=1),
    reward_fn=letters_in_place,
    output_dir=folder,
    max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 60,
    # A model of 0.4M parameters takes larger steps than a pretrained one.
    learning_rate=3e-4,
    max_completion_length=7,
    config={"train_dataset": {"batch_size": 32}, "actor": {"max_update_kl": 0.05}, "server": {"context_length": 64}},
)
result = trainer.train()
print(result)

ids = result.tokenizer("abcde>", return_tensors="pt").input_ids
print("abcde>", result.tokenizer.decode(result.model.generate(ids, max_new_tokens=7, do_sample=False)[0, 6:]))
