"""Fixtures: tiny Hugging Face models, and real gloo ranks in separate processes."""

import pytest
import torch

from arealite.utils import distributed
from tests.engine.engine_testing import MODELS, NOISY_MODELS, Ranks, make_model


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_group_left():
    """Destroy the process group that an engine with two dtypes makes even for one rank."""
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


# The groups of a test stay, with threads: ranks of the whole session would become slower and slower.
@pytest.fixture(scope="module")
def two_ranks():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four_ranks():
    ranks = Ranks(4)
    yield ranks
    ranks.close()
