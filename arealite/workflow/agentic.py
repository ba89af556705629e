"""`AgenticWorkflow`: an agent that asks the model, against an environment, until the episode ends.

The agent is by default `ChatAgent`: an observation is a message of the user, the model's reply is the action. The
environment runs in a worker process, or on the event loop if its methods are coroutines. All samples of an episode
begin in the same state, because they reset with the same seed.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from arealite.api.chat import encode_chat
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, RequestError
from arealite.api.io_struct import Batch
from arealite.api.named_code import load_object
from arealite.api.rollout_api import Agent, Environment, RolloutWorkflow, Step
from arealite.api.trajectory import Trajectory
from arealite.utils.pools.call_pool import CallError, CallPool, Lease
from arealite.utils.trace.tracing import part_of_episode
from arealite.utils.vision import VisionProcessor
from arealite.workflow.groups import play_all

MakeEnvironment = Callable[[], Environment]


@dataclass
class Policy:
    """The model as an agent sees it: `generate` records what the model reads and what it samples."""

    engine: InferenceEngine
    gconfig: GenerationHyperparameters
    trajectory: Trajectory
    seed: int | None = None
    # Why the model could not be told something. Other refusals say that the conversation is too long.
    bad_observation: RequestError | None = None

    async def generate(self, observation: Any) -> str:
        """Tell the model something (text, a message, messages or tokens), and return its reply as text."""
        try:
            if self.trajectory.processor is None:
                self.trajectory.observe(observation)
            else:
                # Decoding images takes milliseconds: the other episodes go on meanwhile.
                await asyncio.to_thread(self.trajectory.observe, observation)
        except RequestError as error:
            self.bad_observation = error
            raise
        return await self.trajectory.generate(self.engine, self.gconfig, self.seed)


class ChatAgent(Agent):
    """Sends each observation to the model (text as a user's message), and returns the reply."""

    def __init__(self, policy: Policy, system_prompt: str | None = None):
        self.policy, self.system_prompt = policy, system_prompt

    async def act(self, observation: Any) -> str:
        observation = [observation] if _is_message(observation) else observation
        is_chat = isinstance(observation, list) and bool(observation) and _is_message(observation[0])
        messages = observation if is_chat else [{"role": "user", "content": str(observation)}]
        if self.system_prompt and not self.policy.trajectory.ids:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return await self.policy.generate(messages)


def _is_message(observation: Any) -> bool:
    """Return whether this is a chat message; other dicts are data, such as the state of a game."""
    return isinstance(observation, Mapping) and "role" in observation


class AgenticWorkflow(RolloutWorkflow):
    """Plays `n_samples` agents, each in an environment of its own; the reward is the sum over all steps.

    `make_environment` and `make_agent` are classes or functions, or their names as `package.module:Class`, and are
    called with `environment_args` and, after the policy, `agent_args`. A row's columns go to the environment's `reset`
    as `options`. Each call of the environment has `timeout_s`. A reward `t` steps later counts `discount ** t` times.
    With a `processor` (a `VisionProcessor`, or the folder of the model) messages may have images, in any turn.
    """

    def __init__(
        self,
        make_environment: MakeEnvironment | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        make_agent: Callable[..., Agent] | str = ChatAgent,
        max_turns: int = 32,
        discount: float = 1.0,
        timeout_s: float = 30.0,
        max_environments: int = 64,
        enable_thinking: bool = False,
        environment_args: Mapping[str, Any] | None = None,
        agent_args: Mapping[str, Any] | None = None,
        processor: VisionProcessor | str | None = None,
    ):
        self.processor = VisionProcessor.load(processor) if isinstance(processor, str) else processor
        if isinstance(make_environment, str):
            make_environment = load_object(make_environment, "make_environment")
        if not callable(make_environment):
            raise ConfigError(
                f"make_environment is a {type(make_environment).__name__} object, and each sample plays in an "
                "environment of its own: give the class, a function, or functools.partial(class, arguments)"
            )
        # Not always a partial: the kind of a class is looked at, and it is sent to processes.
        self.make_environment: MakeEnvironment = (
            partial(make_environment, **environment_args) if environment_args else make_environment
        )
        agent = load_object(make_agent, "make_agent") if isinstance(make_agent, str) else make_agent
        self.make_agent: Callable[[Policy], Agent] = partial(agent, **(agent_args or {}))
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self.max_turns, self.discount, self.timeout_s = max_turns, discount, timeout_s
        self.enable_thinking = enable_thinking
        self.pool = CallPool(max_environments)

    def check_row(self, data: dict[str, Any]) -> None:
        agent: Any = self.make_agent
        while isinstance(agent, partial):
            agent = agent.func
        if inspect.isclass(agent) and issubclass(agent, ChatAgent) and self.processor is None:
            encode_chat(self.tokenizer, [{"role": "user", "content": "an observation"}])

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        return Trajectory.join(await play_all(self._play(engine, data, i) for i in range(self.gconfig.n_samples)))

    async def _play(self, engine: InferenceEngine, data: dict[str, Any], index: int) -> Trajectory:
        seed = data.get("seed")
        trajectory = Trajectory(self.tokenizer, processor=self.processor, enable_thinking=self.enable_thinking)
        policy = Policy(engine, self.gconfig, trajectory, None if seed is None else seed + index)
        options = {key: value for key, value in data.items() if key != "seed"}
        async with self._open_environment() as environment:
            observation = await environment.reset(seed, options)
            total, num_steps, is_over = await self._run(self.make_agent(policy), environment, observation, policy)
        trajectory.stat("steps", num_steps).stat("finished", float(is_over))
        return trajectory.reward(total)

    @contextlib.asynccontextmanager
    async def _open_environment(self) -> AsyncIterator["_InLoop | _InWorker"]:
        kind = getattr(self.make_environment, "func", self.make_environment)
        if inspect.iscoroutinefunction(getattr(kind, "step", None)):
            environment = _InLoop(self.make_environment(), self.timeout_s)
            try:
                yield environment
            finally:
                await environment.close()
            return
        async with self.pool.lease(getattr(kind, "__module__", __name__)) as lease:
            try:
                yield _InWorker(self.make_environment, lease, self.timeout_s)
            except CallError:
                # The environment is in an unknown state: it ends with its process.
                lease.is_usable = False
                raise

    async def _run(
        self, agent: Agent, environment: "_InLoop | _InWorker", observation: Any, policy: Policy
    ) -> tuple[float, int, bool]:
        """Act until the end; returns the reward, the number of steps, and whether the environment ended it."""
        total, trajectory = 0.0, policy.trajectory
        for turn in range(self.max_turns):
            try:
                action = await agent.act(observation)
            except RequestError as error:
                if error is policy.bad_observation or not trajectory.ids or turn == 0:
                    raise
                # The first turn was accepted: the conversation has become longer than the model's context.
                trajectory.truncated = True
                return total, turn, False
            with part_of_episode("environment"):
                observation, reward, terminated, truncated, _ = await environment.step(action)
            total += reward * self.discount**turn
            if terminated or truncated:
                trajectory.truncated = bool(truncated and not terminated)
                return total, turn + 1, True
        trajectory.truncated = True
        return total, self.max_turns, False


class _InLoop:
    """An environment whose methods are coroutines, or `step` at least."""

    def __init__(self, environment: Any, timeout_s: float):
        self.environment, self.timeout_s = environment, timeout_s

    async def reset(self, seed: int | None, options: dict[str, Any]) -> Any:
        return _check_start(await self._await(self.environment.reset(seed=seed, options=options)))

    async def step(self, action: Any) -> Step:
        return _check_step(await self._await(self.environment.step(action)))

    async def close(self) -> None:
        await self._await(self.environment.close())

    async def _await(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        deadline = asyncio.timeout(self.timeout_s)
        try:
            async with deadline:
                return await result
        except TimeoutError as error:
            # An environment may raise a TimeoutError of its own.
            if deadline.expired():
                raise TimeoutError(f"the environment did not return within {self.timeout_s:g} s (timeout_s)") from error
            raise


class _InWorker:
    """An environment in a leased worker process."""

    def __init__(self, make: MakeEnvironment, lease: Lease, timeout_s: float):
        self.make, self.lease, self.timeout_s = make, lease, timeout_s

    async def reset(self, seed: int | None, options: dict[str, Any]) -> Any:
        name = "reset() of the environment"
        return await self.lease.call(_reset, self.make, seed, options, timeout_s=self.timeout_s, name=name)

    async def step(self, action: Any) -> Step:
        return await self.lease.call(_step, action, timeout_s=self.timeout_s, name="step() of the environment")


# The environment of a worker process, which the episodes that lease it use one after the other.
_kept: dict[str, Environment] = {}


def _reset(make: MakeEnvironment, seed: int | None, options: dict[str, Any]) -> Any:
    # Two workflows have two pools, so that a worker only ever makes one kind of environment.
    environment = _kept.get("environment")
    if environment is None:
        environment = _kept["environment"] = make()
    return _check_start(environment.reset(seed=seed, options=options))


def _step(action: Any) -> Step:
    return _check_step(_kept["environment"].step(action))


def _check_start(result: Any) -> Any:
    """Return the observation of what `reset` returned; raises `ConfigError` for anything but two values."""
    if inspect.iscoroutine(result):
        result.close()
        raise ConfigError(
            "reset() of the environment is a coroutine function, which can be seen only if make_environment is a "
            "class: give the class, or functools.partial(class, arguments)"
        )
    # Text and messages of two letters or keys could be unpacked too.
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(f"reset() of the environment returned {str(result)[:200]!r}; expected (observation, info)")
    return result[0]


def _check_step(result: Any) -> Step:
    if not isinstance(result, tuple) or len(result) != 5:
        raise ConfigError(
            f"step() of the environment returned {str(result)[:200]!r}; expected (observation, reward, terminated, "
            "truncated, info)"
        )
    observation, reward, terminated, truncated, _ = result
    # `info` stays in the worker: nobody reads it, and it may be large.
    return observation, float(reward), bool(terminated), bool(truncated), {}
