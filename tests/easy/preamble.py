"""Parts of scripts that tests run in processes of their own: nothing in them has an `if __name__` guard."""

HEAD = """
import sys
sys.path.insert(0, {examples!r})
from reverse import make_model, make_rows
from arealite import GRPOTrainer
from pathlib import Path

model = Path({folder!r}) / "model"
if not model.exists():
    make_model(model, seed=1)
count = 0

def many_a(completion, **data):
    global count
    count += 1
    return completion.count("a") / 4

settings = dict(
    model=model, output_dir={folder!r}, max_completion_length=4, learning_rate=1e-2, num_generations=8,
    seed=1, config={{"server": {{"context_length": 32, "max_total_tokens": 4096}}, "actor": {{"max_update_kl": None}},
                    "launcher": {{"threads_per_process": 1}}}},
)
rows = [{{"prompt": row["prompt"], "answer": "a"}} for row in make_rows(64, seed=1)]
"""
