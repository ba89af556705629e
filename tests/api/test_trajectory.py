"""`Trajectory`: rows built turn by turn."""

import asyncio
import math

import numpy as np
import pytest
import torch

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import RequestError, RewardError
from arealite.api.io_struct import ModelResponse
from arealite.api.trajectory import Trajectory
from arealite.core.episode import check_trajectories
from arealite.utils.data import concat_padded, stats_means
from tests.tiny_model import make_spaced_tokenizer

GCONFIG = GenerationHyperparameters(max_new_tokens=4)


def respond(request, tokens, reason="stop"):
    return ModelResponse(request.input_ids, tokens, [-0.5] * len(tokens), [3] * len(tokens), reason)


def test_a_row_marks_what_was_sampled():
    row = Trajectory().observe([7, 8])
    request = row.request(GCONFIG, seed=5)
    assert (request.input_ids, request.seed) == ([7, 8], 5)
    row.add(respond(request, [1, 2], "length")).observe((9,))
    row.add(respond(row.request(GCONFIG), [3]))
    batch = row.reward(0.5).to_batch()
    assert batch["input_ids"].tolist() == [[7, 8, 1, 2, 9, 3]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 0, 1]]
    assert batch["versions"].tolist() == [[-1, -1, 3, 3, -1, 3]]
    assert batch["logprobs"].tolist() == [[0, 0, -0.5, -0.5, 0, -0.5]]
    assert (batch["rewards"].tolist(), batch["truncated"].tolist()) == ([0.5], [False])
    # The tokens of a prompt may be an array, which `+=` would add to the tokens so far.
    assert Trajectory().observe([7]).observe(np.array([1])).observe(torch.tensor([2])).ids == [7, 1, 2]
    # The request is a copy: what is observed later does not change it.
    assert request.input_ids == [7, 8]


def test_text_and_messages(tokenizer):
    class Engine:
        async def agenerate(self, request):
            return respond(request, [*tokenizer.encode("yes"), tokenizer.eos_token_id])

    row = Trajectory(tokenizer).observe([{"role": "user", "content": "one?"}])
    assert asyncio.run(row.generate(Engine(), GCONFIG)) == "yes"  # type: ignore[arg-type]
    row.observe({"role": "user", "content": "two?"})
    assert tokenizer.decode(row.ids) == "<user>one?\n<assistant>yes<eos>\n<user>two?\n<assistant>"
    with pytest.raises(RequestError, match="twice without a reply"):
        row.observe({"role": "user", "content": "three?"})
    assert tokenizer.decode(row.observe("I ").ids).endswith("<assistant>I ")


def test_text_behind_an_answer_is_appended_as_it_is():
    spaced = make_spaced_tokenizer()
    row = Trajectory(spaced).observe("one")
    row.add(respond(row.request(GCONFIG), spaced.encode("two")))
    # Only the prompt and what is encoded here as the answer begin with a space of the tokenizer.
    assert spaced.decode(row.observe("\nsees: x").observe("y").ids) == " one two\nsees: xy"


def test_errors_name_the_reason(tokenizer):
    row = Trajectory().observe([1, 2])
    with pytest.raises(RequestError, match="response to 1 tokens cannot be added to a trajectory of 2"):
        row.add(ModelResponse([1], [3], [0.0], [0], "stop"))
    with pytest.raises(RequestError, match="1 tokens, 0 log-probs"):
        row.add(ModelResponse([1, 2], [3], [], [0], "stop"))
    with pytest.raises(RequestError, match="need a tokenizer"):
        row.observe("text")
    with pytest.raises(RequestError, match="prompt is empty"):
        Trajectory(tokenizer).observe([]).request(GCONFIG)
    with pytest.raises(ValueError, match="trajectory 1 of 2 has no reward"):
        Trajectory.join([Trajectory().observe([1]).reward(0), row])
    with pytest.raises(RewardError, match=r"trajectory 0 of 1 has the reward 1e\+39; it must be finite"):
        row.reward(1e39).to_batch()


def test_what_follows_the_last_answer_is_left_out():
    first, second = Trajectory().observe([1, 2]), Trajectory().observe([1, 2])
    first.add(respond(first.request(GCONFIG), [3])).observe([4, 5, 6]).reward(1.0)
    second.add(respond(second.request(GCONFIG), [3, 4])).reward(0.0)
    batch = Trajectory.join([first, second])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]
    assert batch["versions"][0].tolist()[:2] == [-1, -1] and batch["versions"][0, 3] == -1
    assert batch["rewards"].tolist() == [1.0, 0.0]
    # The trajectory keeps it: an answer may still come.
    assert first.ids == [1, 2, 3, 4, 5, 6]


def test_statistics_become_columns_and_means():
    first = Trajectory().observe([1]).reward(1).stat("calls", 2).stat("failed", 0)
    second = Trajectory().observe([1, 2]).reward(0).stat("calls", 4)
    batch = Trajectory.join([first, second])
    assert batch["stats/calls"].tolist() == [2, 4]
    assert batch["stats/failed"][0] == 0 and math.isnan(batch["stats/failed"][1])
    other = Trajectory().observe([5]).reward(0).stat("turns", 3).to_batch()
    joined = concat_padded([batch, Trajectory().observe([5]).reward(0).to_batch(), other])
    assert stats_means(joined) == {"rollout/calls": 3, "rollout/failed": 0, "rollout/turns": 3}
    assert joined["stats/turns"].isnan().tolist() == [True, True, True, False]
    assert check_trajectories(batch).num_samples == 2


def test_wrong_statistics_are_refused():
    batch = Trajectory().observe([1]).reward(1).to_batch()
    with pytest.raises(ValueError, match=r"`stats/x` is torch.int64 \[1\]; expected floats"):
        check_trajectories(batch | {"stats/x": torch.ones(1, dtype=torch.long)})
