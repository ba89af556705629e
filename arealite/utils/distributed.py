"""Process groups, and the collectives that the package needs besides those of sharded training.

All functions also work in a single process without a group. Nothing is pickled: structure is sent as JSON, tensors as
bytes. CUDA jobs get both NCCL and gloo, so that tensors on the host can be exchanged too.
"""

import itertools
import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from arealite.api.errors import ConfigError
from arealite.api.io_struct import Stat, Stats
from arealite.utils.network import GROUP_TIMED_OUT, interface_towards
from arealite.utils.process import STORE_ENV, rank
from arealite.utils.status.waits import collective


def world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


_replica_size = 1
_group_numbers = itertools.count()


def set_replica_size(size: int) -> None:
    """Set how many ranks (tensor times context) hold one replica of the model and get the same data."""
    global _replica_size
    _replica_size = size


def replica_size() -> int:
    """How many ranks hold one replica of the trained model."""
    return _replica_size


def data_size() -> int:
    """Return the number of data-parallel ranks."""
    return world_size() // _replica_size


def init_process_group(device: str, timeout_s: float = 1800.0) -> None:
    """Join the group of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, if WORLD_SIZE is set.

    On one machine the ranks of a launcher meet in a folder that only this user can enter, instead of at a port.
    """
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        return
    missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set but {', '.join(missing)} is not: "
            "start ranks with a launcher (python -m arealite.launcher.local) or torchrun"
        )
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend, timeout = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timedelta(seconds=timeout_s)
    folder = os.environ.get(STORE_ENV)
    if folder is None:
        interface = interface_towards(os.environ["MASTER_ADDR"])
        if interface:
            # By default gloo listens on the address of the host name, which on many machines is a loopback address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        return dist.init_process_group(backend, timeout=timeout)
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A second group of the same processes must not find the keys of the first.
    store = dist.FileStore(f"{folder}/{next(_group_numbers)}", size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=timeout)


def init_single_group(device: str) -> None:
    """Make a group of this process alone, unless there is a group already."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks have called it; uses the host group."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with collective("barrier"):
            dist.all_reduce(torch.zeros(1), group=group)


def wait_for_first(timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """Wait for rank 0, longer than other collectives; raise `TimeoutError` after `timeout_s`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=timeout_s)
    group = group or dist.group.WORLD
    assert group is not None
    try:
        group.broadcast([torch.zeros(1)], options).wait()
    except RuntimeError as error:
        if GROUP_TIMED_OUT not in str(error):
            raise
        raise TimeoutError(str(error)) from error


def broadcast_json(obj: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return `obj` of rank `src` on every rank."""
    if world_size() == 1:
        return obj
    mine = rank() == src
    text = json.dumps(obj).encode() if mine else b""
    size = torch.tensor([len(text)])
    with collective(f"broadcast from rank {src}"):
        dist.broadcast(size, src, group)
        data = torch.frombuffer(bytearray(text or int(size)), dtype=torch.uint8)
        dist.broadcast(data, src, group)
    return obj if mine else json.loads(bytes(data.numpy()))


def all_gather_rows(value: torch.Tensor, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, int]:
    """Return the rows of all ranks in rank order, and the index of this rank's first row."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return value, 0
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    with collective("all-gather"):
        dist.all_gather(counts, torch.tensor([len(value)]), group)
        sizes = [int(c) for c in counts]
        padded = value.new_zeros(max(sizes), *value.shape[1:])
        padded[: len(value)] = value
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group)
    start = sum(sizes[: dist.get_rank(group)])
    return torch.cat([p[:n] for p, n in zip(parts, sizes, strict=True)]), start


def is_on_any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `flag` is true on at least one rank, the same on all."""
    return all_reduce_stats({"share": Stat(torch.tensor(float(flag)))}, group)["share"] > 0


def all_reduce_stats(stats: dict[str, Stat], group: dist.ProcessGroup | None = None) -> Stats:
    """Reduce each statistic over ranks to Σtotal / Σweight, `/max` and `/min` keys to the extreme.

    Every rank must pass the same keys. Statistics whose weights sum to zero are left out: nothing was measured.
    """
    if not stats:
        return {}
    sums = sorted(k for k in stats if not k.endswith(("/max", "/min")))
    signs = {k: -1.0 if k.endswith("/min") else 1.0 for k in sorted(set(stats) - set(sums))}
    numbers = [number for k in sums for number in stats[k]]
    numbers += [stats[k].total * sign for k, sign in signs.items()]
    flat = [torch.as_tensor(x, dtype=torch.float64).detach() for x in numbers]
    # One transfer to the host for all of them, because each synchronizes the device.
    device = next((x.device for x in flat if x.is_cuda), torch.device("cpu"))
    table = torch.stack([x.reshape(()).to(device) for x in flat]).cpu()
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        added, highest = table[: 2 * len(sums)], table[2 * len(sums) :].contiguous()
        with collective("all-reduce of statistics"):
            dist.all_reduce(added, dist.ReduceOp.SUM, group)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        table = torch.cat([added, highest])
    values = table.tolist()
    result = {k: values[2 * i] / values[2 * i + 1] for i, k in enumerate(sums) if values[2 * i + 1]}
    tops = zip(signs.items(), values[2 * len(sums) :], strict=True)
    return result | {k: sign * value for (k, sign), value in tops}
