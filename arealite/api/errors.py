"""Errors with a message for the user: what happened, what was given, what to do.

Launchers and command lines print the message of these errors without a traceback: a bad config, a missing file, a
server that died. Bugs stay ordinary exceptions.
"""


class AReaLiteError(Exception):
    """Base class of errors with a message for the user."""


class ConfigError(AReaLiteError, ValueError):
    """The configuration cannot work; raised before anything is started."""


class AllocationError(ConfigError):
    """`allocation_mode` is malformed or does not fit the devices."""


class DatasetError(AReaLiteError, ValueError):
    """A dataset is missing, empty, too small, or lacks a column."""


class ServerError(AReaLiteError, RuntimeError):
    """An inference server refused a request, died, or cannot be reached."""


class HttpError(ServerError):
    """A server answered with an error status."""

    def __init__(self, url: str, status: int, text: str):
        super().__init__(f"{url} answered {status}: {text[:2000]}")
        self.status = status
        self.text = text

    @property
    def is_refusal(self) -> bool:
        """Whether the request itself is wrong: no other server would accept it either."""
        return 400 <= self.status < 500 and self.status not in (401, 403, 408, 425, 429)


class RequestError(AReaLiteError, ValueError):
    """One generation request is invalid (too long, unknown token, sampling value out of range)."""


class RewardError(AReaLiteError, RuntimeError):
    """A reward function raised, returned no finite number, missed its deadline, or killed its worker."""


class SandboxError(RewardError):
    """This machine cannot isolate code that a model wrote, or only less than was asked for."""


class WeightUpdateError(AReaLiteError, RuntimeError):
    """New weights do not fit the model; the old ones are still in use."""


class WaitTimeout(AReaLiteError, TimeoutError):
    """A wait missed its deadline: the message says what waits for what, and since when."""


class TrainingError(AReaLiteError, RuntimeError):
    """Training cannot continue (repeated non-finite gradients, a batch without trained tokens)."""


class NoResultError(TrainingError):
    """Not one of several episodes gave a result: all have failed or were rejected."""


class CollapseError(AReaLiteError, RuntimeError):
    """The policy has collapsed, and `on_collapse` says to stop or rolling back did not help."""


class CheckpointError(AReaLiteError, RuntimeError):
    """A checkpoint could not be written or read; earlier ones are untouched."""


class RecordError(AReaLiteError, RuntimeError):
    """The record of a run is missing, damaged, or does not have what a replay needs."""
