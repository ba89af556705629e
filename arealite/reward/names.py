"""Rewards by name: built-in ones, the folder of a reward model, and `package.module:function`."""

from pathlib import Path
from typing import cast

from arealite.api.errors import ConfigError
from arealite.api.named_code import load_object, suggest
from arealite.api.reward_api import RewardFn
from arealite.reward.choice import choice_reward
from arealite.reward.code import CodeReward, code_reward
from arealite.reward.countdown import countdown_reward
from arealite.reward.format import think_answer_reward
from arealite.reward.gsm8k import gsm8k_reward
from arealite.reward.math import math_reward
from arealite.reward.model import LocalRewardModel
from arealite.reward.qa import f1_reward, qa_reward
from arealite.reward.reasoning import reasoning_gym_reward

REWARDS: dict[str, RewardFn] = {
    "gsm8k": gsm8k_reward,
    "math": math_reward,
    "countdown": countdown_reward,
    "reasoning_gym": reasoning_gym_reward,
    "qa": qa_reward,
    "f1": f1_reward,
    "choice": choice_reward,
    "code": code_reward,
    "code_partial": CodeReward(partial=True),
    "think_answer": think_answer_reward,
}


def named_reward(name: str) -> RewardFn:
    """Return the reward that `name` means; raises `ConfigError` if there is none."""
    if name in REWARDS:
        return REWARDS[name]
    if ":" in name:
        return cast(RewardFn, load_object(name, "reward"))
    if "/" in name or Path(name).is_dir():
        return LocalRewardModel(name)
    choice = f"use {', '.join(REWARDS)}, the folder of a reward model, or package.module:function"
    raise ConfigError(f"there is no reward {name!r}: {choice}{suggest(name, REWARDS)}")
