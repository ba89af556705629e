"""Imported by the fork server: imports and prepares the owner's script and one module, for workers.

`process_pool.fork_context` selects it. Python's own preloading ignores the script and `sys.path` before 3.12.8, so
every worker would import the script, and torch with it, again.
"""

import importlib
import importlib.machinery
import json
import os
import sys
import traceback
from multiprocessing import process, spawn
from typing import Any

from arealite.utils.pools.process_pool import PRELOAD_ENV, run_preparations


def skip_script(settings: dict[str, Any]) -> None:
    """Make workers believe that the script is imported already: `spawn` compares its path or name."""
    main, name = sys.modules["__main__"], settings.pop("init_main_from_name", None)
    main.__file__ = settings.pop("init_main_from_path", None)
    if name is not None:
        main.__spec__ = importlib.machinery.ModuleSpec(name, None)


if PRELOAD_ENV in os.environ:
    settings = json.loads(os.environ.pop(PRELOAD_ENV))
    this_process = process.current_process()
    # The script must not start processes while it is imported.
    this_process._inheriting = True  # type: ignore[attr-defined]
    try:
        if not settings["imports_script"]:
            skip_script(settings)
        spawn.prepare(settings)
        importlib.import_module(settings["module"])
        run_preparations()
    # A script may raise anything. Each worker imports it again and reports the error.
    except Exception:
        traceback.print_exc()
    finally:
        del this_process._inheriting  # type: ignore[attr-defined]
