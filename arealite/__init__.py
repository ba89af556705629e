"""AReaLite: fully asynchronous reinforcement learning for language models.

from arealite import GRPOTrainer
GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=rows, reward_fn=reward).train()
"""

import importlib
from typing import TYPE_CHECKING, Any

from arealite.utils.imports import quick_imports

if TYPE_CHECKING:
    from arealite.easy.base import TrainResult
    from arealite.easy.grpo import GRPOTrainer
    from arealite.easy.supervised import DPOTrainer, RewardTrainer, SFTTrainer

__version__ = "0.1.0"
__all__ = ["DPOTrainer", "GRPOTrainer", "RewardTrainer", "SFTTrainer", "TrainResult", "__version__"]

quick_imports.install()

# Imported at the first use: they import torch, which takes seconds.
_MODULES = {
    "GRPOTrainer": "arealite.easy.grpo",
    "SFTTrainer": "arealite.easy.supervised",
    "DPOTrainer": "arealite.easy.supervised",
    "RewardTrainer": "arealite.easy.supervised",
    "TrainResult": "arealite.easy.base",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'arealite' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
