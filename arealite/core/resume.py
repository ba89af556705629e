"""`ResumeState`: which episodes have ended, so that a restarted run handles every row exactly once.

`WorkflowExecutor` takes episode numbers and its stream of rows from here, on the trainer's thread. A recover checkpoint
stores `state_dict`; after `load_state_dict` rows that have ended are skipped, and `to_submit_again` lists the calls of
`submit` that the caller has to repeat, because only the caller has their rows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any

from arealite.api.errors import TrainingError
from arealite.core.episode import Episode, EpisodeId
from arealite.core.row_stream import RowStream

logger = logging.getLogger("arealite.executor")


class EndedNumbers:
    """The episodes of one source that have ended: all numbers below `position`, and those in `done`."""

    def __init__(self, position: int = 0, done: Iterable[int] = ()):
        self.position = position
        self.done = set(done)

    @classmethod
    def all_but(cls, next_number: int, unfinished: set[int], known_done: Collection[int] = ()) -> EndedNumbers:
        """All numbers below `next_number` and those in `known_done`, except the `unfinished` ones."""
        position = min({next_number, *unfinished})
        done = {*range(position, next_number), *known_done} - unfinished
        return cls(position, (i for i in done if i >= position))

    def __contains__(self, number: int) -> bool:
        return number < self.position or number in self.done

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "done": sorted(self.done)}


class ResumeState:
    """Numbers episodes, and stores and restores which of them have ended."""

    def __init__(self) -> None:
        self.is_new_run = True
        self._is_resumed = False
        self.num_submitted = 0
        self.num_direct = 0
        # Calls of `submit`, counted from 0 over the whole run, that the caller must repeat after a resume.
        self.to_submit_again: list[int] = []
        self._stream: RowStream | None = None
        # The position in the stream of the first row of the dataloader, and which rows are skipped.
        self._first_position = 0
        self._streamed = EndedNumbers()
        self._submitted = EndedNumbers()

    def next_submitted(self) -> EpisodeId:
        self.num_submitted += 1
        return EpisodeId("submitted", self.num_submitted - 1)

    def next_direct(self) -> EpisodeId:
        self.num_direct += 1
        return EpisodeId("direct", self.num_direct - 1)

    def open_stream(self, dataloader: Iterable[list[dict[str, Any]]]) -> RowStream:
        """Return the stream of rows of this dataloader, after a resume at the checkpoint's position."""
        if self._stream is None:
            self._stream = RowStream(dataloader, self._first_position)
            if self._is_resumed:
                # Also at position 0: the dataloader itself was restored to a later row.
                self._stream.seek(self._streamed.position, self._streamed.done)
        elif self._stream.dataloader is not dataloader:
            self._stream = RowStream(dataloader, self._stream.position)
        return self._stream

    def report(self, episode: Episode) -> None:
        """Tell a dataloader that chooses rows by their pass rate how an episode of the stream ended.

        One that was rejected without its rewards tells nothing.
        """
        if self._stream is None or not self._stream.wants_results or episode.id.source != "stream":
            return
        if (rate := episode.pass_rate) is not None:
            self._stream.report(episode.id.number, rate)

    def state_dict(self, unfinished: Iterable[EpisodeId]) -> dict[str, Any]:
        """Return the state as JSON. `unfinished` are the queued, running and buffered episodes."""
        numbers: dict[str, set[int]] = {"stream": set(), "submitted": set(), "direct": set()}
        for episode_id in unfinished:
            numbers[episode_id.source].add(episode_id.number)
        first, position = self._first_position, self._streamed.position
        if self._stream is not None:
            first, position = self._stream.first_position, self._stream.position
        streamed = EndedNumbers.all_but(position, numbers["stream"], self._streamed.done)
        submitted = EndedNumbers.all_but(self.num_submitted, numbers["submitted"])
        return {
            "stream_start": first,
            **streamed.state_dict(),
            "submitted": {"count": self.num_submitted, **submitted.state_dict()},
            "num_direct": self.num_direct,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`. Call `skip_buffered` once the buffered episodes are known."""
        if not self.is_new_run:
            raise TrainingError("call load_state_dict before the first episode")
        self.is_new_run, self._is_resumed = False, True
        self._first_position = state["stream_start"]
        self._streamed = EndedNumbers(state["position"], state["done"])
        submitted = state["submitted"]
        self._submitted = EndedNumbers(submitted["position"], submitted["done"])
        self.num_submitted, self.num_direct = submitted["count"], state["num_direct"]

    def has_ended(self, episode_id: EpisodeId) -> bool:
        """Whether an episode had ended at the checkpoint."""
        if episode_id.source == "direct":
            return episode_id.number < self.num_direct
        return episode_id.number in (self._streamed if episode_id.source == "stream" else self._submitted)

    def skip_buffered(self, buffered: Iterable[EpisodeId]) -> None:
        """Do not run buffered episodes again, and list the submitted ones that the caller must submit again."""
        for episode_id in buffered:
            (self._streamed if episode_id.source == "stream" else self._submitted).done.add(episode_id.number)
        numbers = range(self._submitted.position, self.num_submitted)
        self.to_submit_again = [i for i in numbers if i not in self._submitted]
        if self.to_submit_again:
            logger.warning(
                "%d submitted episodes had not ended at the checkpoint. Only the caller has their rows: submit them "
                "again (calls of submit, counted from 0: %s; all of them are in executor.to_submit_again)",
                len(self.to_submit_again),
                self.to_submit_again[:8],
            )
