"""Records what the inference servers do, every few seconds, in the ledger and the trace.

Runs on the executor's event loop while the engine lives, if the run has a ledger.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from arealite.core.ledger.store import Ledger, ServerSample
from arealite.utils import clock
from arealite.utils.trace import tracing

INTERVAL_S = 2.0
# While no server is known yet: the first sample is taken when they are connected.
CONNECTING_S = 0.1
# With more servers each is sampled less often.
MAX_SAMPLES_PER_S = 4.0
# After so many rows the interval doubles: a run of weeks has a bounded ledger.
ROWS_PER_INTERVAL = 100_000


def server_sample(address: str, version: int, is_open: bool, info: Mapping[str, Any]) -> ServerSample:
    """Return a sample from what a server says about itself (`/server_info` of the embedded server)."""
    total = info.get("total_blocks")
    return ServerSample(
        clock.time(),
        address,
        version,
        is_open,
        info.get("running"),
        info.get("waiting"),
        1 - info["free_blocks"] / total if total else None,
        info.get("prompt_tokens"),
        info.get("cached_tokens"),
        info.get("generated_tokens"),
        info.get("busy_s"),
        json.dumps(_step_times(info)) if info.get("step_times") else None,
        info.get("cpu_s"),
    )


def _step_times(info: Mapping[str, Any]) -> dict[str, Any]:
    return {"run": info["step_times"], "trial": info.get("trial_times") or []}


async def sample_servers(take: Callable[[], Awaitable[list[ServerSample]]], ledger: Ledger) -> None:
    """Record what `take` returns until cancelled."""
    num_rows, last = 0, {}
    while True:
        samples = await take()
        ledger.sample(samples)
        for one in samples:
            _trace_batches(last.get(one.address), one)
            last[one.address] = one
        for one in samples:
            tracing.count("server", one.address, running=one.running, waiting=one.waiting, kv_used=one.kv_used)
        num_rows += len(samples)
        interval_s = max(INTERVAL_S, len(samples) / MAX_SAMPLES_PER_S) if samples else CONNECTING_S
        await asyncio.sleep(interval_s * 2 ** (num_rows // ROWS_PER_INTERVAL))


def _trace_batches(before: ServerSample | None, now: ServerSample) -> None:
    """Record what a server computed since its last sample as one span of its lane."""
    if before is None or now.generated_tokens is None or before.generated_tokens is None:
        return
    tokens, seconds = now.generated_tokens - before.generated_tokens, now.time - before.time
    # A server that was restarted counts from 0 again.
    if seconds > 0 and tokens >= 0:
        busy_s = min(seconds, max(0.0, (now.busy_s or 0.0) - (before.busy_s or 0.0)))
        args = {"tokens": tokens, "tokens_per_s": round(tokens / seconds), "running": now.running, "busy_s": busy_s}
        tracing.record("server", f"{now.address} batches", "generate", before.time, seconds, **args)
