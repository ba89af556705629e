"""Damaged and foreign models: launcher, trainer and server give one clear line."""

import json
import subprocess
import sys

import pytest

from arealite.api.cli_args import ServerConfig, TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.inference.loading import load_model
from arealite.utils.model_config import check_model

# What replaces keys of config.json, and a part of the message.
CONFIGS = {
    "null": (None, "holds null, expected an object"),
    "a list": ([], "holds a list, expected an object"),
    "no model type": ({"model_type": None}, "model_type is null"),
    "unknown type": ({"model_type": "qwen99"}, "'qwen99'.*not a causal language model"),
    "t5": ({"model_type": "t5", "is_encoder_decoder": True}, "'t5'.*not a causal language model"),
    "mamba": ({"model_type": "mamba"}, "'mamba'.*carries a state"),
    "dtype": ({"dtype": "float99"}, "dtype is 'float99', expected one of"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0, expected a positive integer"),
    "no vocabulary": ({"vocab_size": 0}, "vocab_size is 0"),
    "text for a size": ({"hidden_size": "many"}, "hidden_size is the text 'many'"),
    "text for a number": ({"rms_norm_eps": "small"}, "rms_norm_eps is the text 'small', expected a number"),
    "one position": ({"max_position_embeddings": 1}, "max_position_embeddings is 1"),
}
FILES = {
    "generation_config.json": "generation_config.json holds a list",
    "model.safetensors.index.json": "index.json holds a list",
}
# What the JSON alone does not show.
LATER = {
    "heads that do not divide": {"num_key_value_heads": 3},
    "unknown activation": {"hidden_act": "nonsense"},
    "a rope of another kind": {"rope_scaling": {"rope_type": "nonsense"}},
    "text in a list": {"layer_types": ["full_attention", 7]},
}


@pytest.fixture
def folder(model_path, tmp_path):
    for file in model_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def damage(folder, changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes if isinstance(changes, dict) else changes))


def train(folder):
    engine = FSDPLMEngine(TrainEngineConfig(path=str(folder), dtype="float32", device="cpu"))
    engine.initialize()


def serve(folder):
    load_model(ServerConfig(model_path=str(folder), device="cpu"))


def refused(action, folder, message):
    with pytest.raises(ConfigError, match=message) as caught:
        action(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_damaged_configs_are_rejected_everywhere(folder, name):
    changes, message = CONFIGS[name]
    damage(folder, changes)
    for action in (check_model, train, serve):
        refused(action, folder, message)


@pytest.mark.parametrize("name", FILES)
def test_other_files_must_hold_objects(folder, name):
    (folder / name).write_text("[]")
    for action in (check_model, train, serve):
        refused(action, folder, FILES[name])


@pytest.mark.parametrize("name", LATER)
def test_errors_while_loading_are_one_line(folder, name):
    damage(folder, LATER[name])
    for action in (train, serve):
        refused(action, folder, "cannot load a model|layers of type")


def test_incomplete_shards_are_named(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(check_model, folder, "1 file.*'model-00002-of-00002.safetensors'")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')
    refused(check_model, folder, "no weight_map")


def test_incomplete_json_and_missing_folders(tmp_path):
    refused(check_model, tmp_path / "nowhere", "does not exist")
    refused(check_model, tmp_path, r"no config\.json")
    (tmp_path / "config.json").write_text('{"model_type": "qw')
    refused(check_model, tmp_path, "cannot be read")
    for value in ("[" * 100_000 + "]" * 100_000, "1" * 10_000):
        (tmp_path / "config.json").write_text(f'{{"model_type": {value}}}')
        refused(check_model, tmp_path, "cannot be read")
    for value in ("NaN", "-Infinity", "1e999"):
        (tmp_path / "config.json").write_text(f'{{"model_type": "qwen2", "rms_norm_eps": {value}}}')
        refused(check_model, tmp_path, "rms_norm_eps is .*expected a number")
    check_model("Qwen/Qwen2.5-0.5B")  # a hub name: nothing is known yet


def test_a_reward_model_is_no_language_model(folder):
    """With tied embeddings it lacks no weights of one, and training would start from its body without a word."""
    damage(folder, {"architectures": ["Qwen2ForSequenceClassification"], "tie_word_embeddings": True})
    for action in (train, serve):
        refused(action, folder, r"is a reward model or critic \(Qwen2ForSeq\w+\), which generates no text")


def test_a_classifier_of_several_labels_is_no_reward_model(folder):
    names = {str(number): f"LABEL_{number}" for number in range(3)}
    damage(folder, {"architectures": ["Qwen2ForSequenceClassification"], "id2label": names})
    config = TrainEngineConfig(path=str(folder), dtype="float32", device="cpu")
    refused(lambda _: FSDPRWEngine(config), folder, "with 3 labels, and a reward model or critic has one")


def test_a_good_model_passes(model_path):
    check_model(model_path)


def test_the_check_does_not_import_torch(model_path):
    code = (
        "import sys; from arealite.utils.model_config import check_model; check_model(sys.argv[1]); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(model_path)], check=True)
