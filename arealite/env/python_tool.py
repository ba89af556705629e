"""`python`: a tool that runs the model's Python code in the sandbox, for `ToolWorkflow`."""

from arealite.reward.sandbox import run_python

TIMEOUT_S = 8.0


def python(code: str) -> str:
    """Run Python code and return what it prints. Every call starts anew."""
    result = run_python(code, timeout_s=TIMEOUT_S)
    parts = [result.stdout.strip(), result.stderr.strip()]
    if result.stopped_by is not None:
        parts.append(f"[stopped: {result.stopped_by}]")
    return "\n".join(part for part in parts if part) or "[the code printed nothing]"
