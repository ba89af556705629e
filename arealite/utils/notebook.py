"""A display in the output of a notebook cell that is updated in place.

IPython is used only where it runs already: it is no dependency.
"""

import importlib
import io
import sys
from typing import Any

from rich.console import Console, RenderableType

_WIDTH = 120
_HTML = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.2">{code}</pre>'


class NotebookDisplay:
    """Shows one thing after another in the same place."""

    def __init__(self, display: Any):
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def update(self, content: RenderableType) -> None:
        """Replace what is shown. Text of the content is escaped."""
        console = Console(record=True, file=io.StringIO(), width=_WIDTH, force_jupyter=False)
        console.print(content)
        text = console.export_text(clear=False)
        html = console.export_html(inline_styles=True, code_format=_HTML)
        self._handle.update({"text/plain": text, "text/html": html}, raw=True)


def open_display() -> NotebookDisplay | None:
    """Return a display in the cell that runs now; None if this process is no kernel of a notebook."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    # A terminal's IPython has no kernel.
    if get_shell is None or not hasattr(get_shell(), "kernel"):
        return None
    return NotebookDisplay(importlib.import_module("IPython.display").display)
