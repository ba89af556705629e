"""The compiler is imported once, in a thread."""

import sys

from arealite.utils.imports.compiler_imports import import_compiler


def test_the_compiler_is_imported_in_a_thread():
    thread = import_compiler()
    thread.join(timeout=60)
    assert not thread.is_alive() and thread is import_compiler()
    assert {"torch._inductor.compile_fx", "torch._functorch.aot_autograd"} <= sys.modules.keys()
