"""The figures of the documentation are those that the script draws from recorded runs and benchmark results."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.workspace import ROOT


@pytest.mark.slow
def test_figures_can_be_drawn_again(tmp_path):
    pytest.importorskip("matplotlib")
    script = [sys.executable, "-P", str(ROOT / "scripts" / "docs_figures.py"), "--out", str(tmp_path)]
    subprocess.run(script, check=True, timeout=110)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (ROOT / "docs" / "figures").glob("*.svg"))
    assert all((tmp_path / name).stat().st_size < 200_000 for name in drawn)
