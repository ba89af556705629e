"""The lanes of servers in the trace, from samples of their counters."""

from arealite.core.ledger.store import ServerSample
from arealite.engine.remote.sampling import _trace_batches
from arealite.utils.trace import tracing


def sample(time, tokens, busy_s=0.0):
    return ServerSample(time, "a:1", 0, True, 3, 0, 0.1, 0, 0, tokens, busy_s)


def test_a_span_tells_what_a_server_computed_between_two_samples():
    tracing.start()
    try:
        _trace_batches(None, sample(10.0, 100))
        _trace_batches(sample(10.0, 100, 1.0), sample(12.0, 500, 2.5))
        # Restarted, and a server without counters.
        _trace_batches(sample(12.0, 500), sample(14.0, 5))
        _trace_batches(sample(12.0, None), sample(14.0, None))
        (span,) = tracing.take()
    finally:
        tracing.stop()
    assert (span.group, span.lane, span.began, span.seconds) == ("server", "a:1 batches", 10.0, 2.0)
    assert span.args == {"tokens": 400, "tokens_per_s": 200, "running": 3, "busy_s": 1.5}
