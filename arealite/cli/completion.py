"""Completes commands, options and config keys in a shell.

    source <(arealite completion bash)                                          bash: put it into ~/.bashrc
    source <(arealite completion zsh)                                           zsh: into ~/.zshrc, after compinit
    arealite completion fish > ~/.config/fish/completions/arealite.fish         fish

The script asks `arealite completion words LINE`, so that it fits every later version too. Keys of a script are those of
the class that it loads. Where nothing is known, the shell completes file names.
"""

import shlex
from collections.abc import Iterable

from arealite.api.cli_args import EvalConfig, GRPOConfig, ServerConfig
from arealite.api.errors import AReaLiteError
from arealite.cli.arguments import ArgumentParser
from arealite.cli.config import ACTIONS, CLASSES
from arealite.cli.entry import COMMANDS
from arealite.cli.main import MainConfig
from arealite.launcher.launch_config import find_config_class
from arealite.utils.config import run_main
from arealite.utils.config_help import keys_of, parts_of

_BASH = """_arealite() {
    local line="${COMP_LINE:0:COMP_POINT}" each
    local word="${line##*[[:space:]]}"
    # bash splits words at = and :, and replaces only what is behind.
    local before="${word%"${word##*[=:]}"}"
    COMPREPLY=()
    while IFS= read -r each; do
        COMPREPLY+=("${each#"$before"}")
    done < <(arealite completion words "$line" 2>/dev/null)
    [[ "${COMPREPLY[*]}" != *[=.] ]] || compopt -o nospace 2>/dev/null
}
complete -o default -F _arealite arealite
"""
_ZSH = """#compdef arealite
_arealite() {
    local -a found
    found=("${(@f)$(arealite completion words "$LBUFFER" 2>/dev/null)}")
    if [[ -z "$found" ]]; then
        compset -P '*='
        _files
        return
    fi
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]}
}
compdef _arealite arealite
"""
_FISH = "complete -c arealite -a '(arealite completion words (commandline -cp))'\n"
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

_DRY = ("--config", "--dry-run", "--help")
# Options of each command; a test compares them with its help.
# fmt: off
_PLAN = (
    "--model", "--gpu", "--gpus", "--layout", "--backend", "--eta", "--prompts", "--samples", "--prompt-lengths",
    "--lengths", "--reward-s", "--turns", "--tool-s", "--max-running", "--prox-logp", "--fixed-lead", "--interrupt",
    "--crash", "--servers", "--from", "--calibrate", "--calibrated", "--steps", "--seed", "--sweep", "--plot", "--page",
    "--json",
    "--help",
)
# fmt: on
OPTIONS = {
    **dict.fromkeys(("train", "eval", "launch local", "launch torchrun", "launch ray", "launch slurm"), _DRY),
    "serve": ("--config", "--help"),
    "plan": _PLAN,
    "config": ("--config", "--set", "--help"),
    "evaluate": ("--once", "--help"),
    "report": ("--steps", "--rollouts", "--what-if", "--json", "--help"),
    "dashboard": ("--port", "--host", "--token", "--no-token", "--help"),
    "replay": ("--from", "--to", "--steps", "--trainer-only", "--rollout-only", "--help"),
    "doctor": ("--patience", "--json", "--no-stacks", "--help"),
    **dict.fromkeys(("init", "completion"), ("--help",)),
}
_CLASSES = {"train": MainConfig, "eval": MainConfig, "serve": ServerConfig, "evaluate": EvalConfig}


def main(argv: list[str]) -> int:
    # Any text may follow, also a line with options.
    if argv[:1] == ["words"] and len(argv) == 2:
        print("\n".join(complete(argv[1])))
        return 0
    parser = ArgumentParser("completion", __doc__, "source <(arealite completion bash)")
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell that reads the script")
    print(SCRIPTS[parser.parse_args(argv).shell], end="")
    return 0


def complete(line: str) -> list[str]:
    """Return what the last word of a command line may become; nothing where file names are expected."""
    words = _split(line)[1:]
    if not words:
        return []
    *before, current = words
    return sorted({word for word in _candidates(before, current) if word.startswith(current)})


def _split(line: str) -> list[str]:
    """Split a line that may end within quotes; its last word is empty after a space."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()
    return [*words, ""] if line[-1:].isspace() else words


def _candidates(before: list[str], current: str) -> Iterable[str]:
    if not before or before == ["help"]:
        return [*dict.fromkeys(name.split()[0] for name in COMMANDS), *([] if before else ["--help", "--version"])]
    if before == ["launch"]:
        return [name.split()[1] for name in COMMANDS if name.startswith("launch ")]
    command = " ".join(before[:2]) if before[0] == "launch" else before[0]
    arguments = before[2:] if before[0] == "launch" else before[1:]
    if arguments[-1:] == ["--config"]:
        return []
    if command == "completion":
        return [*SCRIPTS, "--help"]
    if command == "config":
        return _config_candidates(arguments, current)
    needs_script = command.startswith("launch ") or command == "plan"
    if not current.startswith("-") and needs_script and not arguments:
        return []
    cls = _CLASSES.get(command) or (_class_of_script(arguments[0]) if needs_script and arguments else None)
    return _arguments_of(command, cls, arguments, current)


def _config_candidates(arguments: list[str], current: str) -> Iterable[str]:
    if not arguments:
        return [*ACTIONS, "--help"]
    action, *rest = arguments
    target = rest[0] if rest and (rest[0] in CLASSES or rest[0].endswith(".py")) else ""
    cls = _class_of_script(target) if target.endswith(".py") else CLASSES.get(target, MainConfig)
    kinds = [] if rest else [*CLASSES]
    if action == "help":
        return [*kinds, *_parts(cls)]
    return [*kinds, *_arguments_of("config", cls, rest, current)] if action == "show" else []


def _arguments_of(command: str, cls: type | None, arguments: list[str], current: str) -> Iterable[str]:
    if current.startswith("-"):
        return OPTIONS.get(command, ())
    if cls is None:
        return []
    if arguments[-1:] in (["--help"], ["-h"]):
        return _parts(cls)
    return _values(cls, current) if "=" in current else _keys(cls, current)


def _class_of_script(script: str) -> type:
    try:
        return find_config_class(script) or GRPOConfig
    except (AReaLiteError, OSError):
        return GRPOConfig


def _parts(cls: type) -> list[str]:
    return ["all", "run", *(path for path, *_ in parts_of(cls))]


def _keys(cls: type, current: str) -> Iterable[str]:
    """Yield keys up to the next dot, so that a list stays short: `actor.`, `actor.path=`."""
    for key in keys_of(cls):
        if key.path.startswith(current):
            head, dot, _ = key.path[len(current) :].partition(".")
            yield f"{current}{head}{dot or '='}"


def _values(cls: type, current: str) -> Iterable[str]:
    """Yield the values of a key that has few."""
    path = current.partition("=")[0]
    for key in keys_of(cls):
        if key.path == path:
            words = ["true", "false"] if key.kind.startswith("bool") else key.words
            yield from (f"{path}={word}" for word in words)


if __name__ == "__main__":
    run_main(main)
