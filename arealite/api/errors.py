"""Errors that are meant for people: what happened, what was given, what to do.

Everything a user can cause (a bad config, a missing file, a server that died) is raised as one of these, so
that launchers and command lines can print the message without a traceback. Bugs stay ordinary exceptions.
"""


class AReaLiteError(Exception):
    """Base of all errors with a message for the user."""


class ConfigError(AReaLiteError, ValueError):
    """The configuration cannot work; raised before anything is started."""


class AllocationError(ConfigError):
    """`allocation_mode` is malformed or does not fit the devices."""


class DatasetError(AReaLiteError, ValueError):
    """A dataset is missing, empty, too small, or lacks a column."""


class ServerError(AReaLiteError, RuntimeError):
    """An inference server refused a request, died, or cannot be reached."""


class RequestError(AReaLiteError, ValueError):
    """One generation request is invalid (too long, unknown token, absurd sampling value)."""


class RewardError(AReaLiteError, RuntimeError):
    """A reward function raised, returned no finite number, ran past its deadline, or killed its worker."""


class WeightUpdateError(AReaLiteError, RuntimeError):
    """New weights do not fit the model; the old ones are still in use."""


class WaitTimeout(AReaLiteError, TimeoutError):
    """A named wait ran past its deadline: the message says what waits for what, and since when."""


class TrainingError(AReaLiteError, RuntimeError):
    """Training cannot go on (repeated non-finite gradients, a batch without trained tokens)."""


class CheckpointError(AReaLiteError, RuntimeError):
    """A checkpoint could not be written or read; earlier ones are untouched."""
