"""`ToolWorkflow`: the model calls functions of yours, reads what they return, and answers.

Rows and rewards are those of `RLVRWorkflow`; the reward sees the last turn. Calls are read in the format of the model's
chat template, and only in what the model has sampled: text of a tool that looks like a call stays text. What a tool
returns is not trained on. A call that is malformed, raises, hangs or returns too much becomes a message to the model.
"""

import asyncio
import functools
import inspect
import pickle
import re
from collections import Counter
from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, RequestError
from arealite.api.io_struct import Batch, ModelRequest, ModelResponse
from arealite.api.named_code import load_object
from arealite.api.reward_api import is_async
from arealite.api.trajectory import Trajectory
from arealite.protocol.tool_calls import ToolCall, decode_answer, parse_tool_calls, style_of
from arealite.utils.pools.call_pool import CallError, CallPool, CallTimeout
from arealite.utils.text import clean
from arealite.utils.trace.tracing import part_of_episode
from arealite.workflow.groups import play_all
from arealite.workflow.rlvr import RLVRWorkflow

_JSON_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}
_PYTHON_TYPES: dict[str, Any] = {name: kind for kind, name in _JSON_TYPES.items()} | {"number": (int, float)}


class ToolWorkflow(RLVRWorkflow):
    """Answers with the help of `tools`: functions, or their names as `package.module:function`.

    The name, docstring and parameters of a function describe it to the model. Coroutine functions run on the event
    loop, others in worker processes. Each call has `tool_timeout_s`; of what it returns the model reads
    `max_tool_chars` characters. After `max_turns` turns with calls the episode is cut off. Other arguments are those of
    `RLVRWorkflow`.
    """

    def __init__(
        self,
        *args: Any,
        tools: Sequence[Callable[..., Any] | str],
        max_turns: int = 8,
        tool_timeout_s: float = 10.0,
        max_tool_chars: int = 8_000,
        tool_pool: CallPool | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        loaded = [load_object(tool, "tools") if isinstance(tool, str) else tool for tool in tools]
        self.tools = {_name(tool): tool for tool in loaded}
        if not loaded or len(self.tools) < len(loaded):
            raise ConfigError(f"tools must be functions of different names, got {[_name(tool) for tool in loaded]}")
        for tool in loaded:
            _check_sendable(tool)
        self.schemas = [tool_schema(tool) for tool in loaded]
        self.max_turns, self.tool_timeout_s, self.max_tool_chars = max_turns, tool_timeout_s, max_tool_chars
        self.tool_pool = tool_pool or CallPool()
        self._markers = _marker_pattern(self.tokenizer)

    def encode_prompt(self, data: dict[str, Any]) -> list[int]:
        if "messages" not in data or "input_ids" in data:
            return super().encode_prompt(data)
        self.refuse_images(data)
        return self._new_trajectory().observe(data["messages"]).ids

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        prompt_ids = self.encode_prompt(data)
        # The first turns share the prompt's prefill.
        firsts = await engine.agenerate_group(ModelRequest(prompt_ids, self.gconfig, seed=data.get("seed")))
        played = await play_all(self._continue(engine, data, first, i) for i, first in enumerate(firsts))
        rewards = await self.compute_rewards(prompt_ids, [last for _, last in played], data)
        return Trajectory.join([row.reward(value) for (row, _), value in zip(played, rewards, strict=True)])

    async def _continue(
        self, engine: InferenceEngine, data: dict[str, Any], response: ModelResponse, index: int
    ) -> tuple[Trajectory, ModelResponse]:
        """Play a sample from its first turn to its last."""
        trajectory = self._new_trajectory().observe(response.input_tokens).add(response)
        counts = Counter({"tool_calls": 0, "tool_failures": 0, "tool_timeouts": 0, "turns": 1})
        seed, style = data.get("seed"), style_of(self.tokenizer)
        while not response.truncated:
            text = decode_answer(self.tokenizer, response.output_tokens)
            _, calls = parse_tool_calls(text, style, self.schemas)
            if not calls:
                break
            if counts["turns"] > self.max_turns:
                trajectory.truncated = True
                break
            results = await asyncio.gather(*(self._run(call, counts) for call in calls))
            trajectory.observe(
                [
                    {"role": "tool", "tool_call_id": call.id, "name": call.name or "unknown", "content": text}
                    for call, text in zip(calls, results, strict=True)
                ]
            )
            try:
                # Sampling depends on seed and position: the seed may be that of the turn before.
                request = trajectory.request(self.gconfig, None if seed is None else seed + index)
                response = await engine.agenerate(request)
            except RequestError:
                # The first turn was accepted: the conversation has become longer than the model's context.
                trajectory.truncated = True
                break
            trajectory.add(response)
            counts["turns"] += 1
        for name, count in counts.items():
            trajectory.stat(name, count)
        return trajectory, response

    async def _run(self, call: ToolCall, counts: Counter[str]) -> str:
        """Return what the model reads about a call: the result, or what went wrong."""
        counts["tool_calls"] += 1
        tool, error = self.tools.get(call.name), call.error
        if tool is None and error is None:
            error = f"there is no tool {call.name!r}; there are {', '.join(self.tools)}"
        if tool is not None and error is None:
            error = _bad_arguments(tool, call.arguments)
        try:
            if tool is None or error is not None:
                raise CallError(error)
            with part_of_episode("tool", tool=call.name):
                result = await self._call(tool, call.arguments)
        except CallError as failure:
            counts["tool_timeouts" if isinstance(failure, CallTimeout) else "tool_failures"] += 1
            result = f"error: {failure}"
        return self._readable(result)

    async def _call(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> str:
        if not is_async(tool):
            limit, timeout_s = self.max_tool_chars + 1, self.tool_timeout_s
            name = _name(tool)
            return await self.tool_pool.run(_call_tool, tool, arguments, limit, timeout_s=timeout_s, name=name)
        try:
            async with asyncio.timeout(self.tool_timeout_s) as deadline:
                return str(await tool(**arguments))[: self.max_tool_chars + 1]
        # A tool may raise anything, also a TimeoutError of its own, or what a client in it has cancelled.
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                raise CallTimeout(f"{_name(tool)} did not return within {self.tool_timeout_s:g} s") from error
            raise CallError(f"{type(error).__name__}: {error}") from error

    def _readable(self, text: str) -> str:
        """Return text of a tool as the model reads it: bounded, and without the marks of the chat template."""
        if len(text) > self.max_tool_chars:
            text = f"{text[: self.max_tool_chars]}\n[cut off after {self.max_tool_chars} characters]"
        # A tool's text could else end its own message and speak as the user or the system.
        return self._markers.sub(lambda found: f"{found[0][0]} {found[0][1:]}", clean(text))

    def _new_trajectory(self) -> Trajectory:
        return Trajectory(self.tokenizer, self.schemas, enable_thinking=self.enable_thinking)


def _check_sendable(tool: Callable[..., Any]) -> None:
    """Raise `ConfigError` for a tool that worker processes cannot get: all its calls would fail."""
    try:
        _ = is_async(tool) or pickle.dumps(tool)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the tool {_name(tool)} cannot be sent to a worker process ({error}): define it at the top level of a "
            "module or of your script, or make it a coroutine function"
        ) from error


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Describe a function to the model, as OpenAI's `tools`: name, docstring, types of parameters."""
    parameters = _signature(tool).parameters.values()
    properties = {p.name: _parameter_schema(p) for p in parameters}
    required = [p.name for p in parameters if p.default is p.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": _name(tool), "description": inspect.getdoc(_unwrap(tool)) or "", "parameters": schema}
    return {"type": "function", "function": function}


def _parameter_schema(parameter: inspect.Parameter) -> dict[str, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ConfigError(f"a tool has the parameter {parameter}: tools need plain, named parameters")
    return _schema_of(parameter.annotation)


def _schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation; empty for one that is not known."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return _schema_of(args[0])
    if origin in (Union, UnionType):
        others = [arg for arg in args if arg is not NoneType]
        return _schema_of(others[0]) if len(others) == 1 else {}
    if origin is Literal:
        return {"enum": list(args)}
    names = {t.__name__: name for t, name in _JSON_TYPES.items()}
    found = names.get(kind.partition("[")[0]) if isinstance(kind, str) else _JSON_TYPES.get(origin)
    return {"type": found} if found else {}


def _bad_arguments(tool: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    signature = _signature(tool)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        return f"{_name(tool)}: {error}"
    for name, value in arguments.items():
        schema = _parameter_schema(signature.parameters[name])
        wanted = _PYTHON_TYPES.get(schema.get("type", ""), object)
        # Null may be meant as "no value"; the tool decides.
        is_right = isinstance(value, wanted) and (wanted is object or isinstance(value, bool) == (wanted is bool))
        if value is not None and not (is_right and value in schema.get("enum", [value])):
            expected = f"of type {schema['type']}" if "type" in schema else f"one of {schema['enum']}"
            return f"{_name(tool)}: {name} must be {expected}, got {value!r:.100}"
    return None


def _call_tool(tool: Callable[..., Any], arguments: dict[str, Any], max_chars: int) -> str:
    """Run a tool in a worker process. Only the part that the model reads is sent back."""
    return str(tool(**arguments))[:max_chars]


def _marker_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Match the tokenizer's added tokens: special ones, and those that mark calls and results."""
    added = sorted(getattr(tokenizer, "get_added_vocab", dict)(), key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in added if len(token) > 1) or r"(?!)")


def _signature(tool: Callable[..., Any]) -> inspect.Signature:
    """Return the signature that the model sees: without arguments that `functools.partial` has set."""
    try:
        signature = inspect.signature(tool, eval_str=True)
    # Annotations that are text may name what is imported for type checkers only.
    except (NameError, AttributeError, TypeError, SyntaxError):
        signature = inspect.signature(tool)
    given = tool.keywords if isinstance(tool, functools.partial) else {}
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in given])


def _unwrap(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a `functools.partial`, which has no name and no docstring of its own."""
    return tool.func if isinstance(tool, functools.partial) else tool


def _name(tool: Callable[..., Any]) -> str:
    return getattr(_unwrap(tool), "__name__", type(tool).__name__)
