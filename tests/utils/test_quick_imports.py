"""Prepared imports give the same results as plain ones."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.metadata
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.utils import import_utils

from arealite.utils.imports import quick_imports
from arealite.utils.imports.quick_imports import Providers, find_all, import_again

LATE_IMPORT = """
from transformers.utils import is_scipy_available
if is_scipy_available():
    from scipy.optimize import linear_sum_assignment
"""


def prepared() -> Any:
    """Return transformers' `import_utils` as it is after a prepared import."""
    module: Any = ModuleType("prepared")
    vars(module).update(vars(import_utils))
    with quick_imports._read_once(module):
        module.PACKAGE_DISTRIBUTION_MAPPING = importlib.metadata.packages_distributions()
    return module


def test_a_module_is_prepared_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "quick_example.py").write_text("import gc\nhas_collector, is_prepared = gc.isenabled(), ready\n")
    monkeypatch.syspath_prepend(tmp_path)
    prepare = lambda module: nullcontext(vars(module).update(ready=True))  # noqa: E731
    monkeypatch.setitem(quick_imports._PREPARED, "quick_example", prepare)
    example = importlib.import_module("quick_example")
    monkeypatch.delitem(sys.modules, "quick_example")
    assert (example.has_collector, example.is_prepared) == (False, True)
    assert gc.isenabled()


def test_transformers_asks_for_single_packages():
    plain = importlib.metadata.packages_distributions
    assert isinstance(prepared().PACKAGE_DISTRIBUTION_MAPPING, Providers)
    assert importlib.metadata.packages_distributions is plain


def test_providers_are_those_of_python():
    expected = importlib.metadata.packages_distributions()
    providers = Providers(lambda: expected)
    some = ["torch", "transformers", "yaml", "PIL", "numpy", "pytest", "_pytest", "no_such_package", "tor"]
    assert {name: providers.get(name) for name in some} == {name: expected.get(name) for name in some}
    assert list(providers) == list(expected)
    assert len(providers) == len(expected)


def test_all_is_found_as_by_transformers():
    original = prepared().fetch__all__.args[0]
    folder = Path(transformers.__file__).parent / "models" / "qwen2"
    texts = [file.read_text() for file in folder.glob("*.py")]
    texts += ["", "x = 1", '__all__ = ["a"]', 'x = 1\n__all__ = [\n    "a",\n    "b",\n]\ny = 2', "# __all__ = 1"]
    texts += ['__all__ = ["a"]\n__all__ = ["b"]', 'if x:\n    __all__ = ["a"]', 'a = "__all__"']
    assert [find_all(original, text) for text in texts] == [original(text) for text in texts]
    assert original(texts[-5])


def test_a_folder_is_read_once():
    folder = Path(transformers.__file__).parent / "models" / "qwen2"
    create = prepared().create_import_structure_from_path
    structure = create(folder)
    assert structure == import_utils.create_import_structure_from_path(folder)
    assert create(str(folder / "__init__.py")) is structure
    assert any("modeling_qwen2" in modules for modules in structure.values())


def test_transformers_is_not_run_again(monkeypatch):
    folder = Path(transformers.__file__).parent
    calls: list[Any] = []
    again = functools.partial(import_again, lambda *args: calls.append(args) or ModuleType("new"))
    present = sys.modules["transformers"]
    assert again(folder) is again(str(folder)) is present
    assert present.AutoTokenizer is transformers.AutoTokenizer
    assert not calls
    # Another folder, another file, and a package that is not imported or not finished are transformers' own to import.
    again(folder.parent)
    again(folder, "other.py")
    for other in (ModuleType("transformers"), None):
        monkeypatch.setitem(sys.modules, "transformers", other)
        again(folder)
    assert calls == [(folder.parent,), (folder, "other.py"), (folder,), (folder,)]


def test_transformers_asks_for_itself_when_a_model_is_imported():
    # The name that `transformers.processing_utils` imports.
    function = prepared().direct_transformers_import
    assert function(Path(transformers.__file__).parent) is sys.modules["transformers"]


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_late_import_happens_at_the_first_call(monkeypatch, is_installed):
    monkeypatch.setattr("transformers.utils.is_scipy_available", lambda: is_installed)
    check = sys.modules["transformers.utils"].is_scipy_available
    module = ModuleType("late")
    monkeypatch.setitem(sys.modules, "late", module)
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)  # an import would fail
    with quick_imports._later("is_scipy_available", module):
        exec(LATE_IMPORT, vars(module))
    assert module.is_scipy_available is check
    assert hasattr(module, "linear_sum_assignment") is is_installed
    if is_installed:
        monkeypatch.setitem(sys.modules, "scipy.optimize", SimpleNamespace(linear_sum_assignment=max))
        assert module.linear_sum_assignment(1, 2) == 2


def test_the_collector_stays_off_if_it_was_off():
    gc.disable()
    try:
        with quick_imports._without_garbage_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_installing_twice_adds_one_finder():
    quick_imports.install()
    assert [finder for finder in sys.meta_path if finder is quick_imports._Finder] == [quick_imports._Finder]
