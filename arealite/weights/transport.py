"""The contract of a transport: one way for weights to travel from a trainer to inference servers.

Five implementations: `disk`, `host_memory`, `device_memory`, `process_group` and `stream`; `sync.make_transport`
chooses one. A transport meets the other parts through three small protocols: `WeightOwner` (the trainer's engine),
`WeightClient` (of one kind of server) and `WeightServer`.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from arealite.api.errors import HttpError, WeightUpdateError
from arealite.api.io_struct import WeightUpdateMeta
from arealite.weights.fingerprint import Fingerprints, first_mismatch
from arealite.weights.layout import TensorLayout

Weights = dict[str, torch.Tensor]
# Name of a tensor, its whole shape, where the shard of a rank begins, and the shard.
Shard = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]


class WeightOwner(Protocol):
    """A train engine. All ranks call these methods together."""

    def empty_weights(self) -> Weights:
        """Return the tensors that `gather_weights` yields, on the `meta` device: without values."""
        ...

    def gather_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each full tensor in turn. It is valid until the next one."""
        ...

    def local_weights(self) -> Iterator[Shard]:
        """Yield what this rank holds of each tensor, in turn. A shard is valid until the next one."""
        ...

    def save_weights(self, path: str, *, adapter_only: bool) -> None:
        """Write a Hugging Face folder, or a PEFT folder with the adapter alone."""
        ...


class WeightServer(Protocol):
    """One inference server, as a transport sees it."""

    @property
    def address(self) -> str: ...
    @property
    def num_ranks(self) -> int: ...
    @property
    def receives_on_gpu(self) -> bool: ...


S = TypeVar("S", bound=WeightServer, contravariant=True)
T = TypeVar("T", bound=WeightServer)


class WeightClient(Protocol[S]):
    """Asks one server to load weights. Raises `HttpError` for an error status."""

    @abc.abstractmethod
    async def load_folder(self, server: S, meta: WeightUpdateMeta) -> None:
        """Have the server load the Hugging Face folder `meta.path`."""

    @abc.abstractmethod
    async def load_adapter(self, server: S, meta: WeightUpdateMeta) -> None:
        """Have the server use the LoRA adapter in the PEFT folder `meta.path`."""

    @abc.abstractmethod
    async def load_segment(self, server: S, meta: WeightUpdateMeta) -> None:
        """Have the server load the shared memory `meta.path`."""

    @abc.abstractmethod
    async def join_group(self, server: S, settings: dict[str, Any]) -> None:
        """Have the server join the process group over which weights are broadcast."""

    @abc.abstractmethod
    async def receive(self, server: S, meta: WeightUpdateMeta, group: str, portions: Sequence[TensorLayout]) -> None:
        """Have the server receive these portions, in this order, over the process group."""

    @abc.abstractmethod
    async def load_stream(self, server: S, meta: WeightUpdateMeta, order: dict[str, Any]) -> None:
        """Have the server pull its parts from the trainer's ranks or another server, as `order` says."""


class Transport(abc.ABC):
    """Weights at one place (`path`): a trainer publishes them there, readers open or load them."""

    # Published tensors exist only inside the trainer's process: readers elsewhere receive them.
    is_in_process: ClassVar[bool] = False

    def __init__(self, path: str):
        self.path = path
        # Published tensors, read once for all servers.
        self._opened: tuple[WeightUpdateMeta, Weights] | None = None

    @abc.abstractmethod
    def publish(self, owner: WeightOwner, meta: WeightUpdateMeta) -> None:
        """Make the current weights of `owner` available. Called by all ranks."""

    def probe(self, read: Callable[[str], list[str]]) -> str:
        """Return why a reader cannot open what this process publishes; empty if all can.

        `read(path)` returns what each reader finds in a probe at `path`.
        """
        return ""

    def versioned(self, meta: WeightUpdateMeta) -> WeightUpdateMeta:
        """Return where this version is published."""
        return meta

    def remove_old(self, published: WeightUpdateMeta) -> None:
        """Remove earlier versions, once all servers hold `published`."""

    def close(self) -> None:
        """Remove what this transport has published and release what it holds; idempotent."""

    @abc.abstractmethod
    def open(self, meta: WeightUpdateMeta) -> Weights:
        """Return the published tensors by name; mapped, not copied, where possible."""

    def first_mismatch(self, meta: WeightUpdateMeta, held: Fingerprints) -> str | None:
        """Return the name of a tensor in which a server differs from what was published; None if all agree."""
        if self._opened is None or self._opened[0] != meta:
            self._opened = (meta, self.open(meta))
        return first_mismatch(self._opened[1], held)

    def stats(self) -> dict[str, float]:
        """Return statistics of the last update (rank 0)."""
        return {}

    # The following methods run on the trainer's rank 0, which talks to servers.

    def begin(self) -> bool:
        """Prepare for servers to load while the trainer still publishes; return False if impossible."""
        return False

    def forget_read(self) -> None:
        """Forget what was read of an earlier update: the same version may have been published again."""
        self._opened = None

    async def connect(self, client: WeightClient[T], servers: Sequence[T]) -> None:
        """Prepare for these servers to load together."""

    async def load(self, client: WeightClient[T], server: T, meta: WeightUpdateMeta) -> None:
        """Have one server load the published weights.

        Raises `WeightUpdateError` if the server refuses the weights, `ServerError` if the server itself fails.
        """
        try:
            await self._load(client, server, meta)
        except HttpError as error:
            # 503: the server is being stopped; 409: it was restarted, or somebody else has changed its weights. The new
            # weights are not to blame.
            if error.status in (409, 503):
                raise
            raise WeightUpdateError(f"{server.address} refused version {meta.version}: {error.text}") from None

    @abc.abstractmethod
    async def _load(self, client: WeightClient[T], server: T, meta: WeightUpdateMeta) -> None: ...
