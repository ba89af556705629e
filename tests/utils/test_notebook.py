"""The display in a notebook: in place, escaped, and only in a kernel."""

import sys
from types import SimpleNamespace

from arealite.utils.console import ProgressTable
from arealite.utils.notebook import NotebookDisplay, open_display


class Handle:
    def __init__(self):
        self.shown = []

    def update(self, data, raw):
        assert raw
        self.shown.append(data)


def test_no_display_outside_of_a_kernel(monkeypatch):
    assert open_display() is None
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert open_display() is None
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert open_display() is None


def test_the_table_is_updated_in_its_cell(monkeypatch, capsys):
    handle = Handle()
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1))
    display = SimpleNamespace(display=lambda data, raw, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    with ProgressTable(2) as table:
        for step in range(2):
            table.update(step, {"reward": step, "loss": 0.5, "rollout/<b>x</b>": 1.0})
    assert capsys.readouterr().out == "" and len(handle.shown) == 2
    last = handle.shown[-1]
    assert "1.000" in last["text/plain"] and "2/2" in last["text/plain"]
    assert last["text/html"].startswith("<pre") and "<b>" not in last["text/html"]


def test_markup_of_a_text_is_escaped():
    handle = Handle()
    NotebookDisplay(lambda data, raw, display_id: handle).update("<script>1</script>")
    assert "<script>" not in handle.shown[0]["text/html"] and "<script>" in handle.shown[0]["text/plain"]
