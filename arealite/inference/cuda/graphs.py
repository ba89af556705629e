"""CUDA graphs by name: each is run once to compile its kernels, then captured, then replayed.

All share one pool of memory: they never run at the same time, and nothing that one leaves in the pool is read by another.
Without a stream (Triton's interpreter on the CPU) the functions are simply called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from arealite.api.errors import ConfigError


class GraphSet:
    """Functions of no arguments over fixed tensors, replayed by name."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self.stream = stream
        self.pool = None if stream is None else torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, Callable[[], None]] = {}

    def add(self, name: Hashable, function: Callable[[], None]) -> None:
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
                f"this model does something that a CUDA graph cannot hold ({error}): serve it with sglang or vllm"
            ) from error
        self._graphs[name] = graph.replay

    def run(self, name: Hashable) -> None:
        self._graphs[name]()
