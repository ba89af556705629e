"""Controllers: stand in for engines whose ranks live in actors, with the same methods and attributes.

A call is sent to all ranks at once. The marks on the engine's methods (`arealite.api.engine_api.Result`) say what the
script gets and whether it waits, so engines that do not need each other's results work at the same time.
"""

import inspect
import types
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.engine_api import Result, result_of
from arealite.api.errors import AllocationError, ConfigError
from arealite.api.io_struct import Batch, ModelRequest, ModelResponse, WeightUpdateMeta
from arealite.api.workflow_api import RolloutWorkflow
from arealite.controller.lazy import Layer, LazyBatch, LazyList, LazyTensor
from arealite.controller.messages import Placeholder, Request
from arealite.controller.runtime import Call, Runtime
from arealite.core.ledger.rollouts import is_recorded
from arealite.utils.data import select_rows
from arealite.weights.sync import transport_class

# Arguments of other types are sent once and kept by the ranks: they may have a state.
_BY_VALUE = (str, int, float, bool, list, tuple, dict, type, types.FunctionType, partial)


class Controller:
    """A train engine with `strategy.world_size` ranks. Each call goes to all ranks."""

    def __init__(
        self, runtime: Runtime, cls: type, name: str, ranks: list[Any], group: Any, strategy: ParallelStrategy
    ):  # fmt: skip
        own = {"runtime": runtime, "cls": cls, "name": name, "ranks": ranks, "group": group}
        own |= {"strategy": strategy, "replica": strategy.instance_size, "_sent": {}}
        # All other attributes are the engine's: see __setattr__.
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if inspect.isfunction(getattr(self.cls, name, None)):
            return partial(self._call, name)
        return self._get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._track(name, [rank.set.remote(name, value) for rank in self.ranks])

    def share(self, rows: list[Any]) -> list[Any]:
        """Return all rows: a batch made of them is split into shares when an engine gets it."""
        return rows

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._call("update_weights", meta)
        if transport_class(meta).is_in_process:
            # The process of the rollout engine broadcasts them.
            self.runtime.outboxes[meta.path] = self.ranks[0].outbox.remote(meta.path)

    def destroy(self) -> None:
        """Destroy the engine on all ranks and free their devices; idempotent."""
        from ray.util.placement_group import remove_placement_group

        if not self.ranks:
            return
        # A rank may hang in a collective with one that died: kill what does not end in time.
        ray, reports = self.runtime.ray, self._call_ranks(Request("destroy")).reports
        ray.wait(reports, num_returns=len(reports), timeout=self.runtime.stop_timeout_s)
        self.runtime.forget(reports)
        for rank in self.ranks:
            ray.kill(rank)
        remove_placement_group(self.group)
        self.ranks.clear()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on all ranks and return what its mark says."""
        result = result_of(self.cls, method)
        batch = next((a for a in (*args, *kwargs.values()) if _is_batch(a)), None)
        lazy = self._put(batch) if isinstance(batch, dict) else batch
        is_prediction = result in (Result.BATCH, Result.COLUMN)
        is_update = result is Result.STATS and isinstance(batch, LazyBatch)
        leaves_columns = is_prediction or is_update or (result is Result.ADDED_COLUMNS and batch is not None)
        request = Request(method)
        request.args = [self._argument(a) for a in args]
        request.kwargs = {k: self._argument(a) for k, a in kwargs.items()}
        layers = [] if lazy is None else lazy.observed() if is_prediction else lazy.layers
        call = self._call_ranks(request, layers, leaves_columns)
        if isinstance(batch, LazyBatch) and is_update:
            batch.recorded.append(Layer(call, added=True))
        elif batch is not None and leaves_columns:
            _add_layer(batch, Layer(call, added=True), is_prediction)
        if result is Result.BATCH:
            return LazyBatch([Layer(call)])
        if result is Result.COLUMN:
            return LazyTensor(call, "")
        if result is Result.STATS:
            return LazyList(call)
        if result is Result.VALUE:
            self.runtime.wait(call.reports)
            return call.value()

    def _call_ranks(self, request: Request, layers: list[Layer] | None = None, leaves_columns: bool = False) -> Call:
        """Send a request to every rank. Ranks of one replica get the same shares."""
        layers = layers or []
        request.layers = [layer.selection() for layer in layers]
        num_shares = len(layers[0].call.refs) if layers else self.runtime.num_shares
        each, left = divmod(num_shares, self.strategy.data if layers else 1)
        if left:
            raise AllocationError(
                f"a batch has {num_shares} shares, which {self.name} ({self.strategy}) cannot split evenly: the "
                "data-parallel sizes of engines must divide each other"
            )
        request.num_parts = each if leaves_columns else 0
        payload = self.runtime.dumps(request)
        call = Call(self.runtime, self.name, request.method, [], self.replica)
        call.has_batch = bool(layers)
        if layers:
            call.order, call.width = layers[0].call.order, layers[0].call.width
        for index, rank in enumerate(self.ranks):
            first = index // self.replica * each
            refs = [ref for layer in layers for ref in layer.call.refs[first : first + each]]
            answer = rank.call.options(num_returns=1 + request.num_parts).remote(payload, *refs)
            report, *parts = answer if leaves_columns else [answer]
            call.reports.append(report)
            if index % self.replica == 0:
                call.owners += [rank] * len(parts)
                call.refs += parts
        self.runtime.add(call)
        return call

    def _track(self, method: str, reports: list[Any]) -> None:
        self.runtime.add(Call(self.runtime, self.name, method, reports, self.replica))

    def _get(self, name: str) -> Any:
        """Return an attribute of rank 0's engine."""
        return self.runtime.get(self.ranks[0].get.remote(name), Call(self.runtime, self.name, name, []), 0)

    def _argument(self, value: Any) -> Any:
        """Return what stands for an argument in a request."""
        if _is_batch(value):
            return Placeholder()
        by_value = value is None or isinstance(value, _BY_VALUE) or is_dataclass(value)
        if by_value and not isinstance(value, RolloutWorkflow):
            return value
        number = id(value)
        if number not in self._sent:
            # Kept here too: the id must not be used again for another object.
            self._sent[number] = value
            payload = self.runtime.dumps(value)
            self._track("keep", [rank.keep.remote(number, payload) for rank in self.ranks])
        return Placeholder(number)

    def _put(self, batch: Batch) -> LazyBatch:
        """Store a batch that the script made. Pairs and groups stay together, as with the engine's `share`."""
        if isinstance(batch.get("input_ids"), LazyTensor):
            # The script's copy of a batch that the engines have.
            kept = {k: v for k, v in batch.items() if isinstance(v, LazyTensor)}
            lazy = LazyBatch([value.as_layer(name) for name, value in kept.items()])
            lazy.update({k: v for k, v in batch.items() if k not in kept})
            return lazy
        real = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
        num_shares = self.runtime.num_shares
        owners = real.get("pair_ids", real.get("group_ids", torch.arange(len(real["input_ids"])))).tolist()
        share_of = {owner: i % num_shares for i, owner in enumerate(dict.fromkeys(owners))}
        rows = [[row for row, owner in enumerate(owners) if share_of[owner] == i] for i in range(num_shares)]
        if not all(rows):
            raise ConfigError(
                f"a batch of {len(share_of)} rows cannot be split over {num_shares} ranks: raise "
                "train_dataset.batch_size"
            )
        shares = [select_rows(real, chosen) for chosen in rows]
        stored = self.runtime.put(shares, [share["attention_mask"].shape for share in shares])
        stored.order = torch.tensor([row for chosen in rows for row in chosen]).argsort()
        stored.width = real["attention_mask"].shape[1]
        lazy = LazyBatch([Layer(stored)])
        lazy.update({k: v for k, v in batch.items() if isinstance(v, LazyTensor)})
        return lazy


class RolloutController(Controller):
    """An inference engine in one actor, with the job's workflow executor."""

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Wait for a batch without fetching it, so that the script's `rollout` phase measures it."""
        result = super()._call(method, *args, **kwargs)
        if isinstance(result, LazyBatch):
            result.layers[0].columns()
            self.__dict__["_batch"] = result if method == "prepare_batch" else None
        return result

    def _record_batch(self) -> None:
        """Send what trainers have added to the last batch back to its episodes, for the ledger."""
        batch = self.__dict__.pop("_batch", None)
        if batch is None or not self.__dict__.setdefault("_keeps_rollouts", self._get("config").dump_rollouts):
            return
        layers = [
            Layer(layer.call, {stored: name for name, stored in layer.columns().items() if is_recorded(name)})
            for layer in (*batch.layers, *batch.recorded)
        ]
        super()._call("record_batch", LazyBatch([layer for layer in layers if layer.names]))

    def begin_update(self, meta: WeightUpdateMeta) -> None:
        """Do nothing: the engine's process gets the weights only when all of them are published."""

    def read_probe(self, path: str) -> list[str]:
        """Return nothing: the driver does not publish weights, so servers cannot be probed from here."""
        return []

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._record_batch()
        if transport_class(meta).is_in_process:
            published = self.runtime.outboxes[meta.path]
            self._track("fill_outbox", [self.ranks[0].fill_outbox.remote(meta.path, published)])
        self._call("update_weights", meta)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return (await self._call_ranks(Request("agenerate", [request])).reports[0]).value

    async def agenerate_group(self, request: ModelRequest) -> list[ModelResponse]:
        return (await self._call_ranks(Request("agenerate_group", [request])).reports[0]).value


def _is_batch(value: Any) -> bool:
    return isinstance(value, LazyBatch) or (isinstance(value, dict) and "attention_mask" in value)


def _add_layer(batch: LazyBatch | dict[str, Any], layer: Layer, predicted: bool) -> None:
    """Add the columns that a method put into its batch to the script's batch."""
    if isinstance(batch, LazyBatch):
        batch.add(layer, predicted)
    else:
        batch.update((name, LazyTensor(layer.call, stored)) for name, stored in layer.columns().items())
