"""How servers and a trainer slow each other down on the cores of one machine. Pure arithmetic.

Each of them needs a number of cores to run at full speed. While all that are active need more cores than there are,
each gets the same share of what it needs, and loses time by switching. Besides, the trainer's process also runs the
episodes (tokenization, HTTP, workflows): a Python interpreter runs one thread at a time, so that these take time from
the trainer on any number of cores. Used by the re-run of a recording (`rerun`) and by `arealite plan`.
"""

from typing import NamedTuple

# Processes that take turns on a core lose their caches and need up to this share more CPU seconds. The full share is
# reached when the needed cores exceed those that are there by `_CROWDED` of them (docs/foresee.md, Shared cores).
_SWITCHING, _CROWDED = 0.15, 0.5


class Speeds(NamedTuple):
    """Speeds relative to those of an engine or trainer that is alone on the machine."""

    server: float
    trainer: float


class CoreUse(NamedTuple):
    """The cores of a machine, and what an active server and a rank of the trainer need of them.

    `server`: CPU seconds of a server's process for each CPU second of its engine's thread. `trainer`: CPU seconds of a
    rank for each second in which it works.
    """

    cores: float
    server: float = 1.0
    trainer: float = 1.0
    num_ranks: int = 1
    # CPU seconds for each generated token in the process of the first rank, which runs the episodes.
    token_s: float = 0.0

    def speeds(self, num_servers: int, tokens_per_s: float, trainer_works: bool) -> Speeds:
        """Return the speeds while so many servers are active, and the trainer works or waits.

        `tokens_per_s` is what all servers would generate at full speed.
        """
        share, engine, left = self._shares(num_servers, tokens_per_s, trainer_works)
        share /= _switching(share)
        return Speeds(share * engine, share * left)

    def switching(self, num_servers: int, tokens_per_s: float, trainer_works: bool) -> float:
        """Return by which factor work needs more CPU seconds meanwhile than alone."""
        return _switching(self._shares(num_servers, tokens_per_s, trainer_works)[0])

    def _shares(self, num_servers: int, tokens_per_s: float, trainer_works: bool) -> tuple[float, float, float]:
        """Return the share of cores for all, and what interpreters leave to an engine and to the trainer."""
        # Threads of a server besides its engine (HTTP, JSON) run while the engine waits for the interpreter.
        has_one_core = self.server < 2
        engine = 1 / self.server if has_one_core else 1.0
        episodes = min(1.0, self.token_s * tokens_per_s * engine)
        # What the interpreter leaves to the first rank, for which the others wait. A trainer that keeps two cores busy
        # computes outside of the interpreter.
        left = 1.0 if self.trainer >= 2 else max(0.1, 1 - episodes)
        need = (1.0 if has_one_core else self.server) * num_servers + episodes
        if trainer_works:
            need += self.num_ranks * self.trainer * left
        return min(1.0, self.cores / need) if need else 1.0, engine, left


def _switching(share: float) -> float:
    return 1 + _SWITCHING * min(1.0, (1 / share - 1) / _CROWDED)
