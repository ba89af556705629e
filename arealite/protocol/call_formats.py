"""Reads the calls in a text, with one function for each format. Other rooms use `tool_calls`.

A scan moves forward only: what was read once is not read again, so that time is linear in the length of the text.
"""

import json
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

MAX_CALLS = 128
MAX_DEPTH = 64
OPEN, CLOSE, PYTHON, MISTRAL = "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]"

_SPACE = re.compile(r"\s*")
BETWEEN = re.compile(r"[ \t\n\r\f\v;,]*")
_STRING = r'"((?:[^"\\]|\\.){1,256})"'
# The beginning of a call that is broken further on.
_NAME = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*' + _STRING)
_ARGUMENTS = re.compile(r'\s*,\s*"(?:arguments|parameters)"\s*:\s*')
MISTRAL_NAME = re.compile(r"([\w.:/-]{1,256})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*(?=\{)")
_XML_NAME = re.compile(r"\s*<function=([^<>\n]{1,256})>")
_XML_KEY = re.compile(r"\s*<parameter=([^<>\n]{1,256})>")
_XML_END = re.compile(r"\s*</function>\s*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class ToolCall:
    """One call. With an `error` it must not be executed; `name` is empty if it could not be read."""

    id: str
    name: str
    arguments: dict[str, Any]
    error: str | None = None
    # The arguments as the model has written them, where they are not a JSON object.
    raw: str = field(default="", repr=False)
    # The same where they are one; empty if the format writes no JSON.
    written: str = field(default="", repr=False, compare=False)

    @property
    def arguments_text(self) -> str:
        """The arguments as the model has written them; of formats without JSON, as JSON text."""
        return self.raw or self.written or json.dumps(self.arguments, ensure_ascii=False)


@dataclass
class Scan:
    """A text that is being read: `at` is the position, `content` the text outside of calls so far."""

    text: str
    at: int
    schemas: dict[str, dict[str, Any]] | None
    has_short_ids: bool  # Mistral's template demands ids of nine characters
    content: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    kept: int = 0  # the text before is in `content` or in a call
    _found: dict[str, int] = field(default_factory=dict[str, int])

    def keep(self, end: int) -> None:
        """Add the text up to `end` that is in no call to the content."""
        self.content.append(self.text[self.kept : end])
        self.kept = end

    def begin(self, start: int) -> bool:
        """Begin a call at `start`; False if there are too many."""
        self.keep(start)
        if len(self.calls) < MAX_CALLS:
            return True
        self.fail(f"more than {MAX_CALLS} calls: this one and all behind it were not read")
        return False

    def add(self, value: Any, start: int) -> None:
        """Add a call from a JSON value, which stands at `start`."""
        head = read_head(self.text, start)
        if head is not None and self.text.startswith("{", head[1]):
            # As it is streamed: if a key comes twice, the first one counts.
            arguments, end = json.JSONDecoder(strict=False).raw_decode(self.text, head[1])
            self.add_call(head[0], arguments, self.text[head[1] : end])
            return
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not name:
            self.fail("a call must be a JSON object with name and arguments")
            return
        given = next((value[key] for key in ("arguments", "parameters") if value.get(key) is not None), {})
        self.add_call(name, given)

    def add_call(self, name: str, arguments: Any, text: str = "") -> None:
        """Add a call with a name that was read; checks name and arguments.

        The model has written the arguments as `text`; empty: not as one JSON object.
        """
        name, raw, text = _clean(name), "", escape_controls(_clean(text))
        if not isinstance(arguments, dict):
            raw = _clean(arguments if isinstance(arguments, str) else _dump(arguments))
            error = f"the arguments must be a JSON object, got {type(arguments).__name__}"
            arguments = {}
        else:
            error = _problem(arguments)
            arguments, raw = (arguments, "") if error is None else ({}, text or _clean(_dump(arguments)))
        if error is None and self.schemas is not None and name not in self.schemas:
            error = f"there is no tool {name[:100]!r}; the tools are {', '.join(self.schemas)[:1000] or 'none'}"
        self.calls.append(replace(self._call(name, arguments, error, raw), written=text))

    def fail(self, error: str, name: str = "", raw: str = "") -> None:
        """Add a call that cannot be read."""
        self.calls.append(self._call(_clean(name), {}, error, raw))

    def fail_json(self, error: str, start: int, end: int) -> None:
        """Add a call whose JSON, `start` to `end`, is broken; its name may be readable."""
        found = _NAME.match(self.text, start, end)
        if found is None:
            self.fail(error)
            return
        arguments = _ARGUMENTS.match(self.text, found.end(), end)
        # Never empty: a call without arguments would be executed.
        starts = (arguments.end() if arguments else end, found.end(), start)
        self.fail(error, found[1], next(filter(None, (self.text[at:end].strip() for at in starts))))

    def _call(self, name: str, arguments: dict[str, Any], error: str | None, raw: str = "") -> ToolCall:
        token = secrets.token_hex(12)
        return ToolCall(token[:9] if self.has_short_ids else f"call_{token}", name, arguments, error, raw)

    def find(self, mark: str, at: int) -> int:
        """Position of the next `mark`; the end of the text without one. Never searches the same text twice."""
        known = self._found.get(mark, -1)
        if known < at:
            known = self.text.find(mark, at)
            known = self._found[mark] = known if known >= 0 else len(self.text)
        return known

    def skip(self, pattern: re.Pattern[str] = _SPACE) -> int:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return self.at

    def read_json(self) -> tuple[Any, str | None]:
        """Read a JSON value at the position; returns it, or an error. Moves past what was read."""
        wrong: list[str] = []

        def number(convert: Callable[[str], Any], digits: str) -> Any:
            value = convert(digits) if len(digits) <= 4000 else math.inf
            if value in (math.inf, -math.inf):
                wrong.append(f"the number {digits[:40]} is out of range")
            return value

        decoder = json.JSONDecoder(
            strict=False,
            parse_constant=lambda name: wrong.append(f"{name} is not JSON"),
            parse_float=lambda digits: number(float, digits),
            parse_int=lambda digits: number(int, digits),
        )
        begin = self.at
        try:
            value, self.at = decoder.raw_decode(self.text, begin)
        except json.JSONDecodeError as error:
            # All before this position was read: starting again behind it keeps the time linear.
            self.at = max(begin, error.pos)
            return None, f"the call is not valid JSON: {error.msg} (character {error.pos - begin})"
        except RecursionError:
            self.at = len(self.text)
            return None, f"the call has more than {MAX_DEPTH} levels of lists and objects"
        return value, wrong[0] if wrong else None


def read_head(text: str, start: int) -> tuple[str, int] | None:
    """Return the name of the JSON call at `start`, and where its arguments begin.

    None if it does not begin with the name, then the arguments.
    """
    found = _NAME.match(text, start)
    arguments = _ARGUMENTS.match(text, found.end()) if found and "\\" not in found[1] else None
    return (found[1], arguments.end()) if found and arguments else None


def escape_controls(text: str) -> str:
    """Escape control characters in the strings of a JSON text, which models write and JSON forbids."""
    if _CONTROL.search(text) is None:
        return text
    return _QUOTED.sub(lambda s: _CONTROL.sub(lambda c: json.dumps(c[0])[1:-1], s[0]), text)


def scan_tags(scan: Scan) -> None:
    """Read the calls between `<tool_call>` and `</tool_call>`; a missing end tag is tolerated."""
    text = scan.text
    while (start := text.find(OPEN, scan.at)) >= 0:
        if not scan.begin(start):
            return
        scan.at = start + len(OPEN)
        count, body = len(scan.calls), scan.skip()
        if text.startswith("<function=", body):
            error = _read_xml(scan)
            if error:
                name = _XML_NAME.match(text, body)
                scan.fail(error, name[1] if name else "", text[body : _block_end(scan)].strip())
            _close_tag(scan, is_broken=error is not None)
        else:
            _read_tagged_json(scan)
        _end_call(scan, count)


def _read_tagged_json(scan: Scan) -> None:
    body = scan.at
    value, error = scan.read_json()
    if error is None and _close_tag(scan):
        for item in value if isinstance(value, list) else [value]:
            if not scan.begin(scan.kept):
                break
            scan.add(item, body)
        return
    end = _block_end(scan)
    _close_tag(scan, is_broken=True)
    scan.fail_json(error or "the call has text behind its JSON object", body, end)


def _close_tag(scan: Scan, is_broken: bool = False) -> bool:
    """Move behind the end tag, which may be missing; False if other text comes before it.

    The rest of a broken call belongs to it, up to the next tag.
    """
    at = _block_end(scan)
    if not is_broken and scan.text[scan.at : at].strip():
        # Text behind a call without an end tag is content.
        return not scan.text.startswith(CLOSE, at)
    is_closed = scan.text.startswith(CLOSE, at)
    if is_closed or is_broken:
        scan.at = at + len(CLOSE) * is_closed
    return True


def _block_end(scan: Scan) -> int:
    """Position of the next tag; the end of the text without one."""
    return min(scan.find(CLOSE, scan.at), scan.find(OPEN, scan.at))


def _end_call(scan: Scan, count: int) -> None:
    """End the calls behind the first `count`: their text is content too if one has no readable name."""
    if all(call.name for call in scan.calls[count:]):
        scan.kept = scan.at
    else:
        scan.keep(scan.at)


def _read_xml(scan: Scan) -> str | None:
    """Read `<function=name> <parameter=key> value </parameter> </function>`; returns an error."""
    text = scan.text
    found = _XML_NAME.match(text, scan.at)
    if found is None:
        return "<function= has no name"
    name, values = found[1].strip(), dict[str, Any]()
    types = _types((scan.schemas or {}).get(name))
    scan.at = found.end()
    while key := _XML_KEY.match(text, scan.at):
        end = scan.find("</parameter>", key.end())
        if end == len(text):
            scan.at = key.end()
            return f"the parameter {key[1]!r} has no end"
        value = text[key.end() : end].removeprefix("\n").removesuffix("\n")
        values[key[1]] = _typed(value, types.get(key[1]))
        scan.at = end + len("</parameter>")
    if _XML_END.match(text, scan.at) is None:
        return "<function= has no end"
    scan.skip(_XML_END)
    scan.add_call(name, values)
    return None


def scan_llama(scan: Scan) -> None:
    """Read JSON objects behind `<|python_tag|>` or at the start of the text."""
    text = scan.text
    # A text that begins with a call needs no tag.
    start = scan.skip()
    if read_head(text, start) is None and (tagged := text.find(PYTHON, start)) >= 0:
        start = scan.at = tagged
    while True:
        is_tagged = text.startswith(PYTHON, scan.at)
        if is_tagged:
            scan.at += len(PYTHON)
            scan.skip()
        if not is_tagged and not text.startswith("{", scan.at):
            return
        body, count = scan.at, len(scan.calls)
        value, error = scan.read_json()
        is_call = isinstance(value, dict) and "name" in value and value.keys() & {"parameters", "arguments"}
        looks_like_call = error and (name := _NAME.match(text, body)) and _ARGUMENTS.match(text, name.end())
        if not (is_tagged or is_call or looks_like_call) or not scan.begin(start):
            return  # JSON that is an answer
        if error:
            scan.at = len(text)
            scan.fail_json(error, body, len(text))
        else:
            scan.add(value, body)
        _end_call(scan, count)
        start = scan.skip(BETWEEN)
        if text.startswith(("{", PYTHON), start):
            scan.kept = start


def scan_mistral(scan: Scan) -> None:
    """Read what follows each `[TOOL_CALLS]`: a list of JSON objects, or a name and its arguments."""
    text = scan.text
    while (start := text.find(MISTRAL, scan.at)) >= 0:
        if not scan.begin(start):
            return
        scan.at = start + len(MISTRAL)
        count, body = len(scan.calls), scan.skip()
        named = MISTRAL_NAME.match(text, body)
        if text.startswith("[", body):
            _read_list(scan)
        elif named:
            scan.at = named.end()
            value, error = scan.read_json()
            if error:
                scan.fail(error, named[1], text[named.end() : _next_start(scan)].strip())
            else:
                scan.add_call(named[1], value, text[named.end() : scan.at] if isinstance(value, dict) else "")
        else:
            value, error = scan.read_json()
            if error:
                scan.fail_json(error, body, _next_start(scan))
            else:
                scan.add(value, body)
        _end_call(scan, count)


def _read_list(scan: Scan) -> None:
    """Read `[{json}, {json}]` element by element, so that a broken end keeps the calls before it."""
    text = scan.text
    scan.at += 1
    while not text.startswith("]", scan.skip()):
        if not scan.begin(scan.kept):
            scan.at = len(text)
            return
        body = scan.at
        value, error = scan.read_json()
        after = scan.skip()
        if error is None and not text.startswith((",", "]"), after):
            error = "the list of calls has no end"
        if error:
            scan.fail_json(error, body, _next_start(scan))
            return
        scan.add(value, body)
        scan.at += text.startswith(",", after)
    scan.at += 1


def _next_start(scan: Scan) -> int:
    """Move to the next `[TOOL_CALLS]`, or to the end."""
    scan.at = scan.find(MISTRAL, scan.at)
    return scan.at


def _types(schema: dict[str, Any] | None) -> dict[str, Any]:
    properties = (schema or {}).get("properties")
    found = properties if isinstance(properties, dict) else {}
    return {key: value.get("type") for key, value in found.items() if isinstance(value, dict)}


def _typed(value: str, kind: Any) -> Any:
    """The value of a tag: text, unless the schema demands another type and it is that in JSON."""
    if kind in (None, "string"):
        return value
    try:
        found = json.loads(value)
        json.dumps(found, allow_nan=False)
        return found
    except (ValueError, RecursionError):
        return value


def _problem(arguments: dict[str, Any]) -> str | None:
    """What makes arguments unusable for tools and templates, although they are JSON."""
    level: list[Any] = [arguments]
    for _ in range(MAX_DEPTH):
        children = (value for parent in level for value in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, dict | list)]
    if level:
        return f"the call has more than {MAX_DEPTH} levels of lists and objects"
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "the arguments have half a character (a lone surrogate)"
    return None


def _dump(value: Any) -> str:
    try:
        return json.dumps(value)
    except (RecursionError, ValueError):
        return ""


def _clean(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
