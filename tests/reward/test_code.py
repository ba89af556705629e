"""Rewards for code: right programs pass, wrong ones fail, and no trick passes."""

import json

import pytest

from arealite.api.errors import DatasetError
from arealite.reward.code import CodeReward, code_reward, extract_code

# The machine that tests may be busy.
reward = CodeReward(timeout_s=60.0)
share = CodeReward(timeout_s=60.0, partial=True)

HUMANEVAL = dict(
    prompt='def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n\n'
    'def double(numbers):\n    """Double all numbers."""\n',
    test="def check(candidate):\n    assert candidate([1, 2.5]) == [2, 5.0]\n    assert candidate([]) == []\n"
    "    assert poly(candidate([1, 1]), 2) == 6\n",
    entry_point="double",
)  # fmt: skip
MBPP = dict(
    test_list=["assert area(2, 3) == 6", "assert area(Box(4)) == 16", "assert set(names()) == {('a', 1), ('b', 2)}"],
    test_setup_code="import math",
)
AREA = """
class Box:
    def __init__(self, side): self.side = side
def area(a, b=None):
    return a.side ** 2 if b is None else a * b
def names():
    return zip("ab", [1, 2])
"""
PROGRAMS = dict(test_cases=[{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}])


def fenced(code):
    return f"Let me think.\n```python\n{code}\n```\nThis works."


def test_humaneval_layout():
    assert reward(completion="    return [2 * x for x in numbers]\n", **HUMANEVAL) == 1.0
    assert reward(completion=fenced("def double(numbers):\n    return [2 * x for x in numbers]"), **HUMANEVAL) == 1.0
    assert reward(completion="    return numbers\n", **HUMANEVAL) == 0.0
    assert reward(completion="    pass\n", **HUMANEVAL) == 0.0
    # The start of the program may be in a column of its own, when the prompt is a chat.
    row = {**HUMANEVAL, "prompt": "<|user|>Complete…", "code_prompt": HUMANEVAL["prompt"]}
    assert reward(completion=fenced("def double(numbers):\n    return [x + x for x in numbers]"), **row) == 1.0


def test_mbpp_layout():
    assert reward("", fenced(AREA), [], [], **MBPP) == 1.0
    wrong = fenced(AREA.replace("** 2", "** 3"))
    assert (reward(completion=wrong, **MBPP), share(completion=wrong, **MBPP)) == (0.0, pytest.approx(2 / 3))
    assert reward(completion=fenced("def sum(a, b): return a - b"), tests=["assert sum(5, 3) == 2"]) == 1.0


def test_programs_that_read_and_print():
    right = fenced("a, b = map(int, input().split())\nprint(a + b, '')")
    assert reward(completion=right, **PROGRAMS) == 1.0
    wrong = fenced("print(3)")
    assert (reward(completion=wrong, **PROGRAMS), share(completion=wrong, **PROGRAMS)) == (0.0, 0.5)
    assert reward(completion=right, input_output=json.dumps({"inputs": ["1 1"], "outputs": ["2"]})) == 1.0
    lines = {"inputs": [["1 1", "5"]], "outputs": [["2"]]}
    assert reward(completion=right, input_output=json.dumps(lines)) == 1.0
    assert reward(completion=right, input_output=json.dumps(lines | {"outputs": [["2", "5"]]})) == 0.0


@pytest.mark.parametrize(
    "end, score",
    [("exit()", 1.0), ("exit(1)", 0.0), ("raise ValueError", 0.0), ("import os; os.kill(os.getpid(), 9)", 0.0)],
)
def test_a_program_that_fails_behind_its_output_is_wrong(end, score):
    row = dict(test_cases=[{"input": "", "output": "3"}])
    assert reward(completion=fenced(f"print(3, flush=True)\n{end}"), **row) == score


def test_a_program_that_does_not_end_is_wrong():
    row = dict(test_cases=[{"input": "", "output": "3"}])
    assert CodeReward(timeout_s=1.0)(completion=fenced("print(3, flush=True)\nwhile True: pass"), **row) == 0.0


@pytest.mark.parametrize(
    "code, score",
    [
        ("def pair(a, b): return (a, b)", 1.0),
        ("class Solution:\n    def pair(self, a, b): return [a, b]", 1.0),
        ("from collections import namedtuple\npair = namedtuple('pair', 'a b')", 1.0),
        ("def pair(a, b): return [b, a]", 0.0),
        ("print(1)", 0.0),
    ],
)
def test_functions_of_apps_are_called(code, score):
    row = {"fn_name": "pair", "inputs": [[1, 2], ["x", None]], "outputs": [[1, 2], [["x", None]]]}
    assert code_reward(completion=fenced(code), input_output=json.dumps(row)) == score


@pytest.mark.parametrize("first", ["", '"""Adds."""\nfrom __future__ import annotations\n'])
def test_solutions_of_leetcode_need_no_imports(first):
    code = f"""{first}class Solution:
    def total(self, values: List[int], power: Optional[int] = None) -> int:
        queue = deque(values)
        counts = defaultdict(int, Counter(queue))
        return pow(sum(value * count for value, count in counts.items()), 1, 1000)
"""
    row = {"fn_name": "total", "inputs": [[[1, 2, 2]]], "outputs": [5]}
    assert code_reward(completion=fenced(code), input_output=row) == 1.0


def test_an_imported_function_is_no_solution():
    row = {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}
    assert code_reward(completion=fenced("print(1)"), input_output=row) == 0.0


def test_the_first_element_of_a_longer_list_is_not_its_result():
    row = {"fn_name": "pair", "inputs": [[1, 2], [3, 4]], "outputs": [[1, 2], [3, 4]]}
    assert code_reward(completion=fenced("def pair(a, b): return a"), input_output=row) == 0.0


def test_named_tuples_and_enumerations_compare_as_data():
    code = """
import collections, enum, typing
Point = collections.namedtuple("Point", "x y")
class Size(typing.NamedTuple):
    w: int
    def twice(self): return 2 * self.w
class Color(enum.IntEnum):
    RED = 1
class Liar(tuple):
    def __eq__(self, other): return True
    def __iter__(self): return iter((1, 2))
def points(): return [Point(1, 2), Point(3, 4)]
def kind(value): return type(value).__name__
"""
    tests = ["assert points() == [(1, 2), (3, 4)] and points() != [(1, 2), (3, 5)]",
             "x, y = points()[0]; assert (x, y, points()[1].x, kind(points()[0])) == (1, 2, 3, 'Point')",
             "assert Size(3) == (3,) and Size(3).twice() == 6", "assert Color.RED == 1 and Color.RED.name == 'RED'",
             "assert Liar((5, 6)) != (1, 2) and Liar((5, 6)) == (5, 6)"]  # fmt: skip
    assert share(completion=fenced(code), tests=tests) == 1.0


def test_values_of_all_kinds_arrive_as_they_are():
    code = """
import collections, fractions, decimal
def same(x): return x
def apply(f, *xs, start=0): return f(*xs) + start
def make(kind): return kind((1, 2))
def fail(): raise LookupError("no")
def count(): return collections.Counter("aab")
def nothing(): pass
LIMIT = 7
"""
    tests = """
import math, fractions, decimal, collections
for x in (1, -2.5, True, None, "é\\n", b"x", (1, [2, {3}]), {(1, 2): [None]}, 1j, frozenset("a"), 10**5000, range(3)):
    assert same(x) == x and type(same(x)) is type(x), x
assert same(fractions.Fraction(1, 3)) * 3 == 1 and same(decimal.Decimal("0.1")) == decimal.Decimal("0.1")
assert math.isnan(same(float("nan"))) and same(float("inf")) == float("inf")
assert apply(lambda a, b: a * b, 3, 4, start=1) == 13
assert make(list) == [1, 2] and make(set) == {1, 2}
try:
    fail()
except LookupError as error:
    assert str(error) == "no"
else:
    raise AssertionError
assert count() == {"a": 2, "b": 1} and nothing() is None and LIMIT == 7
"""
    assert reward(completion=fenced(code), tests=[tests]) == 1.0


def test_coroutines_of_a_solution_are_awaited():
    code = """
import asyncio
async def plus(x):
    await asyncio.sleep(0)
    return x + 1
async def upto(n):
    for i in range(n):
        yield i
async def fail(): raise LookupError("no")
class Lock:
    async def __aenter__(self): return 5
    async def __aexit__(self, *error): return True
"""
    main = "import asyncio\nasync def main():\n    {}\nasyncio.run(main())"
    right = [
        "import asyncio\nassert asyncio.run(plus(1)) == 2", main.format("assert await plus(1) == 2"),
        main.format("assert await asyncio.gather(plus(1), plus(2)) == [2, 3]"),
        main.format("assert [i async for i in upto(3)] == [0, 1, 2]"),
        main.format("async with Lock() as lock: assert lock == 5"),
        "import asyncio\ntry: asyncio.run(fail())\nexcept LookupError as error: assert str(error) == 'no'\nelse: 1 / 0",
        "def check(candidate):\n    import asyncio\n    assert asyncio.run(candidate(1)) == 2\ncheck(plus)",
    ]  # fmt: skip
    wrong = ["assert plus(1) == 2", main.format("assert await plus(1) == 3"), "import asyncio; asyncio.run(fail())",
             main.format("async with Lock() as lock: assert lock == 6")]  # fmt: skip
    assert share(completion=fenced(code), tests=right) == 1.0
    assert share(completion=fenced(code), tests=wrong) == 0.0


def test_objects_of_a_solution_do_what_their_classes_say():
    code = """
import contextlib, datetime
class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + other.x)
    def __mul__(self, k): return V(self.x * k)
    __rmul__ = __mul__
    def __neg__(self): return V(-self.x)
    def __eq__(self, other): return self.x == other.x
    def __lt__(self, other): return self.x < other.x
    def __repr__(self): return f"V({self.x})"
    def __setitem__(self, key, value): self.x = value
    def __enter__(self): return self.x
    def __exit__(self, *error): return True
class W(V): pass
@contextlib.contextmanager
def opened(): yield 5
def count(n): yield from range(n)
def day(d, n=0): return d + datetime.timedelta(n)
"""
    right = [
        "assert V(1) + V(2) == V(3) and (2 * V(3)).x == (V(3) * 2).x == 6 and (-V(3)).x == -3",
        "v = V(1); v[0] = 7; assert v.x == 7",
        "assert V(1) < V(2) and V(2) > V(1) and max(V(1), V(2)).x == 2",
        "assert repr(V(1)) == str(V(1)) == 'V(1)'",
        "assert isinstance(W(1), V) and not isinstance(V(1), W) and not isinstance(1, V)",
        "with opened() as x: assert x == 5", "with V(5) as x: assert x == 5",
        "g = count(3); assert list(g) == [0, 1, 2]",
        "import datetime as d; assert day(d.date(2020, 1, 1), 1) == d.date(2020, 1, 2)",
        "import datetime as d; assert day(d.timedelta(1)).days == 1 and day(d.datetime(2020, 1, 1, 5)).hour == 5",
    ]  # fmt: skip
    # What `__exit__` returns hides no failed assertion.
    wrong = [
        "with V(5) as x: assert x == 6",
        "assert V(1) + V(2) == V(4)",
        "assert V(1) > V(2)",
        "assert isinstance(5, V)",
    ]
    assert share(completion=fenced(code), tests=right) == 1.0
    assert share(completion=fenced(code), tests=wrong) == 0.0


def test_a_solution_does_not_decide_comparisons_with_data():
    code = """
class Any:
    def yes(self, *other): return True
    def zero(self, *other): return 0.0
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __contains__ = yes
    __sub__ = __rsub__ = __add__ = __mod__ = __abs__ = __round__ = __neg__ = __float__ = zero
    def __iter__(self): return iter(())
def f(): return Any()
"""
    tests = ["assert abs(f() - 0.3) < 1e-6", "assert f() < 5", "assert 5 > f()", "assert f() <= 5", "assert 5 >= f()",
             "assert f() - 0.3 < 1e-6", "assert 0.3 - f() < 1e-6", "assert -f() < 1", "assert f() % 2 == 0",
             "assert 1 in f()",
             "assert round(f(), 2) == 0", "import math; assert math.isclose(f(), 0.0)"]  # fmt: skip
    assert share(completion=fenced(code), tests=tests) == 0.0


# None of them solves the task `assert area(2, 3) == 6` with `check`-like tests.
TRICKS = {
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits when called": "import os\ndef area(*a): os._exit(0)",
    "raises SystemExit when called": "def area(*a): raise SystemExit(0)",
    "prints": "def area(*a): print('passed 0\\n' * 100); return 5",
    "is always equal": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def area(*a): return Equal()
""",
    "is an equal number": """
class Equal(int):
    def __eq__(self, other): return True
def area(*a): return Equal(1)
""",
    "replaces builtins": """
import builtins
builtins.AssertionError = None
builtins.compile = lambda *a, **k: ""
builtins.exec = lambda *a, **k: None
def area(*a): return 5
""",
    "replaces JSON": """
import json, os
json.dumps = lambda *a, **k: '["value", 6]\\n["value", 6]'
def area(*a): return 5
""",
    "answers in advance": """
import os
for descriptor in range(3, 100):
    try: os.write(descriptor, b'["value", true]\\n' * 10)
    except OSError: pass
def area(*a): return 5
""",
    "looks for the tests": """
import gc, sys, re
def area(*a):
    frame = sys._getframe()
    while frame:
        text = str(frame.f_locals) + str(frame.f_globals)
        if found := re.search(r"area\\(2, 3\\) == (\\d+)", text):
            return int(found[1])
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (str, list, dict)) and chr(61) * 2 + " 6" in str(thing):
            return 6
    return 0
""",
    "reads the input": "import os\nTEXT = os.read(0, 10**6)\ndef area(*a): return 6 if b'== 6' in TEXT else 0",
    "calls back into the tests": """
import os
def area(*a):
    for descriptor in range(3, 50):
        try: os.write(descriptor, b'["ask", "getattr", ["tuple", ["yours", 0], "__globals__"], ["dict"]]\\n')
        except OSError: pass
    return 0
""",
    "makes a class among the tests": """
import os
CALL = b'["ask", "call", ["tuple", ["type", "type"], "X", ["tuple"], ["dict", ["__eq__", ["type", "bool"]]]], ["dict"]]'
def area(*a):
    os.write(3, CALL + b'\\n["ask", "call", ["tuple", ["yours", 0]], ["dict"]]\\n["value", ["yours", 1]]\\n')
    return 0
""",
    "kills the tests": "import os\nos.kill(os.getppid(), 9)",
    "stays": "import os\nif os.fork(): os._exit(0)\ndef area(*a): return 5",
    "defines the checker": "def check(candidate): pass\ndef set(x): return 0\ndef area(*a): return 5",
    "is too deep": "def area(*a):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "is too large": "def area(*a): return 'x' * 10**9",
    "is cut": "def area(a, b):\n    return (a *",
    "has null bytes": "def area(*a): return 6\0",
    "is nested": "(" * 10**5,
}


@pytest.mark.parametrize("code", TRICKS.values(), ids=TRICKS)
def test_tricks_do_not_pass(code):
    # With a second test that is compared through a builtin name.
    tests = ["assert area(2, 3) == 6", "assert set([area(2, 3)]) == set([6])"]
    assert CodeReward(timeout_s=10.0, partial=True)(completion=fenced(code), tests=tests) == 0.0


def test_endless_solutions_fail():
    endless = CodeReward(timeout_s=1.0, partial=True)
    code = "def f(x):\n    while x: pass\n    return x"
    assert endless(completion=fenced(code), tests=["assert f(1) == 1"]) == 0.0
    assert CodeReward(timeout_s=3.0, partial=True)(
        completion=fenced(code), tests=["assert f(0) == 0", "assert f(1) == 1"]
    ) == pytest.approx(0.5)
    bomb = "import os\ndef f(x):\n    while True:\n        try: os.fork()\n        except OSError: pass"
    assert endless(completion=fenced(bomb), tests=["assert f(1) == 1"]) == 0.0


def test_where_the_code_is_found():
    assert extract_code("no fence") == "no fence"
    assert extract_code("a ```python\nx = 1\n``` b ```py\ny = 2\n``` c") == "y = 2\n"
    assert extract_code("```python\ndef f(): 1\n```\nUse:\n```python\nf()\n```", "f") == "def f(): 1\n"
    assert extract_code("```bash\nls\n```\n```\nz\n```\n") == "z\n"
    assert extract_code("~~~python\nx = 1\n~~~\n") == extract_code("````py\nx = 1\n````") == "x = 1\n"
    assert extract_code("```bash\nls\n```\n~~~\nz\n~~~\n") == "z\n"
    assert extract_code('```python title="a.py"\nx = 1\n```') == "x = 1\n"
    assert extract_code("cut ```python\nx = (") == "x = ("
    assert extract_code("1. So:\n   ```python\n   def f():\n       1\n   ```\n") == "def f():\n    1\n"
    # Tests of MBPP tell the name.
    example = "```python\ndef f(x):\n    return x\n```\nFor example:\n```python\nprint(f(1))\n```"
    assert code_reward(completion=example, tests=["assert f(2) == 2"]) == 1.0
    assert len(extract_code("`" * (10 << 20))) == 10 << 20
    assert code_reward(completion="x" * (10 << 20), tests=["assert f(1)"]) == 0.0
    assert code_reward(completion="```python\n\ud800\n```", tests=["assert f(1)"]) == 0.0


def test_rows_without_tests_are_errors():
    with pytest.raises(DatasetError, match=r"needs the columns.*'answer'"):
        code_reward(completion="x = 1", answer="5")
