"""Reads the fields of JSON bodies; a `FieldError` says which one is wrong and what it must be.

Fields that no reader asks for are errors, so that nothing a client wants is ignored silently.
"""

import re
from typing import Any

from arealite.api.errors import RequestError

MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 1024
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# Sampling fields with the names that the embedded engine and SGLang give them: (type, name there).
_SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "temperature"),
    "top_p": (float, "top_p"),
    "top_k": (int, "top_k"),
    "min_p": (float, "min_p"),
    "frequency_penalty": (float, "frequency_penalty"),
    "presence_penalty": (float, "presence_penalty"),
    "repetition_penalty": (float, "repetition_penalty"),
    "logit_bias": (dict, "logit_bias"),
    "seed": (int, "sampling_seed"),
    "n": (int, "n"),
    "min_tokens": (int, "min_new_tokens"),
    "stop_token_ids": (list, "stop_token_ids"),
    "ignore_eos": (bool, "ignore_eos"),
    "skip_special_tokens": (bool, "skip_special_tokens"),
}
_MAX_TOKENS = 2**31 - 1
_WORDS = {
    float: "a number",
    int: "an integer",
    bool: "true or false",
    str: "a string",
    dict: "an object",
    list: "a list",
}


class FieldError(RequestError):
    """A field of a request is wrong. `param` is its name, as OpenAI's errors have it."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


class Fields:
    """The fields of one body. Null counts as absent."""

    def __init__(self, body: dict[str, Any]):
        self._body = body
        self._known: set[str] = set()

    def get(self, name: str, kind: type | None = None) -> Any:
        """Return a field of this type; None if it is absent."""
        self._known.add(name)
        value = self._body.get(name)
        return value if value is None or kind is None else typed(name, value, kind)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return an optional boolean."""
        value = self.get(name, bool)
        return default if value is None else value

    def ignore(self, *names: str) -> None:
        """Accept fields that change nothing here."""
        self._known.update(names)

    def only(self, name: str, *allowed: Any) -> None:
        """Accept a field with these values only; they change nothing."""
        value = self.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in allowed):
            known = " or ".join(map(repr, allowed))
            raise FieldError(name, f"{name}={value!r:.100} is not supported; use {known}, or leave it out")

    def finish(self) -> None:
        """Raise for a field that was not asked for."""
        for name, value in self._body.items():
            if value is not None and name not in self._known:
                raise FieldError(name, f"unknown or unsupported field {name!r:.100}")

    def sampling(self, *max_tokens: str, stop: str = "stop", usual_max: int | None = None) -> dict[str, Any]:
        """Return the sampling fields that are given, with the engine's names."""
        found: dict[str, Any] = {} if usual_max is None else {"max_new_tokens": usual_max}
        for name, (kind, own) in _SAMPLING.items():
            if (value := self.get(name, kind)) is not None:
                found[own] = value
        for name in max_tokens:
            if (value := self.get(name, int)) is not None:
                found["max_new_tokens"] = _in_range(name, value, 1, _MAX_TOKENS)
        # Checked here, where the names are those of the request.
        _in_range("min_tokens", found.get("min_new_tokens", 0), 0, found.get("max_new_tokens", _MAX_TOKENS))
        _in_range("seed", found.get("sampling_seed", 0), -(2**63), 2**64 - 1)
        if (words := self.get(stop)) is not None:
            words = [words] if isinstance(words, str) else words
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise FieldError(stop, f"{stop} must be a string or a list of strings, got {words!r:.100}")
            found["stop"] = words
        return found

    def top_logprobs(self) -> int:
        """Return the number of alternatives wanted for each token."""
        count = self.get("top_logprobs", int) or 0
        if not 0 <= count <= MAX_TOP_LOGPROBS:
            raise FieldError("top_logprobs", f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {count}")
        return count


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise FieldError(name, f"{name} must be between {low} and {high}, got {value}")
    return value


def typed(name: str, value: Any, kind: type) -> Any:
    """Return a value of this type; integers are numbers too."""
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise FieldError(name, f"{name} is too large a number") from None
    if type(value) is not kind:
        raise FieldError(name, f"{name} must be {_WORDS[kind]}, got {value!r:.100}")
    return value


def tool_name(value: Any, where: str) -> str:
    """Return a valid name of a tool."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise FieldError(where, f"a tool's name has 1 to 128 letters, digits and _.:- only, got {value!r:.100}")
    return value


def tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool in the form of chat completions, which chat templates read."""
    function: dict[str, Any] = {"name": tool_name(name, "tools")}
    if description is not None:
        function["description"] = typed("description", description, str)
    function["parameters"] = typed("parameters", parameters or {"type": "object", "properties": {}}, dict)
    return {"type": "function", "function": function}


def check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Raise if there are too many tools, or two of one name."""
    names = [one["function"]["name"] for one in tools]
    if len(names) > MAX_TOOLS:
        raise FieldError("tools", f"at most {MAX_TOOLS} tools, got {len(names)}")
    if len(set(names)) < len(names):
        raise FieldError("tools", "two tools have the same name")
    return tools


def objects(name: str, value: Any) -> list[dict[str, Any]]:
    """Return a list of objects; an absent one is empty."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise FieldError(name, f"{name} must be a list of objects")
    return value


def json_format(name: str, given: Any) -> dict[str, Any] | None:
    """Return the JSON schema that a `response_format` asks for; None for text."""
    if given is None:
        return None
    kind = typed(name, given, dict).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        # Chat completions nest it, responses do not.
        inner = given.get("json_schema", given)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise FieldError(name, f"{name} of type json_schema must have a schema, got {given!r:.200}")
        return schema
    raise FieldError(name, f"{name} must have the type text, json_object or json_schema, got {kind!r:.100}")
