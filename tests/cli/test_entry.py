"""The `arealite` command: its list of commands, the help of each, and what help imports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from arealite import __version__
from arealite.api.errors import ConfigError
from arealite.cli.entry import COMMANDS, run_command, usage

END = "---end---"
HEAVY = ("torch", "transformers", "ray", "aiohttp")
# Shows the help of each command of its arguments, and what has been imported until then.
HELP = f"""
import sys
from arealite.cli import entry
for command in sys.argv[1:]:
    sys.argv = ["arealite", *command.split(), "--help"]
    try:
        entry.main()
    except SystemExit as ended:
        assert not ended.code, (command, ended.code)
    print("imported:", *(name for name in {HEAVY} if name in sys.modules))
    print("config:", "arealite.utils.config" in sys.modules, end="{END}")
"""


def show_help(*commands: str) -> list[str]:
    command = [sys.executable, "-c", HELP, *commands]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(END)[:-1]


def test_the_package_can_be_run_as_a_module():
    done = subprocess.run([sys.executable, "-m", "arealite", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, f"arealite {__version__}"), done.stderr


def test_help_lists_every_command_and_imports_nothing():
    (shown,) = show_help("")
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert shown.endswith("imported:\nconfig: False")


def test_help_of_each_command_has_usage_and_examples_and_imports_nothing_that_computes():
    for name, shown in zip(COMMANDS, show_help(*COMMANDS), strict=True):
        assert shown.startswith(f"usage: arealite {name} "), shown
        assert "\nexamples:\n  " in shown and "\nimported:\nconfig:" in shown, shown


def test_help_of_launch_lists_the_launchers(capsys):
    assert run_command(["launch", "--help"]) == 0
    assert "launch slurm" in capsys.readouterr().out


def test_version(capsys):
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"arealite {__version__}\n"


def test_no_command_shows_help_and_fails(capsys):
    assert run_command([]) == 2
    assert "usage: arealite COMMAND" in capsys.readouterr().out


def test_help_of_a_command_by_its_name(capsys):
    assert run_command(["help", "plan"]) == 0
    assert "usage: arealite plan [-h]" in capsys.readouterr().out


def test_every_command_has_a_main():
    for command in COMMANDS.values():
        assert callable(__import__(command.module, fromlist=["main"]).main)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serv"], "did you mean serve"),
        (["launch"], "launch needs a launcher and a script: `arealite launch local`"),
        (["launch", "rey"], "launch ray"),
        (["xyzzy"], "unknown command 'xyzzy': `arealite --help` lists all"),
        (["report", "--stepz", "3"], "--steps"),
        (["train", "--dryrun"], "did you mean --dry-run"),
        (["eval", "trainer.type=sft"], "use `arealite train`"),
        (["train", "--help", "actr"], "did you mean actor"),
    ],
)
def test_wrong_arguments_name_the_nearest(argv, message):
    with pytest.raises(ConfigError, match=message):
        run_command(argv)


def test_the_page_shows_the_help_and_an_example_of_every_command():
    page = (Path(__file__).parents[2] / "docs" / "command.md").read_text()
    assert f"```text\n{usage()}\n```" in page
    examples = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    names = {name.split()[0] for name in COMMANDS}
    assert names == {found for found in re.findall(r"\barealite ([a-z]+)", examples)}


@pytest.mark.parametrize("arguments", [["--help"], ["completion", "bash"]])
def test_a_reader_that_goes_away_ends_a_command_quietly(arguments):
    command = [sys.executable, "-m", "arealite.cli.entry", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 141 and errors == "", errors
    process.stderr.close()


def test_a_file_of_a_run_that_cannot_be_read_is_one_message(tmp_path):
    """Such as one of another user; here a folder stands in its place."""
    path = tmp_path / "stats.jsonl"
    path.mkdir()
    command = [sys.executable, "-m", "arealite.cli.entry", "report", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    text = f"error: cannot use {path}: Is a directory. Look at its owner, its permissions and its disk\n"
    assert (ended.returncode, ended.stderr) == (1, text)


@pytest.mark.parametrize("arguments", [["--help"], ["completion", "bash"], ["train", "--help"]])
def test_output_on_a_full_disk_is_one_message(arguments):
    command = [sys.executable, "-m", "arealite.cli.entry", *arguments]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    text = "error: cannot write the output: No space left on device. Free space there, or send the output elsewhere\n"
    assert (ended.returncode, ended.stderr) == (1, text)
