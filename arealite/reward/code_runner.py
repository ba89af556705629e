"""Runs tests against a solution, inside the sandbox; `code.py` sends it there as text.

Two processes: the solution lives in a child, the tests run in the parent. They exchange values as JSON of plain data,
so nothing that the solution does to `assert`, to `==`, to builtins, to frames or to its output changes a verdict.
Objects of other types stay in the child; the tests hold handles to them. Input: the length of the solution in bytes
(ten digits), the solution, and then a JSON object with the tests, which the child is forked too early to see. For
each test that passes, a line with a secret token and the number of the test is printed.
"""

import builtins
import collections
import ctypes
import datetime
import decimal
import fractions
import functools
import importlib
import itertools
import json
import operator
import os
import socket
import sys
import types
from typing import Any, NoReturn

_AWAITED = ("await", "anext", "aenter", "aexit")
_LARGEST_ITERATOR = 100_000
_SAMPLES = ([], (), {}, set(), "", b"", range(0))
_VIEWS = ({}.keys(), {}.values(), {}.items(), reversed([]), (x for x in ()))
_ITERATORS = {map, filter, zip, enumerate, reversed, *(type(iter(x)) for x in _SAMPLES), *map(type, _VIEWS)}
_DATES = {"date": datetime.date, "datetime": datetime.datetime, "time": datetime.time}
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}
# Kinds of data whose subclasses (named tuples, enumerations of numbers) compare as data of that kind.
_DATA = (tuple, int, float, str)


@functools.cache
def _runner() -> Any:
    """Return what runs coroutines of the solution, all in one event loop."""
    return importlib.import_module("asyncio").Runner()


def _run(method: str, value: Any, *args: Any) -> Any:
    """Await a coroutine, or what the method of an object returns."""

    async def run() -> Any:
        return await (getattr(type(value), method)(value, *args) if method else value)

    return _runner().run(run())


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "neg")
# What tests may ask of an object that stays in the child.
_OPERATIONS = {
    **{name: getattr(operator, name) for name in (*_ARITHMETIC, "le", "setitem")},
    **{f"r{name}": lambda a, b, name=name: getattr(operator, name)(b, a) for name in _ARITHMETIC},
    **{name: functools.partial(_run, f"__{name}__" if name != "await" else "") for name in _AWAITED},
    "repr": repr, "next": next, "is": lambda kind, value: isinstance(value, kind),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value: type(value).__exit__(value, None, None, None),
    "getattr": getattr, "setattr": setattr, "getitem": operator.getitem, "eq": operator.eq, "lt": operator.lt,
    "len": len, "str": str, "list": list, "bool": bool, "get": lambda value: value,
}  # fmt: skip


class Peer:
    """One side of the connection: calls objects of the other side, and answers its calls while it waits."""

    def __init__(self, descriptor: int, has_solution: bool):
        self.descriptor, self.input = descriptor, os.fdopen(descriptor, "rb")
        self.has_solution = has_solution
        # Objects that the other side may name: by number, and those of the solution by name.
        self.objects: dict[Any, Any] = {}

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind.__name__ in _SEQUENCES and kind is _SEQUENCES[kind.__name__]:
            return [kind.__name__, *map(self.encode, value)]
        if kind in (dict, collections.Counter, collections.OrderedDict, collections.defaultdict):
            return ["dict", *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if kind in (bytes, bytearray):
            return ["bytes", value.hex()]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind in (fractions.Fraction, decimal.Decimal):
            return [kind.__name__, str(value)]
        if kind.__name__ in _DATES and kind is _DATES[kind.__name__]:
            return [kind.__name__, value.isoformat()]
        if kind is datetime.timedelta:
            return ["timedelta", value.days, value.seconds, value.microseconds]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        if kind in _ITERATORS:
            return ["iterator", *map(self.encode, itertools.islice(value, _LARGEST_ITERATOR))]
        if kind is type and getattr(builtins, value.__name__, None) is value:
            return ["type", value.__name__]
        if kind is Handle:
            return ["yours", object.__getattribute__(value, "number")]
        if kind in _LIKE.values():
            return self.encode(value.arealite_handle)
        if not self.has_solution and not callable(value):
            raise TypeError(f"a test passes {kind.__name__} to the solution, which is not plain data")
        number = len(self.objects)
        self.objects[number] = value
        if kind in (types.CoroutineType, types.AsyncGeneratorType):
            return [kind.__name__, number]
        base = next((base for base in _DATA if issubclass(kind, base)), None)
        return ["mine", number] if base is None else ["like", number, self.encode(_plain(base, value))]

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, *rest = value
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](map(self.decode, rest))
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in rest}
        if kind == "bytes":
            return bytes.fromhex(rest[0])
        if kind == "iterator":
            return iter([self.decode(item) for item in rest])
        if kind == "type":
            return {n: t for n, t in vars(builtins).items() if isinstance(t, type)}[rest[0]]
        if kind == "yours":
            return self.objects[rest[0]]
        if kind == "mine":
            return Handle(self, rest[0])
        if kind == "coroutine":
            return _awaited(Handle(self, rest[0]))
        if kind == "async_generator":
            return _items(Handle(self, rest[0]))
        if kind in _DATES:
            return _DATES[kind].fromisoformat(rest[0])
        if kind == "like":
            plain = self.decode(rest[1])
            like = _LIKE[type(plain)](plain)
            like.arealite_handle = Handle(self, rest[0])
            return like
        makers: dict[str, Any] = {
            "complex": complex,
            "Fraction": fractions.Fraction,
            "Decimal": decimal.Decimal,
            "range": range,
            "timedelta": datetime.timedelta,
        }
        return makers[kind](*rest)

    def send(self, *message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.descriptor, data) :]

    def receive(self) -> list[Any]:
        line = self.input.readline()
        if not line:
            raise ConnectionError("the solution ended")
        return json.loads(line)

    def ask(self, operation: str, *args: Any, **options: Any) -> Any:
        """Have the other side do something, and return the value or raise the error."""
        self.send("ask", operation, self.encode(args), self.encode(options))
        while True:
            kind, *message = self.receive()
            if kind == "ask":
                self.answer(*message)
            elif kind == "value":
                return self.decode(message[0])
            else:
                name, text = map(str, message)
                known = getattr(builtins, name, None)
                kind = known if isinstance(known, type) and issubclass(known, Exception) else None
                raise (kind or type(name, (Exception,), {}))(text)

    def answer(self, operation: str, args: Any, options: Any) -> None:
        try:
            if not self.has_solution and (operation != "call" or args[1][0] != "yours"):
                raise PermissionError("a solution may only call functions that a test gave it")
            operand, *values = self.decode(args)
            function = operand if operation == "call" else functools.partial(_OPERATIONS[operation], operand)
            value = function(*values, **self.decode(options))
            message = ["value", self.encode(value)]
        # The solution may raise anything, and exit.
        except BaseException as error:
            message = ["error", type(error).__name__, str(error)[:1000]]
        self.send(*message)

    def serve(self) -> NoReturn:
        while True:
            self.answer(*self.receive()[1:])


class Handle:
    """An object of the other side."""

    def __init__(self, peer: Peer, number: Any):
        object.__setattr__(self, "peer", peer)
        object.__setattr__(self, "number", number)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return object.__getattribute__(self, "peer").ask("call", self, *args, **options)

    def _ask(self, operation: str, *args: Any) -> Any:
        return object.__getattribute__(self, "peer").ask(operation, self, *args)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __eq__(self, other: object) -> bool:
        # Never equal to data, whatever the solution says.
        return type(other) is Handle and self._ask("eq", other) is True

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Any:
        return self._compare("lt", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("le", other)

    def _compare(self, operation: str, other: Any) -> Any:
        # As with `==`: data is compared by the tests only.
        return self._ask(operation, other) if type(other) is Handle else NotImplemented

    def _calculate(self, operation: str, *others: Any) -> Any:
        """Return what an operator makes of this object: with data, not the result that a test wants to see."""
        result = self._ask(operation, *others)
        if type(result) is not Handle and not any(type(other) is Handle for other in others):
            raise TypeError(f"the result of {operation} with data is {type(result).__name__}, not an object")
        return result

    def __instancecheck__(self, value: Any) -> bool:
        return (type(value) is Handle or type(value) in _LIKE.values()) and self._ask("is", value) is True

    # An error in the block of a test remains one, whatever the solution returns.
    def __exit__(self, *error: Any) -> None:
        self._ask("exit")

    async def __aenter__(self) -> Any:
        return self._ask("aenter")

    async def __aexit__(self, *error: Any) -> None:
        self._ask("aexit", None, None, None)

    def __iter__(self) -> Any:
        return iter(self._ask("list"))


for _name in ("getitem", "setitem", "len", "str", "repr", "bool", "next", "enter"):
    setattr(Handle, f"__{_name}__", functools.partialmethod(Handle._ask, _name))
for _name in _ARITHMETIC:
    for _side in ("", "r"):
        setattr(Handle, f"__{_side}{_name.rstrip('_')}__", functools.partialmethod(Handle._calculate, _side + _name))


async def _awaited(coroutine: Handle) -> Any:
    return coroutine._ask("await")


async def _items(generator: Handle) -> Any:
    while True:
        try:
            item = generator._ask("anext")
        except StopAsyncIteration:
            return
        yield item


def _plain(base: Any, value: Any) -> Any:
    """Return the data in an instance of a subclass, whatever that defines itself."""
    return tuple(tuple.__iter__(value)) if base is tuple else base.__add__(value, base())


def _like(base: Any) -> Any:
    """Return a class of data whose other attributes are those of an object of the other side."""

    def __getattr__(self: Any, name: str) -> Any:
        if name == "arealite_handle":
            raise AttributeError(name)
        return getattr(self.arealite_handle, name)

    return type(base.__name__, (base,), {"__getattr__": __getattr__})


_LIKE = {base: _like(base) for base in _DATA}


class Names(dict[str, Any]):
    """Global names of the tests. What they do not define is a name of the solution."""

    def __init__(self, peer: Peer, solution: dict[str, Any], tested: list[str]):
        super().__init__(__name__="tests")
        self.peer, self.solution, self.tested = peer, solution, tested

    def __missing__(self, name: str) -> Any:
        # Python looks among its own names next; a solution must not replace those.
        if name not in self.solution or (hasattr(builtins, name) and name not in self.tested):
            raise KeyError(name)
        origin = self.solution[name]
        if origin:
            # A module, or something of one, that the solution imports: the tests import it themselves.
            found = importlib.import_module(origin[0])
            self[name] = getattr(found, origin[1]) if origin[1] else found
        else:
            self[name] = self.peer.ask("get", Handle(self.peer, name))
        return self[name]


def origin_of(value: Any) -> tuple[str, str] | None:
    """Return where in the standard library a value is from: module and name, or None."""
    module = value.__name__ if type(value) is type(sys) else getattr(value, "__module__", None)
    if type(module) is not str or module.split(".")[0] not in sys.stdlib_module_names:
        return None
    if type(value) is type(sys):
        return module, ""
    name = getattr(value, "__name__", None)
    return (module, name) if type(name) is str and hasattr(sys.modules.get(module), name) else None


def run_solution(descriptor: int, source: str) -> NoReturn:
    """Define the solution and answer calls of the tests, without any other way out of this process."""
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    peer = Peer(descriptor, has_solution=True)
    names: dict[str, Any] = {"__name__": "solution"}
    sys.modules["solution"] = type(sys)("solution")
    try:
        exec(compile(source, "solution.py", "exec", dont_inherit=True), names)
        problem = None
    # The solution may raise anything, and exit.
    except BaseException as error:
        problem = f"{type(error).__name__}: {str(error)[:1000]}"
    peer.objects = {name: value for name, value in names.items() if name != "__builtins__"}
    peer.send("names", problem, {name: origin_of(value) for name, value in peer.objects.items()})
    peer.serve()


def read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            sys.exit("the input ends early")
        data += part
    return data


def run_tests(peer: Peer, request: dict[str, Any]) -> None:
    """Run each test in names of its own, and print the token for those that pass."""
    _, problem, solution = peer.receive()
    if problem:
        sys.exit(f"the solution raised {problem}")
    for number, test in enumerate(request["tests"]):
        names = Names(peer, solution, request["tested"])
        try:
            exec(compile(request["setup"], "setup.py", "exec", dont_inherit=True), names)
            # The setup may define what the solution should: the solution's is tested.
            for name in request["tested"]:
                names.pop(name, None)
            exec(compile(test, "tests.py", "exec", dont_inherit=True), names)
        # A test may raise anything. The solution cannot raise in this process.
        except Exception as error:
            print(f"test {number}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        else:
            print(request["token"], number, flush=True)


def main() -> None:
    sys.set_int_max_str_digits(0)
    solution = read(int(read(10))).decode()
    ours, theirs = (end.detach() for end in socket.socketpair())
    if os.fork() == 0:
        os.close(ours)
        run_solution(theirs, solution)
    os.close(theirs)
    # Where /proc is visible: its memory and descriptors belong to root.
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    request = b""
    while part := os.read(0, 1 << 16):
        request += part
    run_tests(Peer(ours, has_solution=False), json.loads(request))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
