"""The reward curve, with and without matplotlib."""

import os
import sys

from arealite.trainer.output.curve import save_curve
from tests import warm_python


def test_the_curve_is_a_picture(tmp_path):
    path = save_curve(tmp_path / "a" / "reward.png", [0.1, 0.5, 0.9])
    assert path is not None and path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_the_fonts_of_the_curve_are_not_written_through_a_link_of_another_user(tmp_path):
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    for folder in (victim, shared):
        folder.mkdir()
    (shared / "arealite-matplotlib").symlink_to(victim)
    (shared / f"arealite-{os.geteuid()}").symlink_to(victim)
    code = "import sys; from pathlib import Path; from arealite.trainer.output.curve import save_curve;"
    code += "save_curve(Path(sys.argv[1]), [0.1, 0.5])"
    env = {key: value for key, value in os.environ.items() if key != "MPLCONFIGDIR"}
    picture = tmp_path / "reward.png"
    done = warm_python.run(["-c", code, picture], env={**env, "TMPDIR": str(shared)}, timeout=100)
    assert done.returncode == 0, done.stderr
    assert picture.exists() and not list(victim.iterdir())


def test_without_matplotlib_there_is_a_message_and_no_curve(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert save_curve(tmp_path / "reward.png", [0.1, 0.5]) is None
    assert "matplotlib is missing (pip install 'arealite[plot]')" in capsys.readouterr().out
    assert not (tmp_path / "reward.png").exists()
