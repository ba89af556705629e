"""Imports torch and transformers faster: without work that nothing here needs.

`import arealite` installs a finder that prepares a few modules while they are imported:
- The garbage collector pauses. These modules make a million objects and hardly any garbage.
- transformers asks for the packages of all installed distributions, for which Python parses every list of installed
  files. Here only the distributions of the packages that it needs are read.
- transformers looks for `__all__` in each line of its thousand model files, twice. Here once, from the end of a file.
- transformers runs its `__init__.py` a second time when the code of a model is imported, and walks through its folder
  of models for that. Here the module that is there is used.
- transformers imports SciPy, scikit-learn and pandas for losses and assisted generation. Here at their first use.

What a version of transformers does not have is left alone, and so is transformers if it was imported before.
"""

import functools
import gc
import importlib
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

# Functions of other packages that transformers imports if its check says that they are there.
_AT_FIRST_USE = {
    "is_sklearn_available": ("sklearn.metrics", "roc_curve"),
    "is_scipy_available": ("scipy.optimize", "linear_sum_assignment"),
}


class Providers(Mapping[str, list[str]]):
    """The mapping of `importlib.metadata.packages_distributions`, computed package by package."""

    def __init__(self, whole: Callable[[], Mapping[str, list[str]]]):
        self._whole = whole
        self._metadata: Any = importlib.import_module("importlib.metadata")
        self._known: dict[str, list[str]] = {}

    @functools.cached_property
    def _files(self) -> list[tuple[Any, str | None]]:
        """All distributions, with the text that names their packages; None if it is in another place."""
        found = []
        for distribution in self._metadata.distributions():
            texts = [distribution.read_text(name) for name in ("top_level.txt", "RECORD")]
            found.append((distribution, "\n".join(text or "" for text in texts) if any(texts) else None))
        return found

    def __getitem__(self, package: str) -> list[str]:
        if package not in self._known:
            begins = re.compile(rf"^{re.escape(package)}\b", re.MULTILINE)
            # Most distributions are ruled out by a search; what the others provide is Python's to say.
            likely = (one for one, text in self._files if text is None or begins.search(text))
            self._known[package] = [one.metadata["Name"] for one in likely if package in self._provided(one)]
        if not self._known[package]:
            raise KeyError(package)
        return self._known[package]

    def _provided(self, distribution: Any) -> Any:
        declared = self._metadata._top_level_declared(distribution)
        return declared or self._metadata._top_level_inferred(distribution)

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())


def find_all(original: Callable[[str], list[str]], text: str) -> list[str]:
    """Return what transformers' `fetch__all__` does: the names in the last `__all__` of a source file."""
    begin = text.rfind("\n__all__") + 1
    return original(text[begin:]) if begin or text.startswith("__all__") else []


def import_again(original: Callable[..., ModuleType], path: str | os.PathLike[str], *args: Any) -> ModuleType:
    """Return what transformers' `direct_transformers_import` does: the package in `path`."""
    found = sys.modules.get("transformers")
    # Its `__init__.py` puts such a module in its own place when it is done.
    is_done = type(found).__name__ == "_LazyModule"
    if args or not is_done or [os.fspath(path)] != [os.fspath(folder) for folder in getattr(found, "__path__", ())]:
        return original(path, *args)
    assert found is not None
    return found


@contextmanager
def _read_once(module: ModuleType) -> Iterator[None]:
    """Prepare `transformers.utils.import_utils`."""
    metadata: Any = importlib.import_module("importlib.metadata")
    whole = metadata.packages_distributions
    if hasattr(metadata, "_top_level_declared") and hasattr(metadata, "_top_level_inferred"):
        metadata.packages_distributions = lambda: Providers(whole)
    try:
        yield
    finally:
        metadata.packages_distributions = whole
    names = vars(module)
    if "fetch__all__" in names:
        names["fetch__all__"] = functools.partial(find_all, names["fetch__all__"])
    if "direct_transformers_import" in names:
        names["direct_transformers_import"] = functools.partial(import_again, names["direct_transformers_import"])
    create: Any = names.get("create_import_structure_from_path")
    if hasattr(create, "__wrapped__"):
        # Its own cache is smaller than the number of models.
        of_folder = functools.cache(create.__wrapped__)
        names[create.__name__] = lambda path: of_folder(os.path.dirname(path) if os.path.isfile(path) else str(path))


@contextmanager
def _later(check: str, _: ModuleType) -> Iterator[None]:
    """Import a function of `_AT_FIRST_USE` when it is called, in all modules that are imported meanwhile."""
    utils = vars(sys.modules["transformers.utils"])
    is_available = utils.get(check)
    if is_available is None:
        yield
        return

    def never() -> bool:
        return False

    utils[check] = never
    try:
        yield
    finally:
        utils[check] = is_available
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", {})
            if names.get(check) is never:
                names[check] = is_available
                if is_available():
                    names.setdefault(_AT_FIRST_USE[check][1], functools.partial(_call, *_AT_FIRST_USE[check]))


def _call(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plain(_: ModuleType) -> AbstractContextManager[None]:
    return nullcontext()


_PREPARED: dict[str, Callable[[ModuleType], AbstractContextManager[None]]] = {
    "torch": _plain,
    "torch._dynamo": _plain,
    "torch._inductor.compile_fx": _plain,
    "torch.distributed.tensor": _plain,
    "transformers": _plain,
    "transformers.modeling_utils": _plain,
    "transformers.models": _plain,
    "transformers.models.auto.auto_factory": _plain,
    "transformers.utils.import_utils": _read_once,
    "transformers.generation.candidate_generator": functools.partial(_later, "is_sklearn_available"),
    "transformers.loss.loss_utils": functools.partial(_later, "is_scipy_available"),
}


class _Finder:
    """Finds the modules of `_PREPARED` where Python does, and prepares them while their code runs."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        prepare = _PREPARED.get(name)
        if prepare is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        loader: Any = spec and spec.loader
        if loader is None:
            return None
        execute = loader.exec_module

        def execute_prepared(module: ModuleType) -> None:
            with ExitStack() as stack:
                stack.enter_context(_without_garbage_collector())
                stack.enter_context(prepare(module))
                execute(module)

        loader.exec_module = execute_prepared
        return spec


def install() -> None:
    """Prepare the modules that are imported from now on."""
    if not any(finder is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)  # pyright: ignore[reportArgumentType]
