"""`AgenticWorkflow`: agents and environments; one that hangs or crashes costs its own episode."""

import asyncio
import functools
import importlib

import pytest

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import ConfigError, DatasetError, RequestError
from arealite.api.rollout_api import Agent, load_workflow
from arealite.env.adapters import GymnasiumEnvironment, QuestionEnvironment, VerifiersEnvironment
from arealite.utils.pools.call_pool import CallError
from arealite.workflow.agentic import AgenticWorkflow, ChatAgent
from tests import tiny_model
from tests.workflow.scripted import AsyncCount, Count, ScriptedEngine, run


def make(environment, tokenizer, n_samples=1, **kwargs):
    kwargs.setdefault("max_environments", 2)
    return AgenticWorkflow(environment, GenerationHyperparameters(n_samples=n_samples), tokenizer, **kwargs)


@pytest.mark.parametrize("environment", [Count, AsyncCount])
def test_an_episode_until_its_end(tokenizer, environment):
    engine = ScriptedEngine(tokenizer, ["1", "7", "2", "3"])
    batch = run(make(environment, tokenizer, discount=0.5), engine, {"limit": 3, "seed": 4})
    text = tokenizer.decode(batch["input_ids"][0])
    assert text.startswith("<user>count to 3\n<assistant>1<eos>\n<user>at 1\n<assistant>7<eos>\n<user>at 1")
    assert batch["rewards"].tolist() == [1 + 0.25 + 0.125] and batch["truncated"].tolist() == [False]
    assert batch["stats/steps"].tolist() == [4] and batch["stats/finished"].tolist() == [1]


def test_ends_that_are_no_ends(tokenizer):
    batch = run(make(Count, tokenizer), ScriptedEngine(tokenizer, ["1", "stop"]), {})
    assert (batch["truncated"].tolist(), batch["stats/finished"].tolist()) == ([True], [1])
    batch = run(make(Count, tokenizer, max_turns=2), ScriptedEngine(tokenizer, lambda prompt: "7"), {})
    assert (batch["truncated"].tolist(), batch["stats/finished"].tolist()) == ([True], [0])
    engine = ScriptedEngine(tokenizer, lambda prompt: "7", max_tokens=100)
    assert run(make(Count, tokenizer), engine, {})["truncated"].tolist() == [True]


class Tells(Count):
    """Its observations are given."""

    def __init__(self, *observations):
        super().__init__()
        self.observations = iter(observations)

    async def reset(self, *, seed=None, options=None):
        return next(self.observations), {}

    async def step(self, action):
        return next(self.observations), 0.0, action == "stop", False, {}


def test_messages_are_told_as_they_are_and_other_dicts_as_text(tokenizer):
    told = [{"at": 3}, {"role": "user", "content": "go on"}, [{"at": 4}], [{"role": "system", "content": "end"}], ""]
    engine = ScriptedEngine(tokenizer, ["a", "b", "c", "stop"])
    run(make(functools.partial(Tells, *told), tokenizer), engine, {})
    read = [line for line in engine.prompts[-1].replace("<pad>", "|").split("\n") if not line.startswith("<assistant>")]
    assert read == ["<user>{'at': 3}", "<user>go on", "<user>|{'at': 4}|", "<system>end"]


def test_a_message_that_the_template_refuses_is_no_end_of_the_context(tokenizer, monkeypatch):
    """All episodes would be cut off at this turn, and nobody would learn why."""
    template = "{% if messages[-1].role == 'system' %}{{ raise_exception('no system message here') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", template + tokenizer.chat_template)
    told = ["hello", {"role": "system", "content": "be brief"}]
    with pytest.raises(RequestError, match="no system message here"):
        run(make(functools.partial(Tells, *told), tokenizer), ScriptedEngine(tokenizer, ["a"]), {})


@pytest.mark.parametrize(
    ("action", "message"),
    [("crash", "exit code 9"), ("raise", "KeyError: 'no such state'"), ("nothing", "returned 'None'; expected")],
)
def test_a_broken_environment_costs_its_own_episode(tokenizer, action, message):
    """Another episode that runs meanwhile ends well, and so does the next one in the same place."""
    workflow = make(Count, tokenizer, max_environments=2)

    async def play():
        good = ScriptedEngine(tokenizer, lambda prompt: str(prompt.count("<assistant>")))
        bad = ScriptedEngine(tokenizer, [action])
        results = await asyncio.gather(
            workflow.arun_episode(bad, {}), workflow.arun_episode(good, {"limit": 5}), return_exceptions=True
        )
        after = await workflow.arun_episode(good, {"limit": 2})
        workflow.pool.close()
        return [*results, after]

    broken, fine, after = asyncio.run(play())
    assert isinstance(broken, CallError) and message in str(broken)
    assert fine["rewards"].tolist() == [5] and after["rewards"].tolist() == [2]


def test_an_environment_that_hangs_is_killed(tokenizer):
    with pytest.raises(CallError, match=r"^reset\(\) of the environment did not return within 1 s"):
        run(make(Count, tokenizer, timeout_s=1.0), ScriptedEngine(tokenizer, []), {"fault": "hang in reset"})
    with pytest.raises(TimeoutError, match=r"the environment did not return within 0\.2 s \(timeout_s\)"):
        run(make(AsyncCount, tokenizer, timeout_s=0.2), ScriptedEngine(tokenizer, ["hang"]), {})


class PlainStart(AsyncCount):
    """Only what takes time is a coroutine."""

    def reset(self, *, seed=None, options=None):
        return self.inner.reset(seed=seed, options=options)


def test_methods_that_take_no_time_need_not_be_coroutines(tokenizer):
    batch = run(make(PlainStart, tokenizer), ScriptedEngine(tokenizer, ["1"]), {"limit": 1})
    assert batch["rewards"].tolist() == [1]


class Forgetful(AsyncCount):
    """Leaves info out."""

    async def reset(self, *, seed=None, options=None):
        return {"role": "user", "content": "count"}


def make_async_count():
    return AsyncCount()


def test_what_reset_returns_is_checked(tokenizer):
    """A message has two keys: it was unpacked, and the agent read `role`."""
    with pytest.raises(ConfigError, match=r"reset\(\) .* returned .*'count'.*; expected \(observation, info\)"):
        run(make(Forgetful, tokenizer), ScriptedEngine(tokenizer, ["1"]), {})
    with pytest.raises(CallError, match=r"reset\(\) of the environment is a coroutine function.*give the class"):
        run(make(make_async_count, tokenizer), ScriptedEngine(tokenizer, ["1"]), {})


class Careful(Agent):
    """Thinks first, then acts; its thoughts are trained on too."""

    def __init__(self, policy):
        self.policy = policy

    async def act(self, observation):
        await self.policy.generate([{"role": "user", "content": f"plan: {observation}"}])
        return await self.policy.generate([{"role": "user", "content": "act"}])


def test_agents_of_ones_own(tokenizer):
    engine = ScriptedEngine(tokenizer, ["hm", "1"])
    batch = run(make(Count, tokenizer, make_agent=Careful), engine, {"limit": 1})
    trained = tokenizer.decode(batch["input_ids"][0][batch["loss_mask"][0].bool()])
    assert (trained, batch["rewards"].tolist()) == ("hm<eos>1<eos>", [1])
    agent = functools.partial(ChatAgent, system_prompt="be brief")
    engine = ScriptedEngine(tokenizer, ["1"])
    run(make(Count, tokenizer, make_agent=agent), engine, {"limit": 1})
    assert engine.prompts[0].startswith("<system>be brief\n<user>count")


def to_text(observation, env):
    return f"You are at {observation} of {env.unwrapped.desc.size}."


def to_action(text, env):
    if text not in "0123" or not text:
        raise ValueError("answer 0, 1, 2 or 3")
    return int(text)


def test_gymnasium(tokenizer):
    pytest.importorskip("gymnasium")
    make_environment = functools.partial(
        GymnasiumEnvironment, "FrozenLake-v1", to_text, to_action, is_slippery=False, map_name="4x4"
    )
    engine = ScriptedEngine(tokenizer, ["down", "1", "1", "2", "1", "2", "2"])
    batch = run(make(make_environment, tokenizer), engine, {"seed": 1})
    assert "You are at 0 of 16." in engine.prompts[0]
    assert "no valid action: answer 0, 1, 2 or 3" in engine.prompts[1]
    assert batch["rewards"].tolist() == [1] and batch["stats/steps"].tolist() == [7]


def test_actions_that_a_gymnasium_environment_does_not_have(tokenizer):
    """A number outside of the space costs a step, not the episode."""
    pytest.importorskip("gymnasium")
    lake = functools.partial(GymnasiumEnvironment, "FrozenLake-v1", is_slippery=False)
    engine = ScriptedEngine(tokenizer, ["7", "-1", "1"])
    batch = run(make(functools.partial(lake, to_action=as_number), tokenizer, max_turns=3), engine, {"seed": 1})
    assert "no valid action: 7 is not from 0 to 3" in engine.prompts[1]
    assert "no valid action: -1 is not from 0 to 3" in engine.prompts[2]
    assert batch["stats/steps"].tolist() == [3]


def test_what_no_episode_can_be_played_with_is_refused(tokenizer):
    gymnasium = pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match="plays 2 episodes at once: give an environment of one"):
        GymnasiumEnvironment(gymnasium.make_vec("FrozenLake-v1", num_envs=2))
    with pytest.raises(ConfigError, match=r"is a GymnasiumEnvironment object.*give the class, a function"):
        make(GymnasiumEnvironment("FrozenLake-v1"), tokenizer)
    lake = functools.partial(GymnasiumEnvironment, "FrozenLake-v1")
    with pytest.raises(CallError, match=r"takes actions of Discrete\(4\), and a reply is text: give to_action"):
        run(make(lake, tokenizer), ScriptedEngine(tokenizer, ["1"]), {"seed": 1})


def as_number(text, env):
    return int(text)


def test_environments_and_agents_that_a_configuration_names(tokenizer):
    pytest.importorskip("gymnasium")
    own = "tests.workflow.test_agentic"
    arguments = {
        "make_environment": "arealite.env.adapters:GymnasiumEnvironment",
        "environment_args": {"env": "FrozenLake-v1", "to_action": f"{own}:to_action", "is_slippery": False},
        "make_agent": "arealite.workflow.agentic:ChatAgent",
        "agent_args": {"system_prompt": "be brief"},
        "max_turns": 1,
        "max_environments": 1,
    }
    offered = {"gconfig": GenerationHyperparameters(n_samples=1), "tokenizer": tokenizer}
    engine = ScriptedEngine(tokenizer, ["1"])
    batch = run(load_workflow("arealite.workflow.agentic:AgenticWorkflow", arguments, **offered), engine, {"seed": 1})
    assert engine.prompts[0].startswith("<system>be brief\n<user>0") and batch["stats/steps"].tolist() == [1]
    with pytest.raises(ConfigError, match="has no 'Gone'"):
        load_workflow("arealite.workflow.agentic:AgenticWorkflow", {"make_environment": f"{own}:Gone"}, **offered)
    agent = load_workflow("arealite.workflow.openai:AgentWorkflow", {"agent": f"{own}:to_action"}, **offered).agent
    assert agent is importlib.import_module(own).to_action


class Sums:
    """Questions as reasoning-gym has them."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"question": f"{index}+{index}?", "answer": str(2 * index)}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])


def test_datasets_with_verifiers(tokenizer):
    workflow = make(functools.partial(QuestionEnvironment, Sums()), tokenizer)
    batch = run(workflow, ScriptedEngine(tokenizer, [" 4 "]), {"index": 5})
    assert batch["rewards"].tolist() == [1] and batch["stats/steps"].tolist() == [1]


class Rubric:
    def get_reward_funcs(self):
        return [lambda completion, answer: completion[-1]["content"] == answer, lambda **kw: len(kw["completion"])]

    def get_reward_weights(self):
        return [1.0, 0.1]


class Guess:
    """A conversation as verifiers has them."""

    rubric = Rubric()

    async def is_completed(self, messages, state):
        return messages[-1]["content"] == state["answer"]

    def env_response(self, messages, state):
        return [{"role": "user", "content": f"not {messages[-1]['content']}"}], state


def test_conversations_of_verifiers(tokenizer):
    engine = ScriptedEngine(tokenizer, ["3", "4"])
    row = {"prompt": [{"role": "system", "content": "guess"}, {"role": "user", "content": "?"}], "answer": "4"}
    batch = run(make(functools.partial(VerifiersEnvironment, Guess()), tokenizer), engine, row)
    assert tokenizer.decode(batch["input_ids"][0]) == (
        "<system>guess\n<user>?\n<assistant>3<eos>\n<user>not 3\n<assistant>4<eos>"
    )
    assert batch["rewards"].tolist() == pytest.approx([1.3])


def test_a_chat_agent_without_a_chat_template_is_refused_before_its_first_episode():
    """Each of its episodes would fail, after an environment was made for it."""
    plain = tiny_model.make_tokenizer()
    plain.chat_template = None
    gconfig = GenerationHyperparameters(n_samples=2)
    for agent in (ChatAgent, functools.partial(ChatAgent, system_prompt="play")):
        with pytest.raises(DatasetError, match="the tokenizer has no chat template: use an instruct model"):
            AgenticWorkflow(object, gconfig, plain, make_agent=agent).check_row({"number": 0})
    AgenticWorkflow(object, gconfig, tiny_model.make_tokenizer()).check_row({"number": 0})
    # Another agent may send plain text.
    AgenticWorkflow(object, gconfig, plain, make_agent=lambda policy: None).check_row({"number": 0})
