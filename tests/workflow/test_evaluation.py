"""Votes of answers and the routing of rows to the workflow of their validation set."""

import asyncio

import pytest
import torch

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import ConfigError
from arealite.api.io_struct import ModelResponse
from arealite.api.trajectory import Trajectory
from arealite.api.workflow_api import RolloutWorkflow
from arealite.core.samples import _samples
from arealite.reward.math import first_equal
from arealite.workflow.evaluation import SET_COLUMN, EvaluationWorkflow, with_gconfig
from arealite.workflow.rlvr import RLVRWorkflow


class Say(RolloutWorkflow):
    """Returns given answers to the prompt `?`."""

    def __init__(self, tokenizer, answers):
        self.tokenizer, self.answers, self.seen = tokenizer, answers, []

    async def arun_episode(self, engine, data):
        self.seen.append(data)
        rows = []
        for answer in self.answers:
            ids = self.tokenizer.encode(f"?{answer}")
            count = len(ids) - 1
            response = ModelResponse(ids[:1], ids[1:], [0.0] * count, [0] * count, "stop")
            rows.append(Trajectory().observe(ids[:1]).add(response).reward(1.0))
        return Trajectory.join(rows)


def play(workflow, data):
    async def run():
        try:
            return await workflow.arun_episode(None, data)
        finally:
            workflow.pool.close()

    return asyncio.run(run())


def test_equal_answers_have_the_same_vote(tokenizer):
    answers = [
        "so \\boxed{12}",
        "the answer is 12.0.",
        "\\boxed{x+1}",
        "I get 7",
        "\\boxed{1+x}",
        "\\boxed{12}",
        "dunno",
    ]
    batch = play(EvaluationWorkflow({"a": Say(tokenizer, answers)}), {SET_COLUMN: "a"})
    assert batch["votes"].tolist() == [0, 0, 2, 3, 2, 0, 5]


def test_an_untrusted_formula_on_either_side_is_compared_as_text():
    assert first_equal(["9^{9^{9}}", "x", "9^{9^{9}}"]) == 0
    assert first_equal(["9^{9^{9}}", "9^{81}"]) == 1
    assert first_equal(["9⁹⁹⁹⁹⁹⁹⁹⁹", "9^{81}"]) == 1


def test_rows_go_to_the_workflow_of_their_set(tokenizer):
    one, two = Say(tokenizer, ["1"]), Say(tokenizer, ["2", "2"])
    workflow = EvaluationWorkflow({"one": one, "two": two})
    assert "votes" not in play(workflow, {SET_COLUMN: "one", "x": 1})
    assert torch.equal(play(workflow, {SET_COLUMN: "two", "x": 2})["votes"], torch.zeros(2, dtype=torch.long))
    assert (one.seen, two.seen) == ([{"x": 1}], [{"x": 2}])


def test_a_sample_of_several_rows_votes_for_its_last_answer(tokenizer):
    class Planner(Say):
        """Two attempts: a plan in a conversation of its own, which is cut off, and the answer."""

        async def arun_episode(self, engine, data):
            batch = await super().arun_episode(engine, data)
            batch["truncated"] = torch.tensor([True, False, True, False])
            return batch | {"sample_ids": torch.tensor([0, 0, 1, 1])}

    answers = ["first add", "\\boxed{12}", "begin with 3", "it is \\boxed{12}"]
    batch = play(EvaluationWorkflow({"a": Planner(tokenizer, answers)}), {SET_COLUMN: "a"})
    one, two = _samples(batch)
    assert one.vote == two.vote and not one.is_truncated and not two.is_truncated
    assert tokenizer.decode(one.tokens) == answers[0] + answers[1]


def test_a_workflow_is_copied_with_other_sampling(tokenizer):
    workflow = RLVRWorkflow(lambda **row: 1.0, GenerationHyperparameters(n_samples=4), tokenizer, reward_inline=True)
    other = with_gconfig(workflow, GenerationHyperparameters(n_samples=1))
    assert isinstance(other, RLVRWorkflow) and (workflow.gconfig.n_samples, other.gconfig.n_samples) == (4, 1)
    assert other.reward_pool is workflow.reward_pool
    with pytest.raises(ConfigError, match="Say has no attribute `gconfig`"):
        with_gconfig(Say(tokenizer, []), GenerationHyperparameters())
