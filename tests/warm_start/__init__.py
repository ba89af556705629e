"""The environment in which programs that import torch start as forks; see `sitecustomize.py`."""

import os
from pathlib import Path

from tests import warm_python


def environment() -> dict[str, str]:
    """Return the variables for a program whose children start as forks."""
    warm_python.prepare()
    folders = [str(Path(__file__).parent), str(warm_python.ROOT), os.environ.get("PYTHONPATH", "")]
    name = warm_python.ADDRESS_ENV
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders)), name: os.environ[name]}
