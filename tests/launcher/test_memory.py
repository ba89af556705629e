"""Tests of the memory estimate that `--dry-run` and `arealite plan` print."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import Qwen2Config, Qwen3MoeConfig

from arealite.cli import plan
from arealite.launcher.memory import Device, _changes
from arealite.utils.memory.model_size import read_model_size

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "small": (256, 1024, 6, 4, 2, 8192, True),
}


SCRIPT = """from arealite.api.cli_args import {0}
from arealite.utils.config import load_config

load_config(argv, {0})
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with the config.json of each shape, without weights."""
    root = tmp_path_factory.mktemp("models")
    for name, (hidden, inner, layers, heads, kv_heads, vocab, tied) in SHAPES.items():
        Qwen2Config(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=32768,
            architectures=["Qwen2ForCausalLM"],
        ).save_pretrained(root / name)  # fmt: skip
    return root


@pytest.fixture
def show(tmp_path, models, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format("GRPOConfig"))
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n')

    def show(model: str, *settings: str, sides: str = "embedded.d1+d1") -> str:
        known = [f"allocation_mode={sides}", f"train_dataset.path={data}", "experiment_name=e", "trial_name=t"]
        known += [f"actor.path={models / model}", "gconfig.n_samples=8", f"cluster.fileroot={tmp_path}"]
        assert plan.main([str(script), *known, *settings]) == 0
        return capsys.readouterr().out

    show.read = lambda: capsys.readouterr().out
    return show


def total_of(text: str, process: str) -> float:
    line = next(line for line in text.splitlines() if line.strip().startswith(process + " ") and ": weights" in line)
    return float(line.split(":")[0].split()[-1])


def test_the_plan_names_what_each_process_holds(show):
    text = show("0.5B", "cluster.gpu_memory_gib=139.8")
    assert "node 0 gpu 0:" in text and "node 0 gpu 1:" in text and "node 0 host" in text
    for part in ("KV cache", "graphs", "weight update", "gradients", "optimizer", "activations", "logits"):
        assert part in text
    assert "WILL NOT FIT" not in text


def test_a_model_that_is_too_large_is_refused_with_settings_that_help(show):
    text = show("7B", "cluster.gpu_memory_gib=80")
    assert "WILL NOT FIT: node 0 gpu 1" in text
    assert text.endswith("dry run: nothing was started, and the memory will not suffice (see above)\n")
    keys = [line.split("(")[0].split() for line in text.splitlines() if "(then " in line]
    assert all(key.startswith(("actor.", "server.", "ref.")) for line in keys for key in line)
    server = next(line for line in keys if line[0].startswith("server."))
    actor = next(line for line in keys if line[0].startswith("actor."))
    assert "WILL NOT FIT" not in show("7B", "cluster.gpu_memory_gib=80", *server, *actor)


@pytest.mark.parametrize(
    "setting",
    [
        "actor.optimizer.type=adamw_8bit",
        "actor.param_dtype=bfloat16",
        "actor.gradient_checkpointing=true",
        "actor.max_tokens_per_mb=4096",
        "actor.compile=true",
        "actor.lora_rank=16",
        "actor.logprob_chunk_size=256",
    ],
)
def test_settings_that_save_memory_lower_the_estimate(show, setting):
    base = ("cluster.gpu_memory_gib=139.8", "actor.max_tokens_per_mb=16384")
    settings = [*base[:1], setting] if "max_tokens" in setting else [*base, setting]
    assert total_of(show("0.5B", *settings), "rank 0") < total_of(show("0.5B", *base), "rank 0")


def test_more_ranks_hold_less_each(show):
    one, four = (
        total_of(show("7B", "cluster.gpu_memory_gib=139.8", "cluster.n_nodes=1", sides=f"embedded.d1+{d}"), "rank 0")
        for d in ("d1", "d4")
    )
    tensor = total_of(show("7B", "cluster.gpu_memory_gib=139.8", sides="embedded.d1+d2t2"), "rank 0")
    assert four < one and tensor < one


def test_engines_of_a_driver_have_devices_of_their_own(show, models):
    """In controller mode each engine is alone on its GPUs: what does not fit there must be said."""
    devices = ("controller=true", "cluster.n_gpus_per_node=2", f"ref.path={models / '0.5B'}", "actor.kl_ctl=0.1")
    text = show("7B", *devices, "cluster.gpu_memory_gib=80", sides="embedded.d1+d2")
    for place, process in (("node 0 gpu 1 to", "actor rank 0"), ("node 1 gpu 1 to", "ref rank 0")):
        assert re.search(rf"{place} node \d gpu 0, each: .*\n +{process} ", text), text
    assert "optimizer 28.4" in text and text.count(" KV cache ") == 1
    # 7.6 billion numbers in 32 bits, their gradients and states do not fit into two of these.
    assert "WILL NOT FIT: node 0 gpu 1 " in show("7B", *devices, "cluster.gpu_memory_gib=40", sides="embedded.d1+d2")


def test_servers_on_gpus_do_not_count_for_the_host_again(show):
    text = show("0.5B", "cluster.gpu_memory_gib=80", sides="vllm.d1+eval")
    assert text.count("server 0 ") == 2 and text.count("KV cache") == 1, text


def test_a_pipeline_stage_of_a_server_holds_its_layers(show, models):
    text = show("7B", "cluster.gpu_memory_gib=24", "cluster.n_gpus_per_node=4", sides="vllm.d1p2+d1")
    # Half of the layers, and embedding or head: 3.8 of 7.6 billion numbers in 16 bits.
    assert "server 0 22.3: weights 7.1, KV cache and graphs 14.5" in text
    assert "WILL NOT FIT: node 0 gpu 0" not in text


def test_further_models_add_their_weights(show, models):
    base = ("cluster.gpu_memory_gib=139.8", "actor.max_tokens_per_mb=4096")
    alone = total_of(show("0.5B", *base), "rank 0")
    text = show("0.5B", *base, f"ref.path={models / '0.5B'}", "actor.kl_ctl=0.1")
    assert "ref: weights 1.8" in text
    with_ref = float(next(line for line in text.splitlines() if "rank 0 " in line).split()[2][:-1])
    assert with_ref == pytest.approx(alone + 1.84, abs=0.2)


def test_offloaded_states_count_for_the_host(show):
    text = show("7B", "cluster.gpu_memory_gib=139.8", "actor.cpu_offload=true")
    host = text.split("node 0 host")[1]
    assert "optimizer 56.7" in host and "optimizer" not in text.split("node 0 host")[0].split("rank 0 ")[-1]


def gib(numbers: float, item: int = 4) -> str:
    return f"{numbers * item / 2**30:.1f}"


def test_every_engine_of_a_rank_has_a_line(show, models):
    """A critic has no head of the vocabulary, a reference model no optimizer; four ranks have a quarter each."""
    size = read_model_size(str(models / "7B"))
    assert size is not None
    extra = [
        f"critic.path={models / '7B'}",
        f"ref.path={models / '7B'}",
        "actor.kl_ctl=0.1",
        "ref.param_dtype=bfloat16",
    ]
    text = show("7B", "cluster.gpu_memory_gib=139.8", "actor.algorithm=ppo", *extra, sides="embedded.d1+d4")
    lines = [line.strip() for line in text.split("rank 0 ", 1)[1].splitlines()]
    actor, critic, ref = (
        next(line for line in lines if line.startswith(name)) for name in ("actor:", "critic:", "ref:")
    )
    assert f"weights {gib(size.parameters / 4)}, optimizer {gib(size.parameters / 4, 8)}" in actor
    shared = (size.parameters - size.embedding) / 4
    assert f"weights {gib(shared)}, optimizer {gib(shared, 8)}" in critic
    assert ref.startswith(f"ref: weights {gib(size.parameters / 4, 2)}") and "optimizer" not in ref


def test_adapters_have_a_line_and_the_optimizer(show, models):
    size = read_model_size(str(models / "7B"))
    assert size is not None
    adapters = size.adapter_parameters(64)
    text = show("7B", "cluster.gpu_memory_gib=139.8", "actor.lora_rank=64")
    assert f"weights {gib(size.parameters)}, adapters {gib(adapters)}, optimizer {gib(adapters, 8)}" in text
    fewer = show("7B", "cluster.gpu_memory_gib=139.8", "actor.lora_rank=64", "actor.lora_targets=[q_proj,v_proj]")
    assert f"adapters {gib(size.adapter_parameters(64, ['q_proj', 'v_proj']))}," in fewer
    # Merged layers are staged on the device from base weights on the host; embedding and head have no adapter.
    adapted = size.adapted_parameters()
    assert adapted < size.parameters and f"weight update {gib(adapted, 2)}" in text
    assert f"base weights {gib(adapted, 2)}" in text.split("node 0 host")[1]
    assert f"weight update {gib(size.adapted_parameters(['q_proj', 'v_proj']), 2)}" in fewer
    merged = show("7B", "cluster.gpu_memory_gib=139.8", "actor.lora_rank=64", "rollout.weight_update=shm")
    assert f"weight update {gib(size.parameters, 2)}" in merged


@pytest.mark.parametrize(("kind", "size_bytes"), [("fp8", 1.0), ("nf4", 0.53125)])
def test_frozen_layers_in_low_bits(show, models, kind, size_bytes):
    size = read_model_size(str(models / "7B"))
    assert size is not None
    low = ("cluster.gpu_memory_gib=139.8", "actor.lora_rank=16", f"actor.frozen_weight_dtype={kind}")
    layers = size.adapted_parameters()
    weights = f"{(size_bytes * layers + 4 * (size.parameters - layers)) / 2**30:.1f}"
    text = show("7B", *low)
    assert f"weights {weights}, adapters" in text and "dequantized layer 0." in text
    # The host loads the model in the type of the parameters; servers get whole weights.
    assert f"loading {gib(size.parameters)}" in text.split("node 0 host")[1]
    assert f"weight update {gib(size.parameters, 2)}" in text
    # Every rank has all of these layers.
    two = total_of(show("7B", *low, "actor.max_tokens_per_mb=4096", sides="embedded.d1+d2"), "rank 0")
    one = total_of(show("7B", *low, "actor.max_tokens_per_mb=4096"), "rank 0")
    assert size_bytes * layers / 2**30 < two < one


def test_low_bits_are_suggested_for_dense_models(models, tmp_path):
    Qwen3MoeConfig(num_experts=8).save_pretrained(tmp_path)
    for path, is_dense in ((models / "7B", True), (tmp_path, False)):
        values = {"actor": {"path": str(path), "lora_rank": 8}}
        changes = list(_changes(values, Device("node 0 gpu 0", None, [])))
        kinds = [each["actor.frozen_weight_dtype"] for each in changes if "actor.frozen_weight_dtype" in each]
        assert kinds == (["fp8", "nf4"] if is_dense else [])


def test_a_reward_model_has_no_vocabulary_head(show, models, tmp_path):
    script, sizes = tmp_path / "train.py", {}
    for name in ("SFTConfig", "RWConfig"):
        script.write_text(SCRIPT.format(name))
        settings = [f"model.path={models / '7B'}", "cluster.gpu_memory_gib=139.8", "cluster.n_gpus_per_node=1"]
        data = f"train_dataset.path={tmp_path / 'rows.jsonl'}"
        assert plan.main([str(script), "allocation_mode=d1", data, "experiment_name=e", "trial_name=t", *settings]) == 0
        sizes[name] = show.read()
    size = read_model_size(str(models / "7B"))
    assert size is not None and "logits" in sizes["SFTConfig"] and "logits" not in sizes["RWConfig"]
    assert f"weights {gib(size.with_scalar_head().parameters)}" in sizes["RWConfig"]


def test_offloaded_states_of_all_engines_count_for_the_host(show, models):
    text = show("7B", "cluster.gpu_memory_gib=139.8", "actor.cpu_offload=true", "actor.kl_ctl=0.1",
                f"ref.path={models / '7B'}", "ref.cpu_offload=true")  # fmt: skip
    size = read_model_size(str(models / "7B"))
    assert size is not None
    host = text.split("node 0 host")[1]
    weights, states = gib(size.parameters), gib(size.parameters, 8)
    assert f"actor: weights {weights}, optimizer {states}, gradients {weights}" in host
    assert f"ref: weights {weights}" in host
    total = float(host.split("rank 0 ")[1].split(":")[0])
    assert total == pytest.approx(size.parameters * 20 / 2**30 + 0.65, abs=0.2)


def test_without_a_gpu_the_size_can_be_given_and_unknown_models_are_said(show, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "set cluster.gpu_memory_gib" in show("0.5B")
    assert "the sizes of some/model are not known" in show("0.5B", "actor.path=some/model")


def test_parameters_are_read_from_files_if_there_are_some(tmp_path, models):

    config = json.loads((models / "small" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    estimated = read_model_size(str(tmp_path))
    save_file({"a": np.zeros((8192, 512), np.float16)}, tmp_path / "model.safetensors")
    counted = read_model_size(str(tmp_path))
    assert estimated is not None and counted is not None
    assert counted.parameters == 8192 * 512 != estimated.parameters
    (tmp_path / "model.safetensors").write_bytes(b"\\xff" * 20)
    damaged = read_model_size(str(tmp_path))
    assert damaged == estimated


_MEASURE = """
import resource, sys
import torch
from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.utils.memory.estimate import training_needs
from arealite.utils.memory.model_size import read_model_size

torch.set_num_threads(1)
config = TrainEngineConfig(
    path=sys.argv[1], init_from_scratch=True, device="cpu", dtype="float32", optimizer=OptimizerConfig(),
    max_tokens_per_mb=2048, share_prefix=False, logprob_chunk_size=512,
)
engine = FSDPLMEngine(config)
def peak():
    # ru_maxrss would include the process that started this one.
    return 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
before = peak()
engine.initialize(FinetuneSpec(1, 10, 1))
ids = torch.randint(0, 8192, (16, 256))
batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}
# A small step makes the optimizer's states; the next one has the largest peak.
engine.train_lm({name: tensor[:1] for name, tensor in batch.items()})
engine.train_lm(batch)
needs = training_needs(read_model_size(sys.argv[1]), config, engine.memory, on_gpu=False, step_tokens=4096)
print("RESULT", peak() - before, needs.total, needs)
"""


@pytest.mark.slow
def test_the_estimate_is_near_the_peak_of_a_real_process(models):
    command = [sys.executable, "-c", _MEASURE, str(models / "small")]
    # malloc then returns what is freed. Else it may hold half as much again, depending on the machine.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True)
    measured, estimated = map(float, done.stdout.split("RESULT ")[1].split()[:2])
    print(done.stdout)
    assert estimated == pytest.approx(measured, rel=0.3)


def test_a_reward_model_is_counted_where_the_first_rank_is(show, models):
    plain, scored = show("small"), show("small", f"reward={models / '0.5B'}")
    assert "reward model" not in plain
    # 0.49 billion parameters in float32, beside the trainer's rank.
    (line,) = re.findall(r"reward model ([\d.]+): weights ([\d.]+), scoring [\d.]+", scored)
    assert line[1] == "1.8" and float(line[0]) > float(line[1])
    on_gpus = ("cluster.gpu_memory_gib=80", "cluster.n_gpus_per_node=2", "actor.device=cuda", "server.device=cuda")
    shown = show("small", f"train_dataset.reward={models / '0.5B'}", *on_gpus)
    assert shown.count("reward model") == 2, "on one of two GPUs, and its process on the host"
