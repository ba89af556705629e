"""Duration of a weight update by each transport, compared with a plain memory copy, and the pause in generation.

    python benchmark/weight_update.py [--hidden 1024] [--layers 12] [--repeats 5] [--device cuda] [--servers 1]
    python benchmark/weight_update.py --changes MODEL [--lr 1e-6]

A training engine publishes weights, a real server in another process loads them while it generates, and fingerprints
are compared. `publish` and most of `load` run while generation continues; a broadcast loads while it publishes.
`pause` is the longest time without a token during an update, less the usual time of a token. An update needs two
copies, out of the trainer and into the server; the last column divides its duration by that of two plain copies. On
CUDA (bfloat16, trainer and server on one GPU) shared memory is measured through the host (`shm`) and on the device
(`ipc`). Before each update 1% of the elements change, so that `delta` has something to send. `--changes` trains a
model in float32 with AdamW instead, and prints which share of the elements of the published copy each step changes,
and how large the changes are when they are encoded. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import torch
from common import describe_machine, print_table
from transformers import Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from arealite.api.cli_args import InferenceEngineConfig, OptimizerConfig, TrainEngineConfig  # noqa: E402
from arealite.api.io_struct import FinetuneSpec, WeightUpdateMeta  # noqa: E402
from arealite.engine.fsdp_engine import FSDPEngine  # noqa: E402
from arealite.engine.sft.lm_engine import FSDPLMEngine  # noqa: E402
from arealite.engine.sglang_remote import RemoteSGLangEngine  # noqa: E402
from arealite.weights.stream.pieces import bits, encode_changes  # noqa: E402
from tests.server_process import server_process  # noqa: E402


class Stream(threading.Thread):
    """Reads a stream of generated tokens and records the time of each."""

    def __init__(self, address: str):
        super().__init__(daemon=True)
        self.ended, self.is_steady = threading.Event(), threading.Event()
        params = {"max_new_tokens": 2000, "ignore_eos": True}
        body = {"input_ids": [5] * 8, "sampling_params": params, "stream": True}
        headers = {"Content-Type": "application/json"}
        self.request = urllib.request.Request(f"http://{address}/generate", json.dumps(body).encode(), headers)
        self.times: list[float] = []

    def run(self) -> None:
        # On a GPU one request ends before the updates do: send another.
        while not self.ended.is_set():
            with urllib.request.urlopen(self.request, timeout=600) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        self.times.append(time.perf_counter())
                    if len(self.times) > 1:
                        self.is_steady.set()
                    if self.ended.is_set():
                        break

    def longest_gap(self, begin: float, end: float) -> float:
        """Longest time without a token between two moments, less the usual time of a token."""
        gaps = [(b, b - a) for a, b in itertools.pairwise(self.times)]
        usual = statistics.median(gap for _, gap in gaps)
        inside = [gap for when, gap in gaps if begin <= when and when - gap <= end]
        return max([0.0, *(gap - usual for gap in inside)])


def make_model(folder: Path, hidden: int, layers: int, dtype: torch.dtype) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=4096,
        tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    return model


def copy_seconds(weights: dict[str, torch.Tensor]) -> float:
    """Seconds of a plain copy of all weights into allocated memory: the lower bound."""
    target = {name: torch.empty_like(value) for name, value in weights.items()}
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for name, value in weights.items():
            target[name].copy_(value)
        if next(iter(target.values())).is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


@torch.no_grad()
def change_some(actor: FSDPEngine, share: float = 0.01) -> None:
    """Change this share of the elements of each parameter."""
    for parameter in actor.model.parameters():
        flat = parameter.view(-1)
        flat[torch.randint(len(flat), (max(1, int(share * len(flat))),), device=flat.device)] *= 1.01


def measure_changes(path: str, lr: float, num_steps: int) -> dict[str, dict[str, float]]:
    """Mean share of elements that a step changes, and size of their encoding over that of all elements."""
    optimizer = OptimizerConfig(lr=lr, warmup_steps_proportion=0.0)
    engine = FSDPLMEngine(TrainEngineConfig(path, dtype="float32", device="cpu", optimizer=optimizer))
    engine.initialize(FinetuneSpec(1, num_steps, 1))
    found = {kind: {"changed_share": 0.0, "encoded_share": 0.0} for kind in ("bfloat16", "float32")}
    for _ in range(num_steps):
        old = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        ids = torch.randint(3, engine.model.config.vocab_size, (16, 64))
        engine.train_lm({"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)})
        for kind, numbers in found.items():
            changed = encoded = total = total_bytes = 0
            for name, p in engine.model.named_parameters():
                before, after = (t.detach().to(getattr(torch, kind)) for t in (old[name], p))
                index = (bits(before) != bits(after)).nonzero().squeeze(1)
                changed, total = changed + len(index), total + p.numel()
                size = len(encode_changes(index, after.view(-1)[index]))
                encoded, total_bytes = encoded + min(size, after.nbytes), total_bytes + after.nbytes
            numbers["changed_share"] += changed / total / num_steps
            numbers["encoded_share"] += encoded / total_bytes / num_steps
    engine.destroy()
    return found


def measure(way: str, actor: FSDPEngine, work: Path, repeats: int, num_servers: int) -> dict[str, float]:
    """Medians over `repeats` updates while the first server answers one long request."""
    segment = f"/dev/shm/arealite-bench-{secrets.token_hex(16)}"
    path = {"disk": work / "weights", "shm": segment, "ipc": f"{segment}.cuda"}.get(way, "")
    device = {"device": actor.device, "dtype": actor.config.dtype, "max_running_requests": 8}
    seconds: dict[str, list[float]] = {"publish_s": [], "load_s": [], "pause_s": []}
    moments = []
    device |= {"context_length": 4096, "max_total_tokens": 16384, "max_prefill_tokens": 256}
    with ExitStack() as stack:
        servers = [stack.enter_context(server_process(work / "model", **device)) for _ in range(num_servers)]
        engine = RemoteSGLangEngine(InferenceEngineConfig(pause_mode="in_place", setup_timeout_s=120))
        engine.initialize([server.address for server in servers])
        stream = Stream(servers[0].address)
        stream.start()
        assert stream.is_steady.wait(60), "no tokens"
        for version in range(1, repeats + 2):
            kind = "shm" if way == "ipc" else way
            meta = WeightUpdateMeta(kind, str(path), version)  # pyright: ignore
            change_some(actor)
            began = time.perf_counter()
            engine.begin_update(meta)
            actor.update_weights(meta)
            published = time.perf_counter()
            engine.update_weights(meta)
            ended = time.perf_counter()
            # The first update creates segments and connections.
            if version > 1:
                seconds["publish_s"].append(published - began)
                seconds["load_s"].append(ended - published)
                moments.append((began, ended))
        sent = {name: value for name, value in engine.stats().items() if name.startswith("weights/")}
        engine.destroy()
        stream.ended.set()
        seconds["pause_s"] = [stream.longest_gap(*moment) for moment in moments]
    return {name: statistics.median(values) for name, values in seconds.items()} | sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--changes", metavar="MODEL", help="measure what training steps change in this model")
    parser.add_argument("--lr", type=float, default=1e-6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.changes:
        found = measure_changes(options.changes, options.lr, options.repeats)
        rows = [[kind, f"{n['changed_share']:.2%}", f"{n['encoded_share']:.2%}"] for kind, n in found.items()]
        print_table(["published as", "elements changed by a step", "encoded changes over all bytes"], rows)
        line = {"benchmark": "weight_changes", "model": Path(options.changes).name, "lr": options.lr}
        print(json.dumps({**line, **found, **describe_machine()}))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        on_gpu = options.device == "cuda"
        kind = "bfloat16" if on_gpu else "float32"
        model = make_model(work / "model", options.hidden, options.layers, getattr(torch, kind))
        size_gb = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
        weights = {name: p.detach().to(options.device) for name, p in model.named_parameters()}
        settings = {"dtype": kind, "param_dtype": kind, "device": options.device, "optimizer": None}
        actor = FSDPEngine(TrainEngineConfig(str(work / "model"), **settings))
        actor.initialize()
        copies, ways = [], {}
        for way in ("disk", "shm", "ipc" if on_gpu else "broadcast", "stream", "delta"):
            copies.append(copy_seconds(weights))
            ways[way] = measure(way, actor, work, options.repeats, options.servers)
        copy_s = statistics.median(copies)
        actor.destroy()
    rows = [["plain copy", f"{copy_s:.3f}", "", "", "", f"{size_gb / copy_s:.2f}", "1.0"]]
    for way, t in ways.items():
        total = t["publish_s"] + t["load_s"]
        cells = [f"{v:.3f}" for v in (total, t["publish_s"], t["load_s"], t["pause_s"])]
        rows.append([way, *cells, f"{size_gb / total:.2f}", f"{total / (2 * copy_s):.2f}"])
    print(f"{size_gb:.2f} GB of weights")
    print_table(["way", "total s", "publish s", "load s", "pause s", "GB/s", "times two plain copies"], rows)
    line = {"benchmark": "weight_update", "size_gb": size_gb, "copy_s": copy_s, "ways": ways}
    print(json.dumps({**line, **describe_machine()}))


if __name__ == "__main__":
    main()
