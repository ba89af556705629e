"""How many sequences a server decodes at once, by its configuration and its KV cache."""

import pytest

from arealite.api.cli_args import ServerConfig
from arealite.inference.runner import count_slots
from tests.inference.conftest import MakeEngine, make_model


@pytest.mark.parametrize(
    "num_tokens, slots", [(100_000, 256), (256 * 1024, 256), (300 * 1024, 300), (512 * 1024, 512), (10**8, 512)]
)
def test_a_gpu_decodes_as_many_sequences_as_its_cache_holds(num_tokens, slots):
    config = ServerConfig(block_size=16)
    assert count_slots(config, num_tokens // 16) == slots
    assert count_slots(ServerConfig(block_size=16, max_running_requests=8), num_tokens // 16) == 8


def test_cpu_decodes_256_sequences_by_default(make_engine: MakeEngine):
    engine = make_engine(make_model())
    assert engine.scheduler.slots.num_slots == 256
    assert engine.core.config.max_running_requests == 256
