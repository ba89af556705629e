"""Membership of servers in a running job, by leases in the name service.

A server started by hand (`python -m arealite.cli.serve … join=RUN_DIR`) holds a lease with its address in the run
directory. The launcher holds one for each of its servers, and restarts a server that died under a new address. Rank 0
reads the leases. A server that is stopped withdraws its lease; the lease of a killed server expires.
"""

import asyncio
import logging
from pathlib import Path

from arealite.api.errors import ConfigError
from arealite.utils.names import ELASTIC_PREFIX, FileNames, elastic_names
from arealite.utils.rundir import RunDir

logger = logging.getLogger("arealite.membership")

POLL_INTERVAL_S = 1.0
LAUNCHER_PREFIX = "servers/"


class Lease:
    """The server's side: a lease that is published while the server runs."""

    def __init__(self, run_dir: str | Path, address: str):
        job = RunDir(run_dir)
        # A job makes the folder of its names before anything else. In another folder nobody would read the lease.
        if not job.names.is_dir():
            try:
                job.check()
            except ConfigError as error:
                raise ConfigError(f"join={run_dir}: {error}") from error
        self.address = address
        self._names = elastic_names(job)

    async def hold(self, stop: asyncio.Event) -> None:
        """Keep the lease until `stop` is set."""
        self._names.publish(ELASTIC_PREFIX + self.address, self.address)
        try:
            while not stop.is_set():
                try:
                    self._names.renew()
                except OSError as error:
                    # A shared folder that is unavailable for a moment.
                    logger.warning("the lease of %s was not renewed: %s", self.address, error)
                try:
                    async with asyncio.timeout(self._names.ttl_s / 3):
                        await stop.wait()
                except TimeoutError:
                    continue
        finally:
            self._names.close()


class Members:
    """The client's side: reads which servers hold a lease."""

    def __init__(self, run_dir: str | Path | None, launcher_names: str | None = None):
        self._leases: list[tuple[FileNames, str]] = []
        if run_dir is not None:
            self._leases.append((elastic_names(RunDir(run_dir)), ELASTIC_PREFIX))
        self.has_launcher = bool(launcher_names)
        if launcher_names:
            self._leases.append((FileNames(launcher_names), LAUNCHER_PREFIX))

    def living(self) -> set[str]:
        """Return the addresses of all servers with a lease."""
        return {address for names, prefix in self._leases for address in names.list(prefix).values()}

    def close(self) -> None:
        for names, _ in self._leases:
            names.close()
