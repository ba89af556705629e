"""A type checker, and so an editor, finds the code behind every engine call of the example script."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "arealite" / "gsm8k_grpo.py"
# Expressions in the script's loop, and the types that pyright must find for them. None of them is Any or Unknown.
TYPES = {
    "remote_engine_class(config.allocation_mode)": "type[RemoteEngine]",
    "actor": "FSDPPPOActor",
    "actor.compute_logp": "(batch: dict[str, Tensor]) -> Tensor",
    "actor.compute_advantages": "(batch: dict[str, Tensor]) -> None",
    "actor.ppo_update": "(batch: dict[str, Tensor]) -> list[dict[str, float]]",
    "actor.step_lr_scheduler": "() -> None",
    "ref": "FSDPEngine | None",
    "rollout": "RemoteEngine",
    "rollout.prepare_batch": (
        "(dataloader: Iterable[list[dict[str, Any]]], workflow: RolloutWorkflow) -> dict[str, Tensor]"
    ),
    "batch": "dict[str, Tensor]",
    "stats": "list[dict[str, float]]",
    "run": "Run",
    "weights.with_version": "(version: int) -> WeightUpdateMeta",
}


@pytest.mark.slow
def test_engines_of_the_example_have_types(tmp_path):
    lines = SCRIPT.read_text().splitlines()
    last = next(i for i, line in enumerate(lines) if line.strip().startswith("run.commit("))
    indent = lines[last][: -len(lines[last].lstrip())]
    lines[last + 1 : last + 1] = [f"{indent}reveal_type({expression})" for expression in TYPES]
    (tmp_path / "script.py").write_text("\n".join(lines) + "\n")
    # Reading the 3,000 files of transformers would take most of the time, and no engine's type needs them.
    stub = tmp_path / "typings" / "transformers" / "__init__.pyi"
    stub.parent.mkdir(parents=True)
    stub.write_text("def __getattr__(name: str): ...\n")
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps({"include": ["script.py"], "extraPaths": [str(ROOT)], "stubPath": "typings"}))
    command = [sys.executable, "-m", "pyright", "-p", str(config), "--pythonpath", sys.executable, "--outputjson"]
    output = subprocess.run(command, capture_output=True, text=True)
    if not output.stdout.startswith("{"):
        pytest.skip(f"pyright cannot start here: {(output.stdout + output.stderr).strip()[-200:]}")
    found = json.loads(output.stdout)["generalDiagnostics"]
    errors = [f"{d['range']['start']['line'] + 1}: {d['message']}" for d in found if d["severity"] == "error"]
    assert not errors, errors
    revealed = [d["message"] for d in found if d["severity"] == "information"]
    assert revealed == [f'Type of "{expression}" is "{kind}"' for expression, kind in TYPES.items()]
