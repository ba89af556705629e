"""Where a model trains, and kernels that repeat their results."""

import pytest
import torch

from arealite.api.cli_args import TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.engine.fsdp.device import choose_device


@pytest.fixture
def one_gpu(monkeypatch):
    """Let torch see a GPU; what changes for all of the process is undone."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(TrainEngineConfig(path="x")) == "cpu"
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        choose_device(TrainEngineConfig(path="x", device="cuda"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_repeat_on_request(one_gpu, deterministic):
    assert choose_device(TrainEngineConfig(path="x", deterministic=deterministic)) == "cuda"
    assert torch.are_deterministic_algorithms_enabled() == deterministic
