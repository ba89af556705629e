"""Statistics of a step from the servers' own counters. Used by `Run`."""

import logging
import time

from arealite.api.errors import WaitTimeout
from arealite.engine.remote.collecting import CollectingEngine

logger = logging.getLogger("arealite.run")


class ServerCounters:
    """Idle time, prefix hits and accepted drafts from the servers' own counters.

    Empty if they have none. Asks at most once a second, so that short steps do not wait for responses.
    """

    def __init__(self, rollout: CollectingEngine | None):
        self.rollout = rollout
        self._asked_at = -1.0
        self._counts: dict[str, float] = {}
        self._last: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """Return `idle/server` and the rates since the last request to the servers."""
        now = time.monotonic()
        if self.rollout is None or now - self._asked_at < 1.0:
            return self._last
        try:
            infos = [info for info in self.rollout.server_info() if "busy_s" in info]
        # A workflow may block the event loop; that is no reason to stop.
        except WaitTimeout as error:
            logger.warning("idle/server is not known: %s", error)
            infos = []
        names = ("busy_s", "prompt_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens")
        counts = {name: sum(info.get(name, 0) for info in infos) / len(infos) for name in names} if infos else {}
        if counts and self._counts:
            busy_s, prompt, cached, drafted, accepted = (counts[name] - self._counts[name] for name in names)
            self._last = {"idle/server": min(1.0, max(0.0, 1 - busy_s / (now - self._asked_at)))}
            # Counters of servers that joined or left may differ; a step without new prompts has no rate.
            if prompt > 0 and 0 <= cached <= prompt:
                self._last["rollout/prefix_hit_rate"] = cached / prompt
            if drafted > 0 and 0 <= accepted <= drafted:
                self._last["rollout/draft_acceptance_rate"] = accepted / drafted
        self._asked_at, self._counts = now, counts
        return self._last
