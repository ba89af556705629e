"""RLVR: prompts, the batch it builds, rewards in the pool and inline."""

import asyncio
import math

import pytest
import torch

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import DatasetError, RewardError
from arealite.api.io_struct import ModelResponse
from arealite.reward.pool import RewardPool
from arealite.workflow.rlvr import RLVRWorkflow
from tests import warm_python


class FixedEngine:
    """Answers each request with completions of growing length; the last one is cut off."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.requests = []

    async def agenerate_group(self, request):
        self.requests.append(request)
        responses = []
        for i in range(request.gconfig.n_samples):
            tokens = self.tokenizer.encode("a" * (i + 1))
            reason = "length" if i == request.gconfig.n_samples - 1 else "stop"
            numbers = [-0.1 * (j + 1) for j in range(len(tokens))]
            responses.append(ModelResponse(request.input_ids, tokens, numbers, [i] * len(tokens), reason))
        return responses


def count_letters(prompt, completion, prompt_ids, completion_ids, answer, **data):
    assert completion == "a" * len(completion_ids) and "messages" not in data and "seed" not in data
    return len(completion) + answer


def returns_none(**data):
    return None


def play(workflow, tokenizer, row):
    engine = FixedEngine(tokenizer)
    return asyncio.run(workflow.arun_episode(engine, row)), engine


def test_the_batch_marks_what_was_generated(tokenizer):
    gconfig = GenerationHyperparameters(n_samples=3)
    workflow = RLVRWorkflow(count_letters, gconfig, tokenizer, reward_inline=True)
    batch, engine = play(workflow, tokenizer, {"prompt": "xyz", "answer": 10, "seed": 5})
    assert engine.requests[0].seed == 5
    assert batch["input_ids"].shape == (3, 6)
    assert batch["rewards"].tolist() == [11.0, 12.0, 13.0]
    assert batch["loss_mask"].tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]]
    assert batch["versions"].tolist() == [[-1, -1, -1, 0, -1, -1], [-1, -1, -1, 1, 1, -1], [-1, -1, -1, 2, 2, 2]]
    assert batch["attention_mask"].sum(1).tolist() == [4, 5, 6]
    assert math.isclose(batch["logprobs"][2, 5], -0.3, rel_tol=1e-6) and batch["logprobs"][0, 4] == 0
    assert batch["truncated"].tolist() == [False, False, True]


def test_prompt_forms(tokenizer):
    workflow = RLVRWorkflow(count_letters, GenerationHyperparameters(), tokenizer, reward_inline=True)
    chat = workflow.encode_prompt({"messages": [{"role": "user", "content": "hi"}]})
    assert tokenizer.decode(chat) == "<user>hi\n<assistant>"
    assert workflow.encode_prompt({"input_ids": [4, 5]}) == [4, 5]
    with pytest.raises(DatasetError, match=r"columns \['question'\]"):
        workflow.encode_prompt({"question": "?"})
    with pytest.raises(DatasetError, match="prompt of a row is empty"):
        play(workflow, tokenizer, {"prompt": "", "answer": 0})


def test_rewards_in_the_pool_equal_those_inline(tokenizer):
    gconfig = GenerationHyperparameters(n_samples=4)
    row = {"messages": [{"role": "user", "content": "hi"}], "answer": 1}
    pool = RewardPool(num_workers=1)
    inline, _ = play(RLVRWorkflow(count_letters, gconfig, tokenizer, reward_inline=True), tokenizer, row)
    pooled, _ = play(RLVRWorkflow(count_letters, gconfig, tokenizer, reward_pool=pool), tokenizer, row)
    pool.close()
    assert all(torch.equal(inline[key], pooled[key]) for key in inline)


def test_a_reward_that_is_not_a_number_is_an_error(tokenizer):
    workflow = RLVRWorkflow(returns_none, GenerationHyperparameters(), tokenizer, reward_inline=True)
    with pytest.raises(RewardError, match="returns_none returned None"):
        play(workflow, tokenizer, {"prompt": "x"})


SCRIPT = """
import asyncio
from multiprocessing import forkserver
from arealite.api.cli_args import GenerationHyperparameters
from arealite.workflow.rlvr import RLVRWorkflow

def reward(**data):
    return 1.0

# At the top level of a script: workers, which import it, must not start servers of their own.
inline = RLVRWorkflow(reward, GenerationHyperparameters(), None, reward_inline=True)
assert __name__ != "__main__" or forkserver._forkserver._forkserver_pid is None
workflow = RLVRWorkflow(reward, GenerationHyperparameters(), None)

if __name__ == "__main__":
    assert forkserver._forkserver._forkserver_pid is not None
    print(asyncio.run(workflow.reward_pool.run(reward, [{}])))
    workflow.reward_pool.close()
"""


def test_a_workflow_starts_the_fork_server_before_the_first_reward(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = warm_python.run([script], timeout=100)
    assert (done.returncode, done.stdout) == (0, "[1.0]\n"), done.stderr
    assert not done.stderr
