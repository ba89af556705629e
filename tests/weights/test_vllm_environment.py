"""What runs inside vLLM's process imports only packages that vLLM's environment has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("omegaconf", "math_verify", "rich", "peft", "orjson", "psutil"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import arealite.engine.remote.vllm_auth
import arealite.engine.remote.vllm_extension
"""


def test_vllm_extension_needs_no_package_that_vllm_does_not_install():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
