"""A run in a real kernel of Jupyter: functions of cells work, and the table is updated in its cell."""

import os
import sys
from pathlib import Path

import pytest

from tests import warm_python
from tests.easy.preamble import HEAD
from tests.easy.test_runs import EXAMPLES, ROOT, assert_nothing_left, processes_of

manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")


@pytest.mark.slow
def test_a_notebook_trains_with_functions_of_its_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    warm_python.prepare()
    monkeypatch.setenv("MARK_OF_TEST", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kernel = manager.KernelManager()
    kernel.kernel_spec.argv[:1] = [sys.executable, "-E", "-S", warm_python.__file__, "--run"]
    kernel.start_kernel()
    client = kernel.blocking_client()
    client.start_channels()
    messages: list[dict] = []
    try:
        client.wait_for_ready(timeout=120)
        cells = [
            HEAD.format(examples=str(EXAMPLES), folder=str(tmp_path)),
            "result = GRPOTrainer(train_dataset=rows, reward_fn=many_a, max_steps=3, **settings).train()",
            "assert len(result.history) == 3 and result.path.exists()\nprint('CELL DONE')",
        ]
        for cell in cells:
            reply = client.execute_interactive(cell, timeout=300, output_hook=messages.append)
            assert reply["content"]["status"] == "ok", reply["content"]
        commands = [process.environ().get(warm_python.COMMAND_ENV, "") for process in processes_of(tmp_path)]
        assert "ipykernel_launcher" in "".join(commands) and "arealite.launcher.beside" not in "".join(commands)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    updates = [m["content"]["data"] for m in messages if m["msg_type"] == "update_display_data"]
    text = "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")
    assert len(updates) == 3 and "3/3" in updates[-1]["text/plain"] and "<pre" in updates[-1]["text/html"]
    assert "CELL DONE" in text and "waiting for 1 inference server" in text
    assert_nothing_left(Path(tmp_path))
