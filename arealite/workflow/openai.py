"""`AgentWorkflow`: trains any agent that talks to an endpoint of OpenAI's or Anthropic's API.

Each attempt gets an endpoint and a token of its own. The gateway records what the agent's calls sampled, token for
token (`arealite.agents`). The agent returns a reward, or posts rewards to `{base_url}/rl/reward`. An agent that hangs
or raises costs its own attempt: functions that may block run in worker processes, which are killed at the deadline.
"""

import asyncio
import copy
import json
import logging
import math
import os
import select
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from arealite.agents.export import to_batch
from arealite.agents.gateway import Gateway, OpenSession, SessionLimits
from arealite.agents.host import GatewayHost
from arealite.agents.session import Session
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import RewardError, ServerError
from arealite.api.io_struct import STATS_PREFIX, Batch
from arealite.api.named_code import load_object
from arealite.api.reward_api import MAX_REWARD, is_async
from arealite.api.workflow_api import RolloutWorkflow
from arealite.utils.beside import run_beside
from arealite.utils.pools.call_pool import CallPool, CallTimeout
from arealite.utils.process import end_families
from arealite.utils.seeds import derive_seed
from arealite.utils.text import clean
from arealite.utils.vision import VisionProcessor

logger = logging.getLogger("arealite.agents")
Agent = (
    Callable[[dict[str, Any], str, str], Awaitable[float | None]]
    | Callable[[dict[str, Any], str, str], float | None]
    | Sequence[str]
)
_SHOWN_OUTPUT = 4096
# An agent that is past its deadline has so long to clean up.
_ENDING_S = 5.0
# How often the end of a command is looked for while it writes nothing.
_LOOK_MS = 100
# Linux allows 32 pages for a variable, with its name and a zero byte.
_MAX_ROW = 32 * 4096 - len("AREALITE_ROW=") - 1


class AgentWorkflow(RolloutWorkflow):
    """Runs `gconfig.n_samples` attempts of an agent at each row.

    `agent` is `async def agent(row, base_url, api_key) -> float | None`, or the same without `async`, which runs in one
    of `max_processes` worker processes, or the name of either as `package.module:function`, or a command as a list of
    words. A command finds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and the row as JSON in
    AREALITE_ROW; its reward is the last line of its output. `timeout_s` counts from the start of the agent, not while
    it waits for a process. With a `processor` (a `VisionProcessor`, or the folder of the model) messages may have
    images as data: URLs, in any turn.
    """

    def __init__(
        self,
        agent: Agent | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        timeout_s: float = 600.0,
        turn_discount: float = 1.0,
        limits: SessionLimits | None = None,
        template_kwargs: dict[str, Any] | None = None,
        max_processes: int = 32,
        processor: VisionProcessor | str | None = None,
    ):
        self.agent: Agent = load_object(agent, "agent") if isinstance(agent, str) else agent
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self.timeout_s, self.turn_discount = timeout_s, turn_discount
        self.template_kwargs = template_kwargs or {}
        processor = VisionProcessor.load(processor) if isinstance(processor, str) else processor
        tokenizer = tokenizer if processor is None else processor.tokenizer
        self.host = GatewayHost(tokenizer=tokenizer, limits=limits, processor=processor)
        # Starts processes when it is used: only agents that may block need any.
        self.pool = CallPool(max_processes)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        gateway = await self.host.get(engine)
        attempts = range(self.gconfig.n_samples)
        episode = cast(asyncio.Task[Any], asyncio.current_task())
        results = await asyncio.gather(*(self._attempt(gateway, data, attempt, episode) for attempt in attempts))
        errors = [result for result in results if isinstance(result, Exception)]
        sessions = {i: result for i, result in enumerate(results) if isinstance(result, Session)}
        for error in errors[:1]:
            text = clean(f"{type(error).__name__}: {error}")[:1000]
            if not sessions:
                raise RewardError(f"all {len(errors)} attempts of the agent failed; the first one: {text}") from error
            logger.warning("%d of %d attempts of an agent failed; the first one: %s", len(errors), len(attempts), text)
        batch = to_batch(sessions)
        failed = torch.full((len(batch["rewards"]),), float(len(errors)))
        return batch | {STATS_PREFIX + "failed_attempts": failed}

    async def _attempt(
        self, gateway: Gateway, data: dict[str, Any], number: int, episode: asyncio.Task[Any]
    ) -> Session | Exception:
        """Run the agent once; returns its session, or why it has failed."""
        seed = data.get("seed")
        seed = None if seed is None else derive_seed(seed, number)
        gconfig = replace(self.gconfig, n_samples=1)
        try:
            found = gateway.open_session(gconfig, seed, self.turn_discount, self.template_kwargs)
        except ServerError as error:
            return error
        try:
            reward = await self._run(copy.deepcopy(data), found)
            return _finish(found.session, reward)
        # An agent may raise anything; it costs its own attempt.
        except Exception as error:
            return error
        except asyncio.CancelledError:
            if episode.cancelling():
                raise
            return RewardError("the agent raised CancelledError: it awaited something that was cancelled")
        finally:
            gateway.close_session(found.id)

    async def _run(self, row: dict[str, Any], found: OpenSession) -> float | None:
        """Return what the agent returns; raises `TimeoutError` if it does not end in time."""
        agent, late = self.agent, f"the agent did not end within {self.timeout_s:g} s"
        if callable(agent) and not is_async(agent):
            try:
                return await self.pool.run(agent, row, found.base_url, found.token, timeout_s=self.timeout_s)
            except CallTimeout:
                raise TimeoutError(late) from None
        call = agent(row, found.base_url, found.token) if callable(agent) else _run_command(list(agent), row, found)
        task = asyncio.ensure_future(_catch_exit(cast(Awaitable[float | None], call)))
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
            if not done:
                raise TimeoutError(late)
            return task.result()
        finally:
            if task.cancel():
                # Commands are ended here. An agent that ignores its cancellation is left behind: its calls are refused.
                await asyncio.wait({task}, timeout=_ENDING_S)


async def _catch_exit(call: Awaitable[float | None]) -> float | None:
    """Return what an agent returns; one that exits costs its own attempt, not the event loop of all."""
    try:
        return await call
    except SystemExit as error:
        raise RewardError(f"the agent raised {error!r}: raise another exception, or return a reward") from error


def _finish(session: Session, reward: Any) -> Session:
    """Set the reward that an agent returned; raises if the session cannot be trained on."""
    if reward is not None:
        try:
            # Also a number of NumPy or torch, as of reward functions.
            value = float(reward) if hasattr(reward, "__float__") else math.nan
        # An array of several numbers, a number beyond those of float64.
        except (TypeError, ValueError, RuntimeError, OverflowError):
            value = math.nan
        if not abs(value) <= MAX_REWARD:
            text = f"the agent returned {repr(reward)[:100]}; expected a finite number, also in float32, or None"
            raise RewardError(text)
        session.reward(value)
    if not session.has_reward:
        raise RewardError("the agent returned None, and posted no reward to {base_url}/rl/reward")
    if not any(reply.tokens for reply in session.replies.values()):
        raise RewardError("the agent has not called the model")
    return session


async def _run_command(command: list[str], row: dict[str, Any], found: OpenSession) -> float | None:
    """Run a command and read the reward in the last line of its output. It ends with the attempt."""
    own = {
        "OPENAI_BASE_URL": found.base_url,
        "OPENAI_API_KEY": found.token,
        "ANTHROPIC_BASE_URL": found.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": found.token,
        "AREALITE_ROW": json.dumps(row, default=str),
    }
    if (size := len(own["AREALITE_ROW"])) > _MAX_ROW:
        raise RewardError(
            f"the row has {size} characters as JSON, and a command finds it in an environment variable, which holds at "
            f"most {_MAX_ROW}: drop columns, give the path of a file, or write the agent as a function"
        )
    process = subprocess.Popen(
        command,
        env={**os.environ, **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, code = await asyncio.gather(
            run_beside(lambda: _last_output(process)), run_beside(lambda: _await_end(process))
        )
    finally:
        if process.poll() is None or _has_group(process.pid):
            await asyncio.shield(run_beside(lambda: end_families([process.pid], 0.0)))
            await asyncio.shield(run_beside(process.wait))
    text = clean(output.decode(errors="replace"))
    if code != 0:
        raise RewardError(f"the agent's command ended with code {code}; the end of its output: {text[-500:]}")
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
    try:
        return float(last)
    except ValueError:
        if found.session.has_reward:
            return None
        raise RewardError(
            "the last line of the command's output is not a number, and the command posted no reward to "
            f"$OPENAI_BASE_URL/rl/reward; the end of its output: {text[-500:]!r}"
        ) from None


def _await_end(process: subprocess.Popen[bytes]) -> int:
    """Wait for the command; returns its exit code. What it has started and left behind ends with it.

    Such a process holds the output open, so that its end would be awaited in vain.
    """
    code = process.wait()
    if _has_group(process.pid):
        end_families([process.pid], 0.0)
    return code


def _last_output(process: subprocess.Popen[bytes]) -> bytes:
    """Read all output and keep its end: an agent may write without end.

    What the command wrote before its end is in the pipe by then. A process that it left behind in a session of its own
    may hold the pipe open, and is not awaited.
    """
    assert process.stdout is not None
    kept, left, poll = b"", 1 << 16, select.poll()
    with process.stdout as stream:
        poll.register(stream, select.POLLIN)
        while left > 0:
            has_ended = process.returncode is not None
            if not poll.poll(0 if has_ended else _LOOK_MS):
                if has_ended:
                    break
                continue
            if not (piece := os.read(stream.fileno(), 1 << 16)):
                break
            kept = (kept + piece)[-_SHOWN_OUTPUT:]
            left -= len(piece) if has_ended else 0
    return kept


def _has_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except OSError:
        return False
    return True
