"""The `allocation_mode` grammar: which devices generate, which train, and their parallel strategies.

    mode     := side | side "+" side | side "+eval"
    side     := [ backend ("." | ":") ] strategy
    backend  := "sglang" | "vllm" | "embedded"            (generates)
              | "fsdp"                                    (trains; the default of a bare strategy)
    strategy := ( letter number )+      d data, p pipeline, t or m tensor, c context, e expert

Examples: `sglang.d12p1t1+d4p1t1`, `sglang:d4t2+fsdp:d8`, `embedded.d1p1t1+d1p1t1`, `d8`, `vllm.d4t2`,
`sglang.d4p1t1+eval`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from arealite.api.errors import AllocationError

GEN_BACKENDS = ("sglang", "vllm", "embedded")
TRAIN_BACKENDS = ("fsdp",)
# Most devices of one side.
MAX_DEVICES = 100_000
_LETTERS = dict(d="data", p="pipeline", t="tensor", m="tensor", c="context", e="expert")
_EXAMPLE = "for example sglang.d4p1t1+d4p1t1, embedded:d1+fsdp:d1, d8 or vllm.d4t2+eval"


@dataclass(frozen=True)
class ParallelStrategy:
    """Degrees of parallelism of one side. Expert parallelism reuses the ranks of the other dimensions."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline * self.tensor * self.context

    @property
    def instance_size(self) -> int:
        """Number of devices of one model replica: one inference server, or one data-parallel rank."""
        return self.pipeline * self.tensor * self.context

    def __str__(self) -> str:
        text = f"d{self.data}p{self.pipeline}t{self.tensor}"
        text += f"c{self.context}" if self.context > 1 else ""
        return text + (f"e{self.expert}" if self.expert > 1 else "")


@dataclass(frozen=True)
class AllocationMode:
    """A parsed `allocation_mode`. Either side may be missing (`None`)."""

    gen_backend: str | None = None
    gen: ParallelStrategy | None = None
    train_backend: str | None = None
    train: ParallelStrategy | None = None
    evaluate: bool = False

    @classmethod
    def from_str(cls, text: str) -> AllocationMode:
        if not text.strip():
            _fail(text, 0, "allocation_mode is empty")
        if len(text) > 100:
            _fail(f"{text[:100]}…", 100, "it is longer than 100 characters")
        left, plus, right = text.partition("+")
        backend, strategy = _side(text, 0, left)
        generates, start = backend in GEN_BACKENDS, len(left) + 1
        if not plus:
            return cls(backend, strategy) if generates else cls(train_backend="fsdp", train=strategy)
        if right == "eval":
            if not generates:
                _fail(text, 0, "`+eval` needs an inference backend on its left")
            return cls(backend, strategy, evaluate=True)
        right, more, _ = right.partition("+")
        train_backend, train = _side(text, start, right)
        if more:
            _fail(text, start + len(right), "nothing may follow the second side")
        if not generates:
            _fail(text, 0, f"the left side generates: write one of {', '.join(GEN_BACKENDS)} before it")
        if train_backend in GEN_BACKENDS:
            _fail(text, start, "the right side trains: write fsdp, or no backend at all")
        return cls(backend, strategy, "fsdp", train)

    @property
    def gen_world_size(self) -> int:
        return self.gen.world_size if self.gen else 0

    @property
    def train_world_size(self) -> int:
        return self.train.world_size if self.train else 0

    @property
    def world_size(self) -> int:
        return self.gen_world_size + self.train_world_size

    @property
    def num_servers(self) -> int:
        return self.gen.data if self.gen else 0

    def __str__(self) -> str:
        sides = [f"{self.gen_backend}:{self.gen}"] if self.gen else []
        sides += [f"{self.train_backend}:{self.train}"] if self.train else []
        sides += ["eval"] if self.evaluate else []
        return "+".join(sides)


def _side(text: str, start: int, side: str) -> tuple[str | None, ParallelStrategy]:
    """Return the backend (None if not named) and strategy of the side that begins at `start`."""
    named = re.match(r"([^.:]*)[.:]", side)
    backend = named[1] if named else None
    if named and backend not in GEN_BACKENDS + TRAIN_BACKENDS:
        known = ", ".join(GEN_BACKENDS + TRAIN_BACKENDS)
        _fail(text, start, f"unknown backend {backend!r}; known: {known}")
    degrees: dict[str, int] = {}
    begin = named.end() if named else 0
    for found in re.compile(r"(.)([0-9]*)", re.DOTALL).finditer(side, begin):
        kind, number = _LETTERS.get(found[1]), found[2]
        if kind is None:
            letters = ", ".join(_LETTERS)
            _fail(text, start + found.start(), f"expected one of {letters} followed by a number")
        if kind in degrees:
            _fail(text, start + found.start(), f"{kind} parallelism is given twice")
        if not number:
            _fail(text, start + found.end(), "expected a number")
        if len(number) > 6 or not 1 <= int(number) <= MAX_DEVICES:
            _fail(text, start + found.start(2), f"a degree of parallelism is from 1 to {MAX_DEVICES}")
        degrees[kind] = int(number)
    if not degrees:
        _fail(text, start + begin, "expected a parallel strategy such as d4p1t1")
    strategy = ParallelStrategy(**degrees)
    if strategy.world_size > MAX_DEVICES:
        _fail(text, start + begin, f"these are {strategy.world_size} devices; at most {MAX_DEVICES}")
    return backend, strategy


def _fail(text: str, column: int, message: str) -> NoReturn:
    arrow = " " * column + "^"
    raise AllocationError(f"malformed allocation_mode: {message}\n  {text}\n  {arrow}\n{_EXAMPLE}")
