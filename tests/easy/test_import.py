"""`import arealite` is fast, and its names are found without one import of torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import arealite

ROOT = Path(__file__).resolve().parents[2]


def test_the_package_imports_neither_torch_nor_omegaconf():
    code = "import sys, arealite; dir(arealite); print([m for m in ('torch', 'omegaconf') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_names():
    assert {"GRPOTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer", "TrainResult"} <= set(dir(arealite))
    for name in arealite.__all__:
        assert getattr(arealite, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        arealite.nothing  # noqa: B018
