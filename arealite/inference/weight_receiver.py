"""Weights by broadcast: the server's side of `/init_weights_update_group` and `/update_weights_from_distributed`.

Joining and receiving happen on threads; generation goes on meanwhile, and the new weights are swapped in between two steps. The last group joined is the
only one kept: a trainer that makes a new one has given the old one up.
"""

from __future__ import annotations

from typing import Any

from arealite.api.errors import RequestError, WeightUpdateError
from arealite.weights.process_group import WeightGroup, parse_specs

JOIN_TIMEOUT_S = 20.0
# A sender that dies closes its connections; only one that hangs is waited for this long.
TIMEOUT_S = 300.0


class WeightReceiver:
    """The group this server is in, if any. Methods block: call them on a thread."""

    def __init__(self) -> None:
        self._name = ""
        self._group: WeightGroup | None = None

    def join(self, body: dict[str, Any]) -> None:
        try:
            address, port = str(body["master_address"]), int(body["master_port"])
            rank, size = int(body["rank_offset"]), int(body["world_size"])
            name, backend = str(body["group_name"]), body.get("backend", "gloo")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RequestError(
                f"to join a group give master_address, master_port, rank_offset, world_size and group_name: {error!r}"
            ) from error
        if not (0 < port < 2**16 and 0 < rank < size):
            raise RequestError(
                f"no group has port {port}, rank_offset {rank} of world_size {size}: the sender is rank 0"
            )
        if backend != "gloo":
            raise RequestError(f"backend is {backend!r}; the embedded engine receives weights over gloo")
        self._group = None
        limits = {"join_timeout_s": JOIN_TIMEOUT_S, "timeout_s": TIMEOUT_S}
        try:
            self._group = WeightGroup(address, port, rank, size, name, **limits)
        except RuntimeError as error:
            cause = str(error).splitlines()[0]  # torch adds its stack
            raise WeightUpdateError(f"cannot join the group at {address}:{port}: {cause}") from error
        self._name = name

    def receive(self, body: dict[str, Any]) -> dict[str, Any]:
        group = self._group
        if group is None or body.get("group_name") != self._name:
            raise RequestError(f"this server is not in the group {body.get('group_name')!r}")
        try:
            specs = parse_specs(body.get("names"), body.get("dtypes"), body.get("shapes"))
        except (ValueError, TypeError) as error:
            raise RequestError(
                f"names, dtypes and shapes must list name, type and shape of each tensor: {error}"
            ) from error
        try:
            return group.receive(specs)
        except RuntimeError as error:
            if self._group is group:  # and no other was joined meanwhile
                self._group = None
            raise WeightUpdateError(f"the broadcast broke off: {error}. The old weights are still served") from error
