"""The `allocation_mode` grammar: which devices generate, which train, and how each side is parallel.

    mode     := side | side "+" side | side "+eval"
    side     := [ backend ("." | ":") ] strategy
    backend  := "sglang" | "vllm" | "embedded"            (generates)
              | "fsdp"                                    (trains; the default of a bare strategy)
    strategy := ( letter number )+      d data, p pipeline, t or m tensor, c context, e expert

Examples: `sglang.d12p1t1+d4p1t1`, `sglang:d4t2+fsdp:d8`, `embedded.d1p1t1+d1p1t1`, `d8`, `vllm.d4t2`, `sglang.d4p1t1+eval`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from arealite.api.errors import AllocationError

GEN_BACKENDS = ("sglang", "vllm", "embedded")
TRAIN_BACKENDS = ("fsdp",)
_LETTERS = {
    "d": "data",
    "p": "pipeline",
    "t": "tensor",
    "m": "tensor",
    "c": "context",
    "e": "expert",
}
_EXAMPLE = "for example sglang.d4p1t1+d4p1t1, embedded:d1+fsdp:d1, d8 or vllm.d4t2+eval"


@dataclass(frozen=True)
class ParallelStrategy:
    """Degrees of parallelism of one side. Expert parallelism reuses the ranks of the others."""

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
        """Devices of one model replica: one inference server, or one data-parallel rank."""
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
        return _Parser(text).parse()

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


class _Parser:
    """Recursive descent over one short string; every error points at a character."""

    def __init__(self, text: str):
        self.text = text
        self.pos = 0

    def parse(self) -> AllocationMode:
        if not self.text.strip():
            self.fail("allocation_mode is empty")
        backend, strategy = self.side()
        if self.pos == len(self.text):
            return self.single(backend, strategy)
        self.expect("+")
        start = self.pos
        if self.text[start:] == "eval":
            if backend not in GEN_BACKENDS:
                self.fail("`+eval` needs an inference backend on its left", at=0)
            return AllocationMode(gen_backend=backend, gen=strategy, evaluate=True)
        other_backend, other_strategy = self.side()
        if self.pos != len(self.text):
            self.fail("nothing may follow the second side")
        if backend not in GEN_BACKENDS:
            self.fail(
                f"the left side generates: write one of {', '.join(GEN_BACKENDS)} before it", at=0
            )
        if other_backend in GEN_BACKENDS:
            self.fail("the right side trains: write fsdp, or no backend at all", at=start)
        return AllocationMode(backend, strategy, "fsdp", other_strategy)

    def single(self, backend: str | None, strategy: ParallelStrategy) -> AllocationMode:
        if backend in GEN_BACKENDS:
            return AllocationMode(gen_backend=backend, gen=strategy)
        return AllocationMode(train_backend="fsdp", train=strategy)

    def side(self) -> tuple[str | None, ParallelStrategy]:
        rest = self.text[self.pos :]
        cut = min((i for i in (rest.find("."), rest.find(":")) if i >= 0), default=-1)
        end = rest.find("+") if "+" in rest else len(rest)
        if cut < 0 or cut > end:
            return None, self.strategy()
        backend = rest[:cut]
        if backend not in GEN_BACKENDS + TRAIN_BACKENDS:
            self.fail(
                f"unknown backend {backend!r}; known: {', '.join(GEN_BACKENDS + TRAIN_BACKENDS)}"
            )
        self.pos += cut + 1
        return backend, self.strategy()

    def strategy(self) -> ParallelStrategy:
        degrees: dict[str, int] = {}
        while self.pos < len(self.text) and self.text[self.pos] != "+":
            letter = self.text[self.pos]
            if letter not in _LETTERS:
                self.fail("expected one of d, p, t, m, c, e followed by a number")
            if _LETTERS[letter] in degrees:
                self.fail(f"{_LETTERS[letter]} parallelism is given twice")
            self.pos += 1
            degrees[_LETTERS[letter]] = self.number()
        if not degrees:
            self.fail("expected a parallel strategy such as d4p1t1")
        return ParallelStrategy(**degrees)

    def number(self) -> int:
        start = self.pos
        while self.pos < len(self.text) and self.text[self.pos] in "0123456789":
            self.pos += 1
        if start == self.pos:
            self.fail("expected a number")
        if int(self.text[start : self.pos]) == 0:
            self.fail("a degree of parallelism is at least 1", at=start)
        return int(self.text[start : self.pos])

    def expect(self, char: str) -> None:
        if self.text[self.pos : self.pos + 1] != char:
            self.fail(f"expected {char!r}")
        self.pos += 1

    def fail(self, message: str, at: int | None = None) -> NoReturn:
        column = self.pos if at is None else at
        raise AllocationError(
            f"malformed allocation_mode: {message}\n  {self.text}\n  {' ' * column}^\n{_EXAMPLE}"
        )
