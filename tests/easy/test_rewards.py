"""Reward functions of a Python caller: which signatures are understood, and how they are called."""

import asyncio
import operator
import pickle
import threading
import time

import numpy as np
import pytest
import torch

from arealite.api.errors import ConfigError, RewardError
from arealite.easy.rewards import ASKED, Rewards, check_columns, check_sendable, read_rewards
from arealite.reward.format import think_answer_reward
from arealite.reward.math import math_reward


def row(completion="yes", **columns):
    return {"prompt": "q", "completion": completion, "prompt_ids": [1], "completion_ids": [2], ASKED: "q", **columns}


def score(functions, rows, weights=None, timeout_s=30.0):
    rewards = Rewards(read_rewards(functions, weights), timeout_s)

    async def run():
        return await asyncio.wait_for(rewards.run(rewards, rows), 60)

    try:
        return asyncio.run(run())
    finally:
        rewards.close()


def test_a_closure_gets_the_columns_that_it_names():
    right = {"q": 1.0}
    assert score(
        lambda completion, answer: right["q"] * (completion == answer), [row(answer="yes"), row(answer="no")]
    ) == [1, 0]
    assert score(lambda completion, **data: len(data), [row(answer="yes")]) == [4]


def test_functions_of_trl_get_lists():
    def reward(completions, answer, prompts, **kwargs):
        assert prompts == ["q", "q"] and kwargs["completion_ids"] == [[2], [2]]
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert score(reward, [row(answer="yes"), row(answer="no")]) == [1, 0]
    assert score(lambda completions: torch.ones(len(completions)), [row()] * 3) == [1, 1, 1]


def test_functions_of_trl_get_messages_for_a_chat():
    def reward(completions, prompts, **kwargs):
        assert prompts[0][0]["role"] == "user"
        return [len(messages[0]["content"]) for messages in completions]

    assert score(reward, [row(**{ASKED: [{"role": "user", "content": "q"}]})]) == [3]


def test_several_rewards_are_added_by_their_weights_and_kept_as_parts():
    def length(completions, **_):
        return [len(text) for text in completions]

    async def awaited(completions, **_):
        await asyncio.sleep(0)
        return [None] * len(completions)

    (value,) = score([length, awaited, lambda completion: 1], [row()], weights=[2.0, 1.0, 0.5])
    assert value == 6.5 and value.parts == {"length": 3.0, "reward3": 1.0}


def maybe(completion, **_):
    """Apply to some answers only, and show a number."""
    return {"reward": 2.0, "seen": 7} if completion == "yes" else None


async def maybe_later(completion, **_):
    return maybe(completion)


@pytest.mark.parametrize("fn", [maybe, maybe_later, lambda completion: maybe(completion)])
def test_parts_and_none_of_a_reward_for_one_answer(fn):
    """In another process, awaited, and on a thread."""
    (alone,) = score(fn, [row()])
    assert alone == 2.0 and alone.parts == {"seen": 7.0}
    both = score([fn, lambda completion: 1], [row(), row("no")])
    assert both == [3.0, 1.0]
    name = next(iter(both[0].parts))
    assert both[0].parts == {name: 2.0, "reward2": 1.0, f"{name}/seen": 7.0} and both[1].parts == {"reward2": 1.0}
    with pytest.raises(RewardError, match="returned None, and there is no other reward"):
        score(fn, [row("no")])


def test_a_function_of_a_module_runs_in_another_process():
    parts = read_rewards(math_reward, None)
    assert parts[0].is_importable
    assert score(math_reward, [row("\\boxed{4}", answer="4"), row("5", answer="4")]) == [1, 0]


def test_what_cannot_be_imported_runs_on_threads():
    names = Rewards(read_rewards([lambda completion: 1, math_reward], None), 1.0).in_threads
    assert names == ["reward1"]


def test_rollout_workers_compute_the_rewards_too():
    """They got a pool without functions, called it as the reward, and imported the script, which trained again."""
    copy = pickle.loads(pickle.dumps(Rewards(read_rewards([math_reward, think_answer_reward], [1.0, 0.5]), None)))
    try:
        (value,) = asyncio.run(copy.run(copy, [row("\\boxed{4}", answer="4")]))
        assert value == 1.0 and value.parts == {"math_reward": 1.0, "TagsReward": 0.0}
        assert copy.timeout_s == 60.0
    finally:
        copy.close()


def test_rollout_workers_cannot_import_functions_of_a_script():
    parts = read_rewards([math_reward, lambda completion: 1.0], None)
    check_sendable(parts, 0)
    check_sendable(parts[:1], 2)
    with pytest.raises(ConfigError, match=r"import the reward reward2: put it into a module of its own, or set roll"):
        check_sendable(parts, 2)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: 1.0, "names neither"),
        (lambda **data: 1.0, "names neither"),
        (lambda completion, completions: 1.0, "names both completion and completions"),
        ("text", "is not a function"),
        (torch.nn.Linear(1, 1), "give its folder"),
        (operator.itemgetter(0), "signature"),
        ([], "no reward function"),
    ],
)
def test_what_is_no_reward_is_refused(fn, message):
    with pytest.raises(ConfigError, match=message):
        read_rewards(fn, None)


def test_weights_and_columns_are_checked():
    with pytest.raises(ConfigError, match="2 numbers for 1 reward"):
        read_rewards(lambda completion: 1, [1, 2])
    with pytest.raises(ConfigError, match=r"needs `answer`, but rows of train_dataset have the columns level"):
        check_columns(read_rewards(lambda completion, answer: 1, None), ["level"])
    with pytest.raises(ConfigError, match=r"needs `answer`, but rows of eval_dataset have the columns \(none\)"):
        check_columns(read_rewards(lambda completion, answer: 1, None), [], "eval_dataset")
    with pytest.raises(ConfigError, match=r"needs `log_extra`, which there is not here: give it the default None"):
        check_columns(read_rewards(lambda completions, log_extra: [1], None), ["level"])
    check_columns(read_rewards([lambda completion, answer=None: 1, lambda completions, level: 1], None), ["level"])
    check_columns(read_rewards(lambda completions, image=None: [1], None), ["image"])
    for fn in (lambda completions, images: [1], lambda completion, images: 1):
        with pytest.raises(ConfigError, match=r"needs `images`, a column that the workflow reads"):
            check_columns(read_rewards(fn, None), ["images"])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda completion: 1 / 0, "ZeroDivisionError"),
        (lambda completion: float("nan"), "must be finite"),
        (lambda completion: "good", "must return a number"),
        (lambda completion: np.zeros(2), r"returned array.*ndarray.*must return a number"),
        (lambda completion: torch.zeros(2), "must return a number"),
        (lambda completion: 10**400, r"returned 1000.*\(int\); it must return a number"),
        (lambda completion: 1e39, r"must be finite, also in float32"),
        (lambda completion: [][0], "IndexError"),
        (lambda completion: next(iter([])), "StopIteration"),
        (lambda completions: 1.0, "must return a list"),
        (lambda completions: [1.0], "1 values for 2 completions"),
        (lambda completions: [1.0, float("inf")], "must be finite"),
        (lambda completions: [None, 1.0], "returned None"),
    ],
)
def test_a_wrong_reward_is_named(fn, message):
    with pytest.raises(RewardError, match=message):
        score(fn, [row(), row()])


def test_a_reward_that_hangs_fails_at_its_deadline():
    stop = threading.Event()
    with pytest.raises(RewardError, match=r"did not return within 0.1 s \(reward_timeout_s\)"):
        score(lambda completion: stop.wait(60), [row()], timeout_s=0.1)
    stop.set()


def test_the_deadline_of_a_reward_on_a_thread_is_that_of_one_answer():
    def asks_a_judge(completion, **row):
        time.sleep(0.4)
        return 1.0

    assert score(asks_a_judge, [row(str(i)) for i in range(4)], timeout_s=0.7) == [1.0] * 4


def test_a_timeout_inside_of_a_reward_is_an_error_of_the_reward():
    def reward(completion):
        raise TimeoutError("the judge did not answer")

    with pytest.raises(RewardError, match=r"(?s)reward reward raised TimeoutError: the judge did not answer"):
        score(reward, [row()])


@pytest.mark.parametrize("is_trl", [False, True])
def test_an_error_shows_the_lines_of_the_reward_only(is_trl):
    def look_up(text):
        return {}[text]

    wanted = (lambda completions: look_up("key")) if is_trl else (lambda completion: look_up("key"))
    with pytest.raises(RewardError) as caught:
        score(wanted, [row()])
    first, *lines = str(caught.value).splitlines()
    assert first == "reward reward1 raised KeyError: 'key'" and "look_up" in lines[-2]
    assert sum(line.startswith('  File "') for line in lines) == 2


def test_a_reward_may_name_the_state_of_the_trainer():
    def reward(completions, trainer_state):
        assert trainer_state is None
        return [1.0] * len(completions)

    check_columns(read_rewards(reward, None), ["prompt"])
    assert score(reward, [row()]) == [1]
