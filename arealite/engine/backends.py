"""Which client speaks to which kind of server: the one place where a word of `allocation_mode` chooses a class."""

from __future__ import annotations

from arealite.api.alloc_mode import AllocationMode
from arealite.api.errors import ConfigError
from arealite.engine.remote.base import RemoteEngine
from arealite.engine.sglang_remote import RemoteSGLangEngine
from arealite.engine.vllm_remote import RemotevLLMEngine

REMOTE_ENGINES: dict[str, type[RemoteEngine]] = {
    "embedded": RemoteSGLangEngine,
    "sglang": RemoteSGLangEngine,
    "vllm": RemotevLLMEngine,
}


def remote_engine_class(allocation_mode: str) -> type[RemoteEngine]:
    """The client for the servers that `allocation_mode` starts."""
    backend = AllocationMode.from_str(allocation_mode).gen_backend
    if backend is None:
        raise ConfigError(
            f"allocation_mode={allocation_mode} starts no inference server: write for example embedded.d1+d1"
        )
    return REMOTE_ENGINES[backend]
