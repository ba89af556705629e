"""Resolves the client engine for the servers of an `allocation_mode`; see `arealite.api.backends`."""

import importlib

from arealite.api.alloc_mode import AllocationMode
from arealite.api.backends import BACKENDS
from arealite.api.errors import ConfigError
from arealite.engine.remote.base import RemoteEngine
from arealite.engine.replay.replaying import current_replay


def remote_engine_class(allocation_mode: str) -> type[RemoteEngine]:
    """Return the engine that talks to the servers of `allocation_mode`."""
    name = AllocationMode.from_str(allocation_mode).gen_backend
    if name is None and current_replay() is not None:
        # It stands for a client that is never made.
        return RemoteEngine
    if name is None:
        raise ConfigError(
            f"allocation_mode={allocation_mode} starts no inference server: write for example embedded.d1+d1"
        )
    module, _, client = BACKENDS[name].client.partition(":")
    return getattr(importlib.import_module(module), client)
