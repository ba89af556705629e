"""Prints what a job would start, and where: `arealite plan SCRIPT.py key=value…`.

Starts nothing and needs no cluster: `cluster.n_nodes` and `cluster.n_gpus_per_node` name the devices. Runs the same
checks as a launcher's `--dry-run`.
"""

from arealite.api.errors import ConfigError
from arealite.launcher.job import Job
from arealite.launcher.launch_config import read_launch_config
from arealite.launcher.local import show_plan
from arealite.launcher.placement import cluster_slots
from arealite.utils.config import run_main

_HELP = f"""usage: arealite plan SCRIPT.py [--config FILE.yaml]... [key=value]...

{(__doc__ or "").strip()}

examples:
  arealite plan train.py allocation_mode=sglang.d12+d4 cluster.n_nodes=2
  arealite train --dry-run trainer.grpo.actor.path=Qwen/Qwen2-0.5B"""


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if argv else 2
    if argv[0].startswith("-") or "=" in argv[0]:
        raise ConfigError("name the script first: arealite plan SCRIPT.py key=value…")
    config = read_launch_config(argv[0], argv[1:], has_controller_mode=True)
    return show_plan(Job(config, argv[0], argv[1:], *cluster_slots(config)), servers_run_here=False)


if __name__ == "__main__":
    run_main(main)
