"""Runs the servers of a job whose trainer is the process that started this one, such as a notebook.

    python -m arealite.launcher.beside JOB.json TRAINER_PID

Servers are started, watched and restarted as in every other job. This process ends when it gets SIGTERM, when the
servers cannot go on, or with the trainer; the servers end with it.
"""

import shutil

from arealite.api.errors import ConfigError
from arealite.launcher.job import Job
from arealite.launcher.node import NodePart, run_node
from arealite.utils.config import run_main
from arealite.utils.process import die_with_parent


class BesidePart(NodePart):
    """The servers of a job without ranks.

    They have no MPS: the trainer's process would outlive its daemon.
    """

    def run(self) -> None:
        self.start_servers()
        while True:
            self.step()


def main(argv: list[str]) -> int:
    if len(argv) != 2 or not argv[1].isdecimal():
        raise ConfigError("usage: python -m arealite.launcher.beside JOB.json TRAINER_PID")
    die_with_parent(int(argv[1]))
    job = Job.load(argv[0])
    try:
        return run_node(job, 0, BesidePart)
    finally:
        shutil.rmtree(job.names_folder, ignore_errors=True)


if __name__ == "__main__":
    run_main(main)
