"""Rewards that misbehave in every way a user's may. Importable by worker processes."""

import os
import time


def length(completion, **data):
    return float(len(completion))


def raises(completion, **data):
    raise KeyError("no such column")


def never_returns(completion, **data):
    time.sleep(3600)


def crashes(completion, **data):
    os.abort()


def exits(completion, **data):
    os._exit(7)


def returns_text(completion, **data):
    return "good"


def returns_nan(completion, **data):
    return float("nan")


def own_pid(completion, **data):
    return float(os.getpid())
