"""The contract of reward functions: one completion in, one number out.

A reward is a plain top-level function (so that a worker process can import it):

    def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data) -> float

`data` holds the columns of the dataset row. The function runs in a pool of processes with a deadline: if it hangs or
crashes, only its own episode fails. Make a function that waits for a remote service a coroutine function
(`async def reward(…)`): it is awaited on the event loop, any number at the same time, and needs no process.
"""

from collections.abc import Awaitable
from typing import Any, Protocol


class RewardFn(Protocol):
    """A function, or coroutine function, that scores one completion."""

    def __call__(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
    ) -> float | Awaitable[float]: ...
