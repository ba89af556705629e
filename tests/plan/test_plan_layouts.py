"""Costs and memory of layouts: near what was measured on an H200, and the same as `--dry-run`."""

import json
import re
from dataclasses import replace
from typing import Any, cast

import pytest

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.errors import AllocationError, ConfigError
from arealite.cli import plan as command
from arealite.core import staleness_manager
from arealite.dashboard.foresight import sweeps
from arealite.dashboard.runs import Run
from arealite.plan.hardware import GPUS, find_gpu
from arealite.plan.layouts import Layout, active_parameters, kv_bytes
from arealite.plan.model_shape import MODELS, find_model
from arealite.plan.search import evaluate, make_setup, search
from arealite.plan.workload import Distribution, Workload
from arealite.utils.memory.model_size import ModelSize

CONSTANT = Workload(64, 8, Distribution("constant", (128.0,)), Distribution("constant", (512.0,)))
ROLLOUT = InferenceEngineConfig(max_head_offpolicyness=2)


def server(model, backend="embedded", running=256):
    layout = Layout.parse(f"{backend}.d1+d1", find_model(model), GPUS["H200"], running)
    return layout.server_cost(layout.memory(CONSTANT))


@pytest.mark.parametrize(
    ("model", "backend", "running", "measured"),
    [
        ("0.5B", "embedded", 256, 120_000),
        ("0.5B", "embedded", 1024, 177_000),
        ("1.5B", "embedded", 256, 72_600),
        ("7B", "embedded", 256, 26_500),
        ("0.5B", "sglang", 256, 57_200),
        ("1.5B", "sglang", 256, 45_800),
        ("7B", "sglang", 256, 19_500),
        ("0.5B", "vllm", 256, 22_400),
    ],
)
def test_decoding_is_as_fast_as_measured_on_an_h200(model, backend, running, measured):
    # 128 tokens in, 512 out: 384 tokens of context on average (benchmark/results/inference.md).
    assert server(model, backend, running).tokens_per_s(running, 384) == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(("model", "measured"), [("1.5B", 46_100), ("0.5B", 119_800)])
def test_training_is_as_fast_as_measured_on_an_h200(model, measured):
    layout = Layout.parse("embedded.d1+d1", find_model(model), GPUS["H200"])
    cost = layout.train_cost(layout.memory(CONSTANT))
    # The measurement is one forward and backward pass, as a step is: its own pass gives the log-probs.
    assert 1 / cost.token_s == pytest.approx(measured, rel=0.25)
    again = replace(layout, prox_logp="recompute")
    assert again.train_cost(layout.memory(CONSTANT)).token_s == pytest.approx(cost.token_s * 8 / 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 64', "config.json cannot be read"),
        ("[1]", "holds a list, expected an object"),
        ('{"hidden_size": "64", "vocab_size": 9}', "hidden_size is the text '64', expected a positive integer"),
        ('{"text_config": {"num_hidden_layers": 1.5}}', "num_hidden_layers is 1.5"),
        ("{}", "its config.json leaves sizes out"),
    ],
)
def test_a_damaged_config_of_a_model_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        find_model(str(tmp_path))


def test_named_sizes_have_the_parameters_of_their_name():
    for name, size in MODELS.items():
        assert size.parameters / 1e9 == pytest.approx(float(name[:-1]), rel=0.2), name


def test_pipeline_stages_of_servers_hold_their_own_layers():
    """A model of 72B in 16 bits fits into four stages of 80 GiB, with a cache as large as with four tensor ranks."""
    layouts = [Layout.parse(f"vllm.d1{side}+d8t8", find_model("72B"), GPUS["H100"]) for side in ("p4", "t4")]
    stages, ranks = (layout.memory(CONSTANT) for layout in layouts)
    assert not stages.problem and stages.cache_tokens == pytest.approx(ranks.cache_tokens, rel=0.05)
    cost, other = layouts[0].server_cost(stages), layouts[1].server_cost(ranks)
    assert cost.context_s == other.context_s
    # Each stage reads its weights for each part of the sequences, but stages exchange no sums.
    assert cost.weights_s == 4 * other.weights_s and cost.step_s < other.step_s


@pytest.mark.parametrize(("model", "layout", "least"), [("32B", "d16", 16384), ("72B", "d8t8", 16384)])
def test_large_models_on_many_devices_have_large_micro_batches(model, layout, least):
    memory = Layout.parse(f"vllm.d1t8+{layout}", find_model(model), GPUS["H100"]).memory(CONSTANT)
    assert not memory.problem and memory.trainer_gib < 0.9 * memory.device_gib
    assert memory.sizes.max_tokens_per_mb >= least


def test_memory_is_that_of_dry_run(tmp_path, capsys):
    """`arealite plan SCRIPT.py` uses the estimates of --dry-run; the prediction must not tell another story."""
    config = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    config |= {"num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 131_072}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "qwen2", "tie_word_embeddings": True}))
    (tmp_path / "s.py").write_text("")
    work = ["train_dataset.batch_size=64", "gconfig.n_samples=8", "gconfig.max_new_tokens=512"]
    work += ["train_dataset.max_length=128", "server.context_length=640", f"actor.path={tmp_path}", "actor.device=cuda"]
    cluster = ["cluster.n_gpus_per_node=4", "cluster.gpu_memory_gib=80", "allocation_mode=embedded.d2+d2"]
    assert command.main([str(tmp_path / "s.py"), *work, *cluster]) == 0
    text = capsys.readouterr().out
    memory = Layout.parse("embedded.d2+d2", find_model(str(tmp_path)), find_gpu("h100")).memory(CONSTANT)
    needed = [float(n) for n in re.findall(r"each: ([\d.]+) of 80.0", text)]
    assert needed == pytest.approx([memory.server_gib, memory.trainer_gib], rel=0.02), text


def test_more_devices_are_faster_and_need_less_memory_each():
    gpu, model = GPUS["H100"], find_model("7B")
    one, two = (Layout.parse(f"sglang.d4t{t}+d{4 * t}", model, gpu) for t in (1, 2))
    assert two.memory(CONSTANT).trainer_gib < one.memory(CONSTANT).trainer_gib
    slow, fast = (layout.server_cost(layout.memory(CONSTANT)) for layout in (one, two))
    assert slow.tokens_per_s(64, 2000) < fast.tokens_per_s(64, 2000) < 2 * slow.tokens_per_s(64, 2000)


def test_a_search_returns_layouts_that_fit_with_reasons():
    found = search(4, find_model("1.5B"), GPUS["H100"], replace(CONSTANT, prompts=16), ROLLOUT, "sglang")
    speeds = [candidate.tokens_per_s for candidate in found]
    assert len(found) >= 3 and speeds == sorted(speeds, reverse=True)
    assert all(c.layout.mode.world_size == 4 and not c.memory.problem for c in found)
    assert {re.split(r"[:(]", c.reason())[0].strip() for c in found} <= {
        "generation is the bottleneck", "training is the bottleneck", "balanced", "both sides wait",
    }  # fmt: skip


@pytest.mark.slow
def test_a_search_measures_steps_after_the_lead_has_grown(monkeypatch):
    monkeypatch.setattr("arealite.plan.search._NUM_SIMULATED", 1)
    monkeypatch.setattr("arealite.plan.search._NUM_SPLITS", 3)
    monkeypatch.setattr("arealite.plan.search._MAX_BATCH", 1024)
    work = Workload(64, 16, Distribution("constant", (200.0,)), Distribution("lognormal", (2000.0, 1.0, 8192.0)))
    found = search(8, find_model("7B"), GPUS["H100"], work, replace(ROLLOUT, max_head_offpolicyness=4), "sglang")
    # The formula's best layouts of three splits, not three layouts of its best split.
    assert len({candidate.layout.train.world_size for candidate in found}) == 3
    for candidate in found:
        alone = evaluate(candidate.layout, work, replace(ROLLOUT, max_head_offpolicyness=4), 12).prediction
        assert candidate.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=0.05), candidate.layout.name


MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}  # fmt: skip


def test_experts_of_a_mixture_are_divided_where_that_pays():
    size = ModelSize.of(MIXTURE)
    assert size.parameters / 1e9 == pytest.approx(30.5, rel=0.02)
    assert size.expert_parameters / 1e9 == pytest.approx(29.0, rel=0.02)
    assert size.gathered_parameters(1) == size.parameters
    assert size.copies(2) == pytest.approx(2 - 2**-7) and 6 < size.copies(16) < 8
    names = {e: f"sglang.d2t8+d48{f'e{e}' if e > 1 else ''}" for e in (1, 4, 16)}
    layouts = {e: Layout.parse(name, size, GPUS["H100"]) for e, name in names.items()}
    assert [layout.name for layout in layouts.values()] == list(names.values())
    memory = {e: layout.memory(CONSTANT) for e, layout in layouts.items()}
    token_s = {e: layouts[e].train_cost(memory[e]).token_s for e in layouts}
    # Over the network 64 GB of weights per micro-batch take longer than its arithmetic.
    assert token_s[4] < 0.6 * token_s[1] and memory[4].trainer_gib < memory[1].trainer_gib
    # A group of 16 spans two nodes: tokens travel over the network.
    assert token_s[16] > token_s[4]
    assert layouts[1].expert_reason(memory[1]) == ""
    assert re.match(r"e4: a pass gathers [\d.]+ GiB of weights instead of 56", layouts[4].expert_reason(memory[4]))
    best = search(32, size, GPUS["H200"], replace(CONSTANT, prompts=32, samples=2), ROLLOUT, "sglang")
    assert all(c.layout.train.expert > 1 for c in best[:3])
    assert "; e" in best[0].reason() and f"e{best[0].layout.train.expert}" in best[0].layout.name


def test_latent_attention_has_the_sizes_that_deepseek_publishes():
    config = {
        "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129_280, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "tie_word_embeddings": False,
    }  # fmt: skip
    size = ModelSize.of(config, 671_000_000_000)
    # 37 billion of a token; 70 KB of a token in a server that keeps the latent, and all heads in the embedded one.
    assert active_parameters(size) / 1e9 == pytest.approx(37, rel=0.03)
    sglang, embedded = (Layout.parse(f"{backend}.d1t8+d8", size, GPUS["H200"]) for backend in ("sglang", "embedded"))
    assert kv_bytes(size, sglang.gen, False) == 2 * 61 * 576
    assert kv_bytes(size, embedded.gen, True) == 2 * 61 * 2 * 16 * 192


def test_layouts_that_cannot_divide_the_experts_are_refused():
    size = ModelSize.of(MIXTURE)
    for layout, message in (("sglang.d2+d6e4", "must divide"), ("sglang.d2+d3e3", "e·t must be a divisor")):
        with pytest.raises(AllocationError, match=message):
            Layout.parse(layout, size, GPUS["H100"])
    with pytest.raises(AllocationError, match="has none"):
        Layout.parse("sglang.d2+d4e2", find_model("7B"), GPUS["H100"])


def test_layouts_whose_tensor_ranks_cannot_divide_the_model_are_neither_found_nor_predicted():
    size = find_model("1.5B")
    for layout, message in (
        ("sglang.d1t8+d1", r"t8 of the servers .* attention heads \(12\)"),
        ("sglang.d1+d1t4", r"t4 of the trainers .* key-value heads \(2\)"),
        ("embedded.d1t4+d1", r"t4 of the servers .* key-value heads \(2\)"),
        ("sglang.d1+d1p40", "p40 needs as many layers, but the model has 28"),
    ):
        with pytest.raises(AllocationError, match=message):
            Layout.parse(layout, size, GPUS["H100"])
    # SGLang and vLLM copy key-value heads.
    assert not Layout.parse("vllm.d1t4+d1", size, GPUS["H100"]).indivisible
    # On small GPUs four trainers of one replica would be the best of all.
    found = search(8, size, GPUS["A10"], replace(CONSTANT, prompts=2), ROLLOUT, "sglang")
    assert found and not any(c.layout.indivisible for c in found)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("embedded.d2c2+d4", "leave out c on the generating side"),
        ("sglang.d2c2+d4", "leave out c on the generating side"),
        ("embedded.d4p2+d4", "the embedded server has no pipeline stages; write t2"),
        ("embedded.d2t4e2+d4", "write t2e2, or leave out e"),
    ],
)
def test_layouts_that_servers_do_not_have_are_not_predicted(layout, message):
    with pytest.raises(ConfigError, match=message):
        Layout.parse(layout, find_model("7B"), GPUS["H100"])


def test_tensor_ranks_are_not_predicted_for_models_that_the_trainer_cannot_divide():
    size = ModelSize.of(MIXTURE | {"model_type": "gpt_oss"})
    with pytest.raises(AllocationError, match="t2 of the trainers: model type 'gpt_oss' has no tensor-parallel plan"):
        Layout.parse("sglang.d2+d2t2", size, GPUS["H100"])
    assert Layout.parse("sglang.d1t2+d4", size, GPUS["H100"])
    found = search(16, size, GPUS["H200"], replace(CONSTANT, prompts=16, samples=2), ROLLOUT, "sglang")
    assert found and all(c.layout.train.tensor == 1 for c in found)


def test_sequences_beyond_the_context_are_noted(tmp_path, capsys):
    note = "note: the longest sequence of this workload has 1,174 tokens, but the model's context ends at 512: "
    config = MIXTURE | {"model_type": "qwen3", "num_experts": 0, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = [*SMALL[:-2], "--model", str(tmp_path)]
    for more in (["--layout", "sglang.d2+d2"], ["--gpus", "4"], ["--layout", "sglang.d2+d2", "--sweep", "eta=0,1"]):
        assert command.main([*arguments, *more]) == 0
        assert capsys.readouterr().out.count(note) == 1
    assert command.main([*arguments, "--layout", "sglang.d2+d2", "--prompt-lengths", "100"]) == 0
    assert "note: the longest" not in capsys.readouterr().out


def test_a_layout_names_the_batch_sizes_that_its_replicas_can_share(capsys):
    layout = Layout.parse("sglang.d28+d36", find_model("7B"), GPUS["H100"])
    assert layout.batch_problem(504) == ""
    assert layout.batch_problem(512).endswith("cannot share 512 prompts: train_dataset.batch_size=504 or 540")
    found = search(4, find_model("1.5B"), GPUS["H100"], replace(CONSTANT, prompts=16), ROLLOUT, "sglang")
    reasons = {c.layout.name: c.reason() for c in found}
    assert "batch_size=15 or 18" in reasons["sglang.d1+d3"] and "batch_size" not in reasons["sglang.d3+d1"]
    assert command.main([*SMALL, "--layout", "sglang.d1+d3"]) == 0
    assert "note: 3 replicas cannot share 8 prompts: train_dataset.batch_size=6 or 9" in capsys.readouterr().out


def test_models_that_fit_nowhere_are_refused():
    nearest = r"no layout of this model fits on 4 x RTX4090. The nearest is sglang.d1\+d3: .*needs \d+ GiB"
    with pytest.raises(ConfigError, match=nearest):
        search(4, find_model("72B"), GPUS["RTX4090"], CONSTANT, ROLLOUT, "sglang")
    with pytest.raises(ConfigError, match=r"sglang.d1\+d1 does not fit on A10: a server needs 28 GiB"):
        make_setup(Layout.parse("sglang.d1+d1", find_model("14B"), GPUS["A10"]), CONSTANT, ROLLOUT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "7B", "--gpus", "8", "--gpu", "H101"], "unknown GPU 'H101'.*did you mean H100"),
        (["--model", "7.5B", "--gpus", "8"], "sizes of '7.5B' are not known.*Named sizes: 0.5B"),
        (["--gpus", "8"], "--model is missing"),
        (["--model", "7B"], "give one of --gpus"),
        (["--model", "7B", "--gpus", "8", "--layout", "sglang.d4+d4"], "give one of --gpus"),
        (["--model", "7B", "--gpus", "1"], "--gpus is 1; give 2 to 4096"),
        (["--model", "7B", "--gpus", "8", "--crash", "0@9"], "--crash has no effect with --gpus"),
        (["--from", "/not/there", "--model", "7B"], "--model has no effect with --from"),
        (["--from", "/not/there", "--max-running", "9"], "--max-running has no effect with --from"),
        (["--from", "/not/there", "--gpu", "B200"], "--gpu has no effect with --from"),
        (["--calibrated", "/not/there", "--backend", "vllm"], "--backend has no effect with --calibrated"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--backend", "vllm"], "--backend has no effect with --layout"),
        (["--model", "7B", "--gpus", "8", "--tool-s", "5"], "--tool-s is the time between two turns: give --turns"),
        (["--model", "7B", "--layout", "d8"], "must name servers and trainers"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--eta", "-1"], "--eta is -1"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--prompts", "0"], "--prompts is 0"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--lengths", "normal:3"], "--lengths is 'normal:3'"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--lengths", "0"], "--lengths is '0', with 0 tokens; give at"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--lengths", ""], "--lengths is ''; write constant:N"),
        (["--model", "7B", "--gpus", "8", "--prompt-lengths", "uniform:0,9"], "--prompt-lengths is .* with 0 tokens"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--crash", "x@y"], "--crash is 'x@y'"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--sweep", "lr=1,2"], "--sweep is 'lr=1,2'"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--sweep", "eta=a"], "'a' is not a whole number"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--bakend", "x"], "did you mean --backend"),
        (["--from", "/not/there"], "there is no run directory"),
        (["--calibrated", "/not/there"], "there is no file /not/there"),
        (["--calibrate", "out.json", "--model", "7B"], "give its folder with --model"),
        (["--calibrate", "/not/there.json", "--model", "."], "--calibrate is /not/there.json, which cannot be written"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--plot", "/not/there.png"], "which cannot be written"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--plot", "a.txt"], "--plot is a.txt; give a file that ends"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--seed", "-1"], "--seed is -1"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--servers", "2"], "--layout says how many servers"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--sweep", "servers=0"], "--servers is 0; give 1 to 4096"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--crash", "0@nan"], "--crash is '0@nan'"),
        (["--model", "7B", "--layout", "sglang.d6+d2", "--sweep", "eta=0", "--page", "/"], "is not a run directory"),
    ],
)
def test_bad_input_says_what_to_do(arguments, message):
    with pytest.raises(ConfigError, match=message):
        command.main(arguments)


def test_a_search_names_the_command_for_one_layout_with_what_was_given(capsys):
    given = ["--model", "0.5B", "--gpu", "A100", "--eta", "2", "--prompts", "8", "--samples", "2", "--lengths", "100"]
    given += ["--turns", "2", "--fixed-lead", "--seed", "3"]
    assert command.main([*given, "--gpus", "4", "--backend", "vllm"]) == 0
    words = capsys.readouterr().out.splitlines()[-1].removeprefix("more about one: arealite plan ").split()
    assert words[-2] == "--layout" and words[-1].startswith("vllm.d") and sorted(words[:-2]) == sorted(given)
    assert command.main(words) == 0
    assert capsys.readouterr().out.startswith(f"{words[-1]} on A100\n")


def test_a_malformed_layout_shows_where(capsys):
    with pytest.raises(AllocationError, match="malformed allocation_mode"):
        command.main(["--model", "7B", "--layout", "sglang.x4+d4"])


SMALL = ["--model", "0.5B", "--prompts", "8", "--samples", "2", "--lengths", "uniform:50,150", "--steps", "3"]


def test_a_layout_is_predicted_in_full(capsys):
    assert command.main([*SMALL, "--layout", "sglang.d2+d2", "--eta", "2", "--crash", "1@0.5:1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("sglang.d2+d2 on H100\nstep ") and "tokens of KV cache" in out and "staleness" in out
    assert command.main([*SMALL, "--layout", "sglang.d2+d2", "--eta", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sample_ages"] == {"0": 1.0} and found["tokens_per_s"] > 0


def test_a_sweep_is_a_table_and_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "eta.png"
    (tmp_path / "config.yaml").write_text("{}")
    sweep = ["--layout", "sglang.d2+d2", "--sweep", "eta=0,2"]
    assert command.main([*SMALL, *sweep, "--plot", str(plot), "--page", str(tmp_path)]) == 0
    (saved,) = sweeps(Run(tmp_path, "run"), cast(Any, None))["sweeps"]
    assert saved["values"] == ["0", "2"] and saved["columns"]["tokens_per_s"][0] > 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[1].split()[0] == "0" and plot.read_bytes().startswith(b"\x89PNG")


def test_help_explains_both_uses(capsys):
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "SCRIPT.py" in out and "--gpus N" in out and "--from RUN_DIR" in out


def test_leads_that_are_nearly_as_good_are_noted(monkeypatch, capsys):
    arguments = ["--model", "0.5B", "--gpu", "H100", "--layout", "embedded.d1+d4", "--prompts", "32", "--samples", "4"]
    arguments += ["--lengths", "500", "--steps", "24"]
    command.main(arguments)
    assert "note" not in capsys.readouterr().out
    monkeypatch.setattr(staleness_manager, "_CLOSE", 100.0)
    command.main(arguments)
    note = capsys.readouterr().out.splitlines()[-1]
    assert re.match(
        r"note: adaptive leads of 1 and \d batches are .*: with 1, \d.\d\d s a step and a mean age of 1", note
    )
    command.main([*arguments, "--json"])
    assert json.loads(capsys.readouterr().out)["close_leads"][0] == 1
