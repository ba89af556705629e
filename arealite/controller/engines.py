"""Controllers: what a script holds instead of an engine whose ranks live in actors. Same methods, same attributes.

How a call is treated follows from its annotation. One that returns tensors leaves them in the object store, and looks only at what was observed, not at
other engines' predictions; one that takes a batch and returns None is there to add columns; any other gives rank 0's value. Whatever the first two put
into the batch is in the script's batch afterwards. A call is sent at once and waited for when its result is used, so engines that do not need each
other's results work at the same time.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.errors import AllocationError, ConfigError
from arealite.api.io_struct import Batch, WeightUpdateMeta
from arealite.api.workflow_api import RolloutWorkflow
from arealite.controller.lazy import Layer, LazyBatch, LazyList, LazyTensor, cut
from arealite.controller.rank import Given, Head, Request, load, store
from arealite.utils.data import select_rows

if TYPE_CHECKING:
    from arealite.controller.driver import Driver

# Others read the files that these write, or write what these read.
_WAITED_FOR = ("save", "load", "update_weights", "load_state_dict")
_BY_VALUE = (str, int, float, bool, list, tuple, dict, type, types.FunctionType, partial)


class Call:
    """A method under way on all ranks of an engine (or, without an engine, columns that the driver itself put in the store)."""

    def __init__(self, driver: Driver, engine: Controller | None, method: str, heads: list[Any]):
        self.driver, self.engine, self.method, self.heads = driver, engine, method, heads
        self.on_batch = False
        self.ended: dict[int, Head] = {}
        self.owners: list[Any] = []  # of each share, the actor that has it
        self.refs: list[Any] = []  # of each share, the columns that it leaves
        # Of a batch that the script made: where its rows are among those of the shares, and how wide it is.
        self.order: torch.Tensor | None = None
        self.width = 0

    def head(self, rank: int = 0) -> Head:
        self.driver.wait([self.heads[rank]] if self.heads else [])
        return self.ended[rank]

    def value(self) -> Any:
        """Its plain result; waits for the end of the call, as all that follow."""
        return self.head().value

    def columns(self) -> tuple[str, ...]:
        """Names of the columns that it leaves."""
        return self.head().columns

    def shapes(self) -> list[torch.Size]:
        leaders = range(0, len(self.heads) or 1, self.engine.replica if self.engine else 1)
        return [shape for rank in leaders for shape in self.head(rank).shapes]

    def fetch(self, column: str) -> list[torch.Tensor]:
        """One of its columns, of each share."""
        self.columns()  # an error of the call is told as its own
        ray = self.driver.ray
        if self.engine is None:
            parts = [load(stored)[column] for stored in ray.get(self.refs)]
        else:
            pairs = zip(self.owners, self.refs, strict=True)
            parts = ray.get([owner.pick.remote(column, ref) for owner, ref in pairs])
        self.driver.tensor_bytes += sum(part.nbytes for part in parts)
        return parts

    def put(self, column: torch.Tensor) -> Call:
        """A column that the driver has (named ""), cut into the same shares."""
        shapes = self.shapes()
        if self.order is not None:
            column = column[self.order.argsort()]
            if column.dim() > 1 and column.shape[1] == self.width:
                column = column[:, : max(length for _, length in shapes)]
        made = put(self.driver, [{"": part} for part in cut(column, shapes)], shapes)
        made.order, made.width = self.order, self.width
        return made


def put(driver: Driver, shares: list[Batch], shapes: list[torch.Size]) -> Call:
    """Columns that the driver has, as those of a call that has ended."""
    call = Call(driver, None, "put", [])
    call.ended[0] = Head(0.0, 0.0, None, tuple(shares[0]), tuple(shapes))
    call.refs = [driver.ray.put(store(share)) for share in shares]
    driver.tensor_bytes += sum(column.nbytes for share in shares for column in share.values())
    return call


class Controller:
    """A train engine with `strategy.world_size` ranks. Batches are shared out by references; every rank gets the same call."""

    def __init__(
        self, driver: Driver, cls: type, name: str, ranks: list[Any], group: Any, strategy: ParallelStrategy
    ):  # fmt: skip
        own = {"driver": driver, "cls": cls, "name": name, "ranks": ranks, "group": group}
        own |= {"strategy": strategy, "replica": strategy.instance_size, "_kept": {}}
        self.__dict__.update(own)  # all other attributes are the engine's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self.cls, name, None)
        if inspect.isfunction(method):
            return partial(self._call, method)
        return self._value("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._send(name, [rank.set.remote(name, value) for rank in self.ranks])

    def share(self, rows: list[Any]) -> list[Any]:
        """The driver's part of the rows is all of them: they are shared out when they have become a batch."""
        return rows

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        self._call(self.cls.update_weights, meta)
        if meta.type == "broadcast":  # sent by the rollout's process, which needs them
            self.driver.outboxes[meta.path] = self.ranks[0].outbox.remote(meta.path)

    def destroy(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if not self.ranks:
            return
        # Ranks whose neighbour died may wait for it for long: what does not end by itself is ended.
        ray, heads = self.driver.ray, self._call_all(Request("destroy")).heads
        grace_s = self.driver.job.config.launcher.stop_timeout_s
        ray.wait(heads, num_returns=len(heads), timeout=grace_s)
        self.driver.forget(heads)
        for rank in self.ranks:
            ray.kill(rank)
        remove_placement_group(self.group)
        self.ranks.clear()

    # ------------------------------------------------------------------------------------------------ calls

    def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = [a for a in (*args, *kwargs.values()) if _is_batch(a)]
        batch = given[0] if given else None
        lazy = self._put(batch) if isinstance(batch, dict) else batch
        returns = str(inspect.signature(method).return_annotation)
        predicts = "Tensor" in returns or "Batch" in returns
        adds = returns == "None" and batch is not None
        request = Request(method.__name__)
        request.args = [self._argument(a) for a in args]
        request.kwargs = {k: self._argument(a) for k, a in kwargs.items()}
        layers = [] if lazy is None else lazy.observed() if predicts else lazy.layers
        call = self._call_all(request, layers, predicts or adds)
        if batch is not None and (predicts or adds):
            self._add(batch, Layer(call, added=True), predicts)
        if predicts:
            whole = "Batch" in returns or "dict" in returns
            return LazyBatch([Layer(call)]) if whole else LazyTensor(call, "")
        if adds:
            return None
        if returns.startswith("list") and batch is not None:
            return LazyList(call)
        if returns != "None" or method.__name__ in _WAITED_FOR:
            self.driver.wait(call.heads)
            return call.value()

    def _call_all(self, request: Request, layers: list[Layer] | None = None, leaves: bool = False) -> Call:
        """Send to every rank; ranks of one replica get the same shares."""
        layers = layers or []
        request.layers = [layer.selection() for layer in layers]
        num_shares = len(layers[0].call.refs) if layers else self.driver.num_shares
        each = self._shares_each(num_shares) if layers else num_shares
        request.num_parts = each if leaves else 0
        payload = self.driver.dumps(request)
        call = Call(self.driver, self, request.method, [])
        call.on_batch = bool(layers)
        if layers:
            call.order, call.width = layers[0].call.order, layers[0].call.width
        for index, rank in enumerate(self.ranks):
            first = index // self.replica * each
            mine = [ref for layer in layers for ref in layer.call.refs[first : first + each]]
            answer = rank.call.options(num_returns=1 + request.num_parts).remote(payload, *mine)
            head, *parts = answer if leaves else [answer]
            call.heads.append(head)
            if index % self.replica == 0:
                call.owners += [rank] * len(parts)
                call.refs += parts
        self.driver.began(call)
        return call

    def _shares_each(self, num_shares: int) -> int:
        if num_shares % self.strategy.data:
            raise AllocationError(
                f"a batch has {num_shares} shares, which {self.name} ({self.strategy}) cannot take evenly: the data-parallel sizes of "
                "engines must divide each other"
            )
        return num_shares // self.strategy.data

    def _add(self, batch: Any, layer: Layer, predicted: bool) -> None:
        """What a call puts into the batch that it was given."""
        if isinstance(batch, LazyBatch):
            batch.add(layer, predicted)
        else:
            batch.update((n, LazyTensor(layer.call, kept)) for n, kept in layer.columns().items())

    def _send(self, what: str, heads: list[Any]) -> None:
        self.driver.began(Call(self.driver, self, what, heads))

    def _value(self, method: str, *args: Any) -> Any:
        """What rank 0's actor says, now."""
        try:
            return self.driver.ray.get(getattr(self.ranks[0], method).remote(*args))
        except self.driver.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    # -------------------------------------------------------------------------------------------- arguments

    def _argument(self, value: Any) -> Any:
        if _is_batch(value):
            return Given()
        by_value = value is None or isinstance(value, _BY_VALUE) or is_dataclass(value)
        if by_value and not isinstance(value, RolloutWorkflow):
            return value
        number = id(value)
        if number not in self._kept:
            self._kept[number] = value  # lives as long as its number is used
            payload = self.driver.dumps(value)
            self._send("keep", [rank.keep.remote(number, payload) for rank in self.ranks])
        return Given(number)

    def _put(self, batch: Batch) -> LazyBatch:
        """A batch that the script made itself, of a fixed dataset: pairs and groups stay together, as `share` would deal them out."""
        if isinstance(batch.get("input_ids"), LazyTensor):
            # the script's copy of one that engines have
            kept = {k: v for k, v in batch.items() if isinstance(v, LazyTensor)}
            lazy = LazyBatch([value.under(name) for name, value in kept.items()])
            lazy.update({k: v for k, v in batch.items() if k not in kept})
            return lazy
        real = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
        parts = self.driver.num_shares
        owners = real.get("pair_ids", real.get("group_ids", torch.arange(len(real["input_ids"]))))
        place = {owner: i % parts for i, owner in enumerate(dict.fromkeys(owners.tolist()))}
        rows = [[r for r, o in enumerate(owners.tolist()) if place[o] == p] for p in range(parts)]
        shares = [select_rows(real, mine) for mine in rows]
        if not all(rows):
            raise ConfigError(
                f"a batch of {len(place)} rows cannot be shared by {parts} ranks: raise train_dataset.batch_size"
            )
        shapes = [share["attention_mask"].shape for share in shares]
        made = put(self.driver, shares, shapes)
        made.order = torch.tensor([row for mine in rows for row in mine]).argsort()
        made.width = real["attention_mask"].shape[1]
        lazy = LazyBatch([Layer(made)])
        lazy.update({k: v for k, v in batch.items() if isinstance(v, LazyTensor)})
        return lazy


class RolloutController(Controller):
    """An inference engine in one actor, with the executor of the job."""

    def prepare_batch(self, dataloader: Any, workflow: RolloutWorkflow) -> LazyBatch:
        return self._collect("prepare_batch", dataloader, workflow)

    def rollout_batch(self, data: list[dict[str, Any]], workflow: RolloutWorkflow) -> LazyBatch:
        return self._collect("rollout_batch", data, workflow)

    def wait(self, count: int, timeout_s: float | None = None) -> LazyBatch:
        return self._collect("wait", count, timeout_s)

    def _collect(self, method: str, *args: Any) -> LazyBatch:
        """Waited for, though not fetched: what it took is the step's time for rollout."""
        batch = self._call(getattr(self.cls, method), *args)
        batch.layers[0].columns()
        return batch

    def update_weights(self, meta: WeightUpdateMeta) -> None:
        if meta.type == "broadcast":
            published = self.driver.outboxes[meta.path]
            self._send("fill_outbox", [self.ranks[0].fill_outbox.remote(meta.path, published)])
        self._call(self.cls.update_weights, meta)

    async def agenerate(self, request: Any) -> Any:
        return (await self._call_all(Request("agenerate", [request])).heads[0]).value

    async def agenerate_group(self, request: Any) -> Any:
        return (await self._call_all(Request("agenerate_group", [request])).heads[0]).value

    def stats(self) -> dict[str, float]:
        return self._call(self.cls.stats) | self.driver.take_stats()


def _is_batch(value: Any) -> bool:
    return isinstance(value, LazyBatch) or (isinstance(value, dict) and "attention_mask" in value)
