"""The embedded server's side of a broadcast: joins a process group and receives weights.

It serves `/init_weights_update_group` and `/update_weights_from_distributed`. Joining and receiving run on threads;
generation goes on meanwhile, and the new weights are swapped in between two steps. Only the last group is kept: a
trainer that forms a new one has dropped the old one.
"""

from typing import Any

from arealite.api.errors import RequestError, WeightUpdateError
from arealite.weights.layout import TensorLayout
from arealite.weights.process_group import RECEIVE_TIMEOUT_S, GroupSettings, WeightGroup
from arealite.weights.transport import Weights


class WeightReceiver:
    """The process group that this server has joined, if any. Methods block: call them on a thread."""

    def __init__(self) -> None:
        self._name = ""
        self._group: WeightGroup | None = None

    def join(self, body: dict[str, Any]) -> None:
        """Join the group that the body of `/init_weights_update_group` describes."""
        try:
            address, port = str(body["master_address"]), int(body["master_port"])
            rank, size = int(body["rank_offset"]), int(body["world_size"])
            settings = GroupSettings(address, port, size, rank, str(body["group_name"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                f"to join a group give master_address, master_port, rank_offset, world_size and group_name: {error!r}"
            ) from error
        if not (0 < port < 2**16 and 0 < rank < size):
            raise RequestError(
                f"no group has port {port}, rank_offset {rank} of world_size {size}: the sender is rank 0"
            )
        if body.get("backend", "gloo") != "gloo":
            raise RequestError(f"backend is {body['backend']!r}; the embedded engine receives weights over gloo")
        self._group = None
        try:
            self._group = WeightGroup(settings, rank, RECEIVE_TIMEOUT_S)
        except RuntimeError as error:
            # torch appends its stack to the first line.
            cause = str(error).splitlines()[0]
            raise WeightUpdateError(f"cannot join the group at {address}:{port}: {cause}") from error
        self._name = settings.group_name

    def receive(self, body: dict[str, Any], max_bytes: int) -> Weights:
        """Receive the tensors that the body of `/update_weights_from_distributed` lists."""
        group = self._group
        if group is None or body.get("group_name") != self._name:
            raise RequestError(f"this server is not in the group {body.get('group_name')!r}")
        try:
            layout = TensorLayout.from_lists(body.get("names"), body.get("dtypes"), body.get("shapes"))
            if layout.size_bytes > max_bytes:
                raise ValueError(f"they have {layout.size_bytes} bytes, this model at most {max_bytes}")
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise RequestError(
                f"names, dtypes and shapes must list name, dtype and shape of each tensor: {error}"
            ) from error
        try:
            return group.receive(layout)
        except RuntimeError as error:
            # Keep a group that was joined meanwhile.
            if self._group is group:
                self._group = None
            raise WeightUpdateError(f"the broadcast broke off: {error}. The old weights are still served") from error
