"""Tiny Hugging Face models made from config, and real gloo ranks in processes of their own."""

import pytest
import torch
from engine_testing import MODELS, NOISY_MODELS, Ranks, make_model

from arealite.utils import distributed


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_group_left():
    """An engine of two types makes a process group, also for one rank; whoever comes later would be its rank 0."""
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory):
    """Folder of each kind of tiny model in `MODELS`."""
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, kind) for kind in MODELS}


@pytest.fixture(scope="session")
def noisy_model_dirs(tmp_path_factory):
    """Folder of each tiny model in `NOISY_MODELS`."""
    root = tmp_path_factory.mktemp("noisy_models")
    return {kind: make_model(root / kind, kind) for kind in NOISY_MODELS}


@pytest.fixture(scope="session")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()
