"""The reward curve, with and without matplotlib."""

import sys

from arealite.trainer.curve import save_curve


def test_the_curve_is_a_picture(tmp_path):
    path = save_curve(tmp_path / "a" / "reward.png", [0.1, 0.5, 0.9])
    assert path is not None and path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_without_matplotlib_there_is_a_message_and_no_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert save_curve(tmp_path / "reward.png", [0.1, 0.5]) is None
    assert "matplotlib is missing (pip install 'arealite[plot]')" in capsys.readouterr().out
    assert not (tmp_path / "reward.png").exists()
