"""Experts distributed over two real ranks of a server: same tokens, log-probs and experts as on one rank."""

import pytest
import torch

from arealite.api.cli_args import ServerConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.inference.engine import Engine
from arealite.inference.loading import read_config
from arealite.inference.sequence import Request, SamplingParams
from arealite.inference.weights import WeightSource
from tests.engine.engine_testing import make_model

SETTINGS = {"max_total_tokens": 512, "block_size": 4, "device": "cpu", "record_routing": True}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_distributed_experts_answer_like_one_rank(kind, tmp_path):
    folder = make_model(tmp_path / kind, kind)
    engines = [Engine(ServerConfig(model_path=folder, tensor_parallel=n, **SETTINGS)).start() for n in (2, 1)]
    try:
        whole = engines[1].model.model.layers[1].mlp.experts
        part = engines[0].model.model.layers[1].mlp.experts
        assert 2 * len(part.down_proj) == len(whole.down_proj)
        changed = {n: p + 0.02 for n, p in engines[1].model.named_parameters()}
        for update in (False, True):
            answers = []
            for engine in engines:
                if update:
                    engine.update(WeightSource.received(changed, 1)).result(60)
                params = SamplingParams(max_new_tokens=12, sampling_seed=4, ignore_eos=True, n=2)
                answers.append(engine.submit(Request([5, 6, 7, 8, 9, 10], params, want_routing=True)).result(100))
            for first, second in zip(*answers, strict=True):
                assert first.token_ids == second.token_ids
                torch.testing.assert_close(
                    torch.tensor(first.logprobs), torch.tensor(second.logprobs), atol=1e-4, rtol=1e-4
                )
                assert (first.routed_experts == second.routed_experts).all()
            assert engines[0].fingerprint().result(60) == engines[1].fingerprint().result(60)
        first = WeightSource.published(WeightUpdateMeta("disk", str(folder), 2))  # each expert alone
        assert len({(e.update(first).result(60), e.fingerprint().result(60))[1] for e in engines}) == 1
    finally:
        for engine in engines:
            engine.close()


def test_experts_that_cannot_be_divided_are_refused(tmp_path):
    folder = make_model(tmp_path, "gpt_oss")
    with pytest.raises(ConfigError, match="does not divide the model's experts: 4 / 3"):
        read_config(ServerConfig(model_path=folder, tensor_parallel=3, device="cpu"))
