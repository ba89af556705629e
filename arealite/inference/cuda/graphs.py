"""CUDA graphs by name: a function runs once to compile its kernels, then is captured and replayed.

All graphs share one memory pool: they never run at the same time, and none reads what another left there. Without a
stream (Triton's interpreter on the CPU) the functions are called directly.
"""

from collections.abc import Callable, Hashable

import torch

from arealite.api.errors import ConfigError

# Of a measurement: replays in a row, so that the GPU does not wait for the host, and how often; the fastest counts.
_REPLAYS, _ROUNDS = 4, 3


class GraphSet:
    """Functions without arguments over fixed tensors, replayed by name."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self.stream = stream
        self.pool = None if stream is None else torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, Callable[[], None]] = {}

    def add(self, name: Hashable, function: Callable[[], None]) -> None:
        """Capture a function."""
        if self.stream is None:
            self._graphs[name] = function
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                function()
        except RuntimeError as error:
            raise ConfigError(
                f"this model uses an operation that a CUDA graph cannot capture ({error}): serve it with sglang or vllm"
            ) from error
        self._graphs[name] = graph.replay

    def run(self, name: Hashable) -> None:
        """Replay a function."""
        self._graphs[name]()

    def measure(self, names: list[Hashable]) -> float:
        """Return the milliseconds of replaying these graphs one after the other; 1 without a GPU."""
        if self.stream is None:
            return 1.0
        times = []
        with torch.cuda.stream(self.stream):
            for _ in range(_ROUNDS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(self.stream)
                for name in names * _REPLAYS:
                    self.run(name)
                end.record(self.stream)
                end.synchronize()
                times.append(begin.elapsed_time(end) / _REPLAYS)
        return min(times)


def decode_sizes(most: int) -> list[int]:
    """Batch sizes that have a graph: dense enough to waste little, few enough to capture."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, 512, 64)]
    sizes += range(512, most + 128, 128)
    return [size for size in sizes if size < most] + [most]


def prefill_sizes(most: int) -> list[int]:
    """Token counts of a prefill that have a graph."""
    if most < 16:
        raise ConfigError(f"max_prefill_tokens={most} is too small on CUDA: use at least 16")
    sizes = [16]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] * 2, most))
    return sizes
