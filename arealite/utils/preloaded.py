"""Imported by a fork server before it forks anything: takes over its owner's `sys.path`, script and a module (`child.fork_context`).

Python's own preloading forgets the script and `sys.path` before 3.12.8; every worker then imported the script, torch and all, anew.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
from multiprocessing import process, spawn

from arealite.utils.child import PRELOAD_ENV

if PRELOAD_ENV in os.environ:
    told = json.loads(os.environ.pop(PRELOAD_ENV))
    this_process = process.current_process()
    this_process._inheriting = True  # type: ignore[attr-defined]  # the script must not start processes while it is imported
    try:
        spawn.prepare(told)
        importlib.import_module(told["module"])
    except Exception:  # a script may raise anything; each worker does so again, and tells
        traceback.print_exc()
    finally:
        del this_process._inheriting  # type: ignore[attr-defined]
