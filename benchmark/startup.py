"""Where the seconds of a start go, in a trainer rank and in an embedded server alone. Prints a table and a JSON line.

    python benchmark/startup.py MODEL [--device cuda] [--profile]

Each part starts twice, in new processes: with an empty cache of compiled code, and with that of the first start. Time
runs from the start of the process. `benchmark/launch.py` measures a whole run, in which both start side by side.
`--profile` adds the longest parts of compiling, as torch counts them (they contain each other).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EXAMPLES = ROOT / "examples" / "arealite"
MAX_TOKENS = 32768


def start_trainer(model: str, device: str) -> Iterator[str]:
    """Yield the name of each part when it is done."""
    sys.path.insert(0, str(EXAMPLES))
    script = importlib.import_module("gsm8k_grpo")
    args = importlib.import_module("arealite.api.cli_args")
    spec = importlib.import_module("arealite.api.io_struct").FinetuneSpec(1, 64, 64)
    yield "imports"
    script.load_tokenizer(model)
    yield "tokenizer"
    config = args.PPOActorConfig(path=model, device=device, compile=device == "cuda", optimizer=args.OptimizerConfig())
    actor = script.FSDPPPOActor(config)
    actor.initialize(spec)
    yield "load"
    if device == "cuda":
        actor.compile_first_layers()
        synchronize()
        yield "compile"
    for part in ("trial", "second trial"):
        actor.run_trial(min(actor.memory.max_tokens_per_mb, MAX_TOKENS if device == "cuda" else 256))
        synchronize()
        yield part


def start_server(model: str, device: str) -> Iterator[str]:
    """Yield the name of each part when it is done."""
    importlib.import_module("arealite.cli.server")
    args = importlib.import_module("arealite.api.cli_args")
    loading = importlib.import_module("arealite.inference.loading")
    core = importlib.import_module("arealite.inference.core")
    weights = importlib.import_module("arealite.inference.weights")
    yield "imports"
    config = args.ServerConfig(model_path=model, device=device, mem_fraction=0.4, block_size=16)
    served = weights.ServedWeights(*loading.load_model(config))
    synchronize()
    yield "load"
    tokenizer = loading.load_tokenizer(model)
    yield "tokenizer"
    engine = core.EngineCore(config, served, tokenizer)
    synchronize()
    yield "cache"
    engine.attach()
    synchronize()
    yield "graphs"


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_part(options: argparse.Namespace) -> None:
    """In a child process: print the seconds of each part as a JSON line."""
    seconds, last = {}, psutil.Process().create_time()
    for name in (start_trainer if options.part == "trainer" else start_server)(options.model, options.device):
        seconds[name], last = time.time() - last, time.time()
    times = importlib.import_module("torch._dynamo.utils").compilation_time_metrics if options.profile else {}
    longest = sorted(((sum(took), name) for name, took in times.items()), reverse=True)[:25]
    print(json.dumps({"seconds": seconds, "compiling": {name: round(took, 2) for took, name in longest}}))


def measure(options: argparse.Namespace, part: str, caches: Path) -> dict:
    """Start a part in a process of its own and return what it prints."""
    command = [sys.executable, __file__, options.model, "--device", options.device, "--part", part]
    command += ["--profile"] if options.profile else []
    folders = {name: str(caches / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    result = subprocess.run(command, env={**os.environ, **folders}, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{part} failed:\n{result.stdout}{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="show what compiling consists of")
    parser.add_argument("--part", choices=("trainer", "server"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return run_part(options)
    common = importlib.import_module("benchmark.common")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in ("trainer", "server"):
            for start in ("empty cache", "second start"):
                results[f"{part}, {start}"] = measure(options, part, Path(folder) / part)
    for name, result in results.items():
        seconds = result["seconds"]
        print(f"\n{name}: {sum(seconds.values()):.1f} s")
        common.print_table(list(seconds), [[f"{took:.1f}" for took in seconds.values()]])
        for part, took in result["compiling"].items():
            print(f"  {took:7.2f}  {part}")
    print(
        json.dumps({"benchmark": "startup", "device": options.device, **common.describe_machine(), "results": results})
    )


if __name__ == "__main__":
    main()
