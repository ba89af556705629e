"""`OnlineWorkflow`: trains on sessions that agents start from outside, instead of rows.

An episode opens a group of `gconfig.n_samples` sessions and waits until others have used them, so that the executor
decides, as always, how far generation runs ahead. Agents start a session with the admin token, chat with the token of
the session, give it a reward and end it, or give it up. docs/agents.md describes the requests.
"""

import asyncio
import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from arealite.agents.export import to_batch
from arealite.agents.gateway import Gateway, OpenSession, SessionLimits
from arealite.agents.host import GatewayHost
from arealite.agents.requests import set_reward
from arealite.agents.session import Session
from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, RequestError
from arealite.api.io_struct import Batch
from arealite.api.workflow_api import RolloutWorkflow
from arealite.utils.console import show_message
from arealite.utils.http.server import flag, json_response, read_object
from arealite.utils.seeds import derive_seed
from arealite.utils.vision import VisionProcessor

logger = logging.getLogger("arealite.agents")
_MAX_NAME = 256


@dataclass(eq=False)
class _Group:
    """The sessions of one episode. `name` is the task that they share, once the first has started."""

    size: int
    done: asyncio.Future[None]
    seed: int | None
    name: str | None = None
    num_started: int = 0
    # Time of the event loop at which the group ends; set by its first session.
    deadline: float = math.inf
    timer: asyncio.TimerHandle | None = None
    open: set[str] = field(default_factory=set[str])
    ended: dict[int, Session] = field(default_factory=dict[int, Session])
    # Places of sessions that were given up, which others may take.
    given_up: list[int] = field(default_factory=list[int])

    @property
    def has_room(self) -> bool:
        return (self.num_started < self.size or bool(self.given_up)) and not self.done.done()

    @property
    def is_new(self) -> bool:
        return not self.open and not self.ended

    @property
    def next_number(self) -> int:
        return self.given_up[0] if self.given_up else self.num_started

    def take_place(self) -> None:
        """Count a session that was started with `next_number`."""
        if self.given_up:
            self.given_up.pop(0)
        else:
            self.num_started += 1

    def start_again(self) -> None:
        """Wait for the first session of any task again."""
        if self.timer is not None:
            self.timer.cancel()
        self.name, self.deadline, self.timer = None, math.inf, None

    def end(self) -> None:
        """End the group as it is; idempotent."""
        if not self.done.done():
            self.done.set_result(None)


class OnlineWorkflow(RolloutWorkflow):
    """Takes sessions from outside.

    `session_timeout_s` limits each session, and the time until a group is complete. `processor`: see `AgentWorkflow`.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        admin_token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        session_timeout_s: float = 600.0,
        turn_discount: float = 1.0,
        limits: SessionLimits | None = None,
        template_kwargs: dict[str, Any] | None = None,
        processor: VisionProcessor | str | None = None,
    ):
        if not admin_token:
            raise ConfigError("online mode needs an admin token: agents start sessions with it")
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self.session_timeout_s, self.turn_discount = session_timeout_s, turn_discount
        self.template_kwargs = template_kwargs or {}
        routes = {"/rl/sessions": self._start, "/rl/reward": self._reward, "/rl/end": self._end}
        processor = VisionProcessor.load(processor) if isinstance(processor, str) else processor
        tokenizer = tokenizer if processor is None else processor.tokenizer
        settings = {"host": host, "port": port, "limits": limits, "admin_token": admin_token, "processor": processor}
        self.host = GatewayHost(tokenizer=tokenizer, admin_routes=routes, on_end=self._finish, **settings)
        self._gateway: Gateway | None = None
        self._groups: list[_Group] = []
        self._group_of: dict[str, tuple[_Group, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError(
            "OnlineWorkflow cannot be copied or sent to rollout workers, as its gateway is one port in one process: "
            "set rollout.num_workers=0, and evaluate with another workflow"
        )

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Batch | None:
        gateway = await self.host.get(engine)
        if self._gateway is not gateway:
            self._gateway = gateway
            show_message(f"agents start sessions at http://{gateway.host}:{gateway.port}/rl/sessions")
        loop = asyncio.get_running_loop()
        group = _Group(self.gconfig.n_samples, loop.create_future(), data.get("seed"))
        self._groups.append(group)
        try:
            await group.done
        finally:
            self._groups.remove(group)
            for session_id in list(group.open):
                self._close(session_id)
        usable = {i: s for i, s in group.ended.items() if s.has_reward and any(r.tokens for r in s.replies.values())}
        # One sample of several has no other to be compared with.
        needed = min(2, group.size)
        if len(usable) >= needed:
            return to_batch(usable)
        logger.warning(
            "sessions%s are not trained on: %d started, %d ended with a reward, %d of these had an answer; at least %d "
            "of %d are needed. A session ends with /rl/end, within %g s",
            f" of the group {group.name!r}" if group.name else "", group.num_started, len(group.ended), len(usable),
            needed, group.size, self.session_timeout_s,
        )  # fmt: skip
        return None

    async def _start(self, request: web.Request) -> web.Response:
        """Start a session in the group of its task, or in one that waits for its first session."""
        body = await read_object(request)
        name = body.get("group")
        if not isinstance(name, str | None) or len(name or "") > _MAX_NAME:
            raise RequestError(f"group must name the task in at most {_MAX_NAME} characters, got {name!r:.60}")
        size = self.gconfig.n_samples
        if not name and size > 1:
            raise RequestError(f"{size} sessions at one task are compared with each other: name the task in `group`")
        free = [group for group in self._groups if group.has_room]
        own = next((group for group in free if group.name == name and not group.is_new), None) if name else None
        own = own or next((group for group in free if group.is_new), None)
        if own is None:
            raise web.HTTPServiceUnavailable(reason="the trainer has enough sessions for now: try again later")
        found = self._open(own)
        own.name = name
        answer = {
            "session": found.id,
            "api_key": found.token,
            # At the address that this client used: the gateway may listen on all of them.
            "base_url": f"http://{request.host}{urlsplit(found.base_url).path}",
            # Later sessions of a group end with it.
            "timeout_s": round(own.deadline - asyncio.get_running_loop().time(), 3),
        }
        return json_response(answer)

    def _open(self, group: _Group) -> OpenSession:
        assert self._gateway is not None
        number, is_first = group.next_number, group.is_new
        seed = None if group.seed is None else derive_seed(group.seed, number)
        gconfig = replace(self.gconfig, n_samples=1)
        found = self._gateway.open_session(gconfig, seed, self.turn_discount, self.template_kwargs)
        group.take_place()
        group.open.add(found.id)
        self._group_of[found.id] = group, number
        if is_first:
            loop = asyncio.get_running_loop()
            group.deadline = loop.time() + self.session_timeout_s
            group.timer = loop.call_at(group.deadline, group.end)
        return found

    async def _reward(self, request: web.Request) -> web.Response:
        """Take a reward from outside."""
        body = await read_object(request)
        set_reward(self._find(body).session, body)
        return json_response({"success": True})

    async def _end(self, request: web.Request) -> web.Response:
        """End a session from outside."""
        body = await read_object(request)
        self._finish(self._find(body), body)
        return json_response({"success": True})

    def _find(self, body: dict[str, Any]) -> OpenSession:
        assert self._gateway is not None
        name = body.get("session")
        found = self._gateway.sessions.get(name) if isinstance(name, str) else None
        if found is None:
            raise RequestError(f"there is no open session {name!r:.60}")
        return found

    def _finish(self, found: OpenSession, body: dict[str, Any]) -> None:
        """End a session with its rewards, of which the last one may come with the request, or give it up."""
        group, number = self._group_of[found.id]
        if flag(body, "give_up"):
            group.given_up.append(number)
            self._close(found.id)
            if group.is_new:
                group.start_again()
            return
        if "reward" in body:
            set_reward(found.session, body)
        if not found.session.has_reward:
            raise RequestError('the session has no reward: send one with it, or before, or give it up: "give_up": true')
        group.ended[number] = found.session
        self._close(found.id)

    def _close(self, session_id: str) -> None:
        """Close a session that has ended or expired; idempotent."""
        group, _ = self._group_of.pop(session_id, (None, 0))
        if group is None or self._gateway is None:
            return
        self._gateway.close_session(session_id)
        group.open.discard(session_id)
        if not group.has_room and not group.open:
            group.end()
