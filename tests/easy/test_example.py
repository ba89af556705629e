"""The example of five lines runs as it is written."""

import pytest

from tests import warm_python
from tests.easy.test_runs import EXAMPLES


@pytest.mark.slow
def test_five_lines(tmp_path):
    done = warm_python.run([EXAMPLES / "five_lines.py", "2"], cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 steps, reward" in done.stdout and "abcde> " in done.stdout
    assert (tmp_path / "runs/five_lines/grpo/run1/checkpoints/step000002/config.json").exists()
