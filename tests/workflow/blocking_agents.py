"""Agents that block, in a module of their own: worker processes import it, and nothing else, before they run them."""

import contextlib
import json
import os
import threading
import urllib.request
from pathlib import Path


def some_hang(row, base_url, api_key):
    """A blocking agent. Its first three attempts never return: one computes, one waits, one ends its process."""
    for number in range(100):
        with contextlib.suppress(FileExistsError):
            Path(row["folder"], str(number)).touch(exist_ok=False)
            break
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"messages": [{"role": "user", "content": "on"}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, head), timeout=30):
        pass
    if number == 0:
        while True:
            pass
    if number == 1:
        threading.Event().wait()
    if number == 2:
        os._exit(7)
    return float(os.getpid() != row["pid"])


def all_hang(row, base_url, api_key):
    threading.Event().wait()
