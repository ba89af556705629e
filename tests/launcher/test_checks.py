"""Everything that can be known before a start is refused before a start, and by a dry run."""

import importlib.util
import json
import sys

import pytest

from arealite.api.alloc_mode import ParallelStrategy
from arealite.api.errors import AReaLiteError, ConfigError
from arealite.launcher import local, slurm
from arealite.utils.model_config import check_layout_of

READS_DATASETS = """
from arealite.api.cli_args import GRPOConfig
from arealite.dataset import get_gsm8k_rl
from arealite.utils.config import load_config, run_main

run_main(lambda argv: load_config(argv, GRPOConfig))
"""


@pytest.fixture(params=["dry run", "real run"])
def refused(request, work, arguments, monkeypatch):
    """Returns a function that launches, and checks that nothing has started and the run directory is not there."""

    def launch(match: str, *more: str, mode: str = "sglang.d1+d1") -> None:
        monkeypatch.setattr(local, "run_attempts", lambda *_: pytest.fail("the job was started"))
        with pytest.raises(AReaLiteError, match=match):
            local.launch("script.py", arguments(*more, mode=mode), dry_run=request.param == "dry run")
        assert not (work / "runs").exists()

    return launch


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("sglang.d1e2+d1", "write t2e2, or leave out e"),
        ("vllm.d1c2+d1", "leave out c on the generating side"),
        ("embedded.d1p2t2+d1", "no pipeline stages; write t4 for p2t2"),
    ],
)
def test_layouts_that_do_not_exist(refused, mode, message):
    refused(message, mode=mode)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_a_hub_dataset_without_the_package_for_it(refused, work, arguments, capsys):
    # A script that makes its own rows may use any path.
    assert local.launch("script.py", arguments("train_dataset.path=openai/gsm8k"), dry_run=True) == 0
    (work / "script.py").write_text(READS_DATASETS)
    refused(r"train_dataset\.path=openai/gsm8k .* need the package `datasets`", "train_dataset.path=openai/gsm8k")
    refused(r"no dataset at absent\.jsonl \(train_dataset\.path\)", "train_dataset.path=absent.jsonl")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_server_that_is_not_installed(refused):
    refused("vllm is not installed in", mode="vllm.d1+d1")


@pytest.mark.parametrize("values", [{"attn_logit_softcapping": 50.0}, {}])
@pytest.mark.parametrize("key", ["actor", "ref"])
def test_a_model_that_can_only_be_served(refused, work, values, key):
    (work / "gemma").mkdir()
    file = work / "gemma" / "config.json"
    file.write_text(json.dumps({"model_type": "gemma2"} | values))
    refused(rf"{key}\.path: model type 'gemma2' caps attention logits, but packed", f"{key}.path=./gemma")
    file.write_text(json.dumps({"model_type": "gemma2", "attn_logit_softcapping": None}))
    check_layout_of("gemma", ParallelStrategy(), 1)


def test_tensor_ranks_of_a_model_that_the_trainer_cannot_divide(refused, work):
    (work / "oss").mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 64}
    (work / "oss" / "config.json").write_text(json.dumps({"model_type": "gpt_oss"} | sizes))
    refused("t2 of the trainers: model type 'gpt_oss' has no", "actor.path=./oss", mode="sglang.d1+d1t2")


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_a_logger_that_is_not_installed(refused, name, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, *a: None if module == name else find(module, *a))
    value = "local" if name == "trackio" else "offline"
    refused(
        rf"stats_logger\.{name} needs its package: pip install 'arealite\[{name}\]'", f"stats_logger.{name}={value}"
    )


def test_values_of_trackio(refused):
    refused(r"stats_logger\.trackio=online is none of off, local", "stats_logger.trackio=online")


def test_paths_that_do_not_exist(refused):
    refused(r"actor\.path: model path '/nowhere' does not exist", "actor.path=/nowhere")
    refused(r"no dataset at /nowhere \(valid_dataset\.path\)", "valid_dataset.path=/nowhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [("null", "holds null"), ("[]", "holds a list"), ("{", "cannot be read"), ('{"model_type": "t5"}', "'t5'")],
)
def test_damaged_and_foreign_models(refused, work, config, message):
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(config)
    refused(rf"actor\.path: .*{message}", f"actor.path={work / 'model'}")
    refused(rf"ref\.path: .*{message}", f"ref.path={work / 'model'}", "actor.kl_ctl=0.1")


def test_layouts_that_do_not_fit_the_model(refused, work):
    (work / "model").mkdir()
    path = f"actor.path={work / 'model'}"
    (work / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    refused(r"actor\.path: .*'gpt2' has none: leave out e", path, mode="d2e2")
    refused(r"actor\.path: .*'gpt2' cannot be divided into 2 pipeline stages", path, mode="p2")
    (work / "model" / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 6}))
    refused(r"actor\.path: .*e·t = 4 ranks, but the model has 6", path, mode="d4e4")
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"model_type": "qwen2", "vocab_size": 100, "hidden_size": 56, "intermediate_size": 112}
    (work / "model" / "config.json").write_text(json.dumps(sizes | heads))
    refused(r"actor\.path: t4 does not divide the model's attention heads \(14\)", path, mode="t4")
    refused(r"actor\.path: t7 does not divide the model's key-value heads \(2\)", path, mode="t7")


def test_layers_in_low_bits(refused, work):
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": 6}))
    model, low = f"actor.path={work / 'model'}", "actor.frozen_weight_dtype=nf4"
    refused(r"actor\.path: .*'mixtral' has 6 experts", model, low, "actor.lora_rank=4")
    refused(r"frozen_weight_dtype=nf4 is for weights that are not trained: set lora_rank", low)
    refused(r"frozen_weight_dtype=nf4 with d1p1t2: .* Give those ranks to d or c", low, "actor.lora_rank=4", mode="t2")


def test_control_characters(refused):
    refused(r"launcher\.slurm\.comment must not contain", 'launcher.slurm.comment="a\\n#SBATCH --wrap=b"')
    refused(r"sglang\.x must not contain", 'sglang.x="a\\nb"')


def test_no_line_of_a_batch_script_comes_from_a_value(work, arguments, monkeypatch):
    folder = work / "a\nb"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "script.py").write_text("")
    with pytest.raises(ConfigError, match="control character"):
        slurm.launch("script.py", ["actor.path=m", "allocation_mode=sglang.d1+d1"], dry_run=True)


def test_keys_for_running_servers(refused):
    refused("does not name their kind: write for example sglang.d1\\+d2", "rollout.server_addrs=[a:1]", mode="d2")
    refused("set only one", "rollout.server_addrs=[a:1]", "launcher.max_servers=4")
    refused("rollout.server_addrs has 'http://a:1': write host:port", "rollout.server_addrs=['http://a:1']")


def test_an_api_key_among_the_flags_of_a_server(refused):
    refused("sglang.api_key would be visible on a command line: set server.api_key", "sglang.api_key=abc")


def test_a_model_that_is_fine_passes(work, arguments, capsys):
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 8}))
    assert local.launch("script.py", arguments(f"actor.path={work / 'model'}"), dry_run=True) == 0
    assert sys.executable in capsys.readouterr().out
