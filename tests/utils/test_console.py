import fcntl
import io
import os
import pty
import struct
import sys
import termios

import pytest
from rich.console import Console

from arealite.utils.activity import activity
from arealite.utils.console import Column, ProgressTable, clock, show_message
from tests import warm_python


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(activity, "interval_s", activity.interval_s)


STATS = {"reward": 0.5, "loss": 0.01, "staleness/max": 2, "tokens_per_s": 1234.5, "idle/trainer": 0.25}


def read_terminal(master: int) -> bytes:
    """Read until the other end closes."""
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    # How Linux reports that the other end of a terminal closed.
    except OSError:
        pass
    os.close(master)
    return shown


def test_plain_lines_when_there_is_no_terminal(capsys):
    with ProgressTable(25) as table:
        for step in range(25):
            table.update(step, STATS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/25" for n in (1, 10, 20, 25)]
    assert "reward 0.500" in lines[0] and "tokens/s 1,234" in lines[0] and "trainer idle 25%" in lines[0]
    assert "server idle –" in lines[0] and lines[-1].endswith("left 0:00")


PHASES = {"time/step": 8.0, "time/rollout": 6.0, "time/update": 1.5, "time/startup/load": 100.0}
FULL = STATS | PHASES | {"ref_kl": 0.003, "prox_kl": 0.001, "entropy": 1.25, "answer_len": 212.0, "idle/server": 0.5}


def shown_at(width: int, height: int = 40) -> list[str]:
    """The lines of a table with twenty steps in a window of this size."""
    table = ProgressTable(50)
    for step in range(20):
        table._add(step + 1, FULL | {"reward": step / 20})
    out = Console(file=io.StringIO(), width=width, height=height)
    with activity.doing("waiting for the batch: 3 of 8 episodes"):
        out.print(table)
    return out.file.getvalue().splitlines()


def test_the_essentials_fit_into_80_columns_and_a_wide_window_shows_more():
    narrow, wide = shown_at(80), shown_at(160)
    head = "step reward loss ref KL KL entropy length staleness tokens/s"
    assert " ".join(narrow[0].split()) == head and all(len(line) <= 80 for line in narrow)
    assert " ".join(wide[0].split()).startswith(head + " s/step trainer idle server idle")
    for lines in (narrow, wide):
        assert lines[2].split()[0] == "11" and lines[11].split()[0] == "20"
        assert any(line.startswith("reward 0 ▁") and line.rstrip().endswith("█ 0.95") for line in lines)
        assert any("rollout 6 s 75%" in line and "update 1.5 s 19%" in line and "load" not in line for line in lines)
        assert "20/50 steps" in lines[-2] and "now: waiting for the batch: 3 of 8 episodes (" in lines[-1]


def test_a_low_window_shows_fewer_steps():
    assert len(shown_at(80, height=12)) < 12


@pytest.mark.parametrize("stats", [{"loss": 0.5, "accuracy": 0.75}, {"loss": 0.5}])
def test_optional_columns_are_shown_where_the_first_step_has_them(capsys, stats):
    columns = [Column("loss", "loss"), Column("accuracy", "accuracy", "{:.0%}", is_optional=True)]
    with ProgressTable(2, columns) as table:
        table.update(0, stats)
    shown = capsys.readouterr().out
    assert "loss 0.5" in shown and ("accuracy 75%" in shown) == ("accuracy" in stats)
    assert "–" not in shown


def test_a_statistic_that_comes_later_gets_its_column(capsys):
    with ProgressTable(2, [Column("loss", "loss"), Column("KL", "prox_kl", is_optional=True)]) as table:
        table.update(0, {"loss": 0.5})
        table.update(1, {"loss": 0.5, "prox_kl": 0.25})
    first, second = capsys.readouterr().out.splitlines()
    assert "KL" not in first and "KL 0.25" in second


def test_slow_steps_have_a_line_each(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("arealite.utils.console.time.monotonic", lambda: now[0])
    with ProgressTable(9) as table:
        for step in range(6):
            now[0] += 12
            table.update(step, STATS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/9", "step 4/9"]
    assert lines[-1].endswith("left 1:00")


def test_nothing_on_other_ranks_or_when_turned_off(capsys, monkeypatch):
    with ProgressTable(1, enabled=False) as table:
        table.update(0, STATS)
    monkeypatch.setenv("RANK", "1")
    with ProgressTable(1) as table:
        table.update(0, STATS)
    assert capsys.readouterr().out == ""


LIVE = """
import os, sys
from arealite.utils.console import ProgressTable
print("before")
with ProgressTable(3, log_path=sys.argv[1]) as table:
    for step in range(3):
        table.update(step, {"reward": step / 10})
        print("chatter of the script")
        os.write(2, b"chatter of a library\\n")
print("after")
"""


@pytest.mark.parametrize("env", [{"CI": "true"}, {"TERM": "dumb"}])
def test_plain_lines_on_the_terminal_of_ci(tmp_path, env):
    master, slave = pty.openpty()
    process = warm_python.start(["-c", LIVE, tmp_path / "log"], stdout=slave, stderr=slave, env={**os.environ, **env})
    os.close(slave)
    text = read_terminal(master).decode()
    assert process.wait() == 0, text
    assert "step 1/3" in text and "chatter" in text and "\x1b" not in text


def test_the_live_table_says_what_is_waited_for_before_the_first_step(tmp_path):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 160, 0, 0))
    code = (
        "import sys\nfrom arealite.utils.activity import activity\nfrom arealite.utils.console import ProgressTable\n"
        "with ProgressTable(3, log_path=sys.argv[1]) as table, activity.doing('waiting for ' + 'x' * 100):\n"
        "    table._screen.live.refresh()"
    )
    process = warm_python.start(["-c", code, tmp_path / "log"], stdout=slave, stderr=slave, env=os.environ)
    os.close(slave)
    text = read_terminal(master).decode()
    assert process.wait() == 0, text
    # The width is that of the window.
    assert "0/3 steps" in text and f"now: waiting for {'x' * 100} (0 s)" in text


def test_the_live_table_keeps_other_output_in_the_log(tmp_path):
    master, slave = pty.openpty()
    log = tmp_path / "log"
    env = {**os.environ, "TERM": "xterm"}
    process = warm_python.start(["-c", LIVE, log], stdout=slave, stderr=slave, env=env)
    os.close(slave)
    shown = read_terminal(master)
    text = shown.decode()
    assert process.wait() == 0, text
    assert "before" in text and "after" in text and "0.200" in text and "3/3" in text
    assert "chatter" not in text
    assert log.read_text().count("chatter of the script") == 3
    assert log.read_text().count("chatter of a library") == 3


def test_clock():
    assert (clock(5), clock(65), clock(7384)) == ("0:05", "1:05", "2:03:04")


def test_messages_appear_above_the_live_table(tmp_path):
    """On a terminal the other output of the process goes to the log only."""
    master, slave = os.openpty()
    script = (
        "from arealite.utils.console import ProgressTable, show_message\n"
        "from pathlib import Path\n"
        f"with ProgressTable(2, log_path=Path({str(tmp_path / 'log')!r})) as table:\n"
        "    table.update(0, {'reward': 0.1})\n"
        "    show_message('warning: [bold] no room on the disk')\n"
        "    print('chatter')\n"
        "    table.update(1, {'reward': 0.2})\n"
    )
    process = warm_python.start(["-c", script], stdout=slave, stderr=slave)
    os.close(slave)
    shown = read_terminal(master)
    assert process.wait() == 0, shown
    assert b"warning: [bold] no room on the disk" in shown and b"chatter" not in shown
    assert "no room on the disk" in (tmp_path / "log").read_text()


def test_a_message_is_one_write_so_that_those_of_threads_do_not_mix(monkeypatch):
    class Output(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    pieces: list[str] = []
    monkeypatch.setattr(sys, "stdout", Output())
    show_message("agents start sessions at URL")
    assert [piece for piece in pieces if piece] == ["agents start sessions at URL\n"]
