"""What a reward function promises: the rows of one group in, one number per row out.

A reward is a plain top-level function (so that a worker process can import it):

    def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data) -> float

`data` holds the columns of the dataset row. It runs in a pool of processes with a deadline, so it may be slow, hang or crash
without harming anything but its own episode. One that only waits for something remote is better a coroutine
function (`async def reward(…)`): it is awaited on the event loop, any number at once, and takes no process.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class RewardFn(Protocol):
    def __call__(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float | Awaitable[float]: ...
