"""Loading rows from files, folders and hubs."""

import gzip
import json
import sys
import types

import pytest

from arealite.api.cli_args import DatasetConfig, SFTConfig, ValidationDatasetConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.dataset import load_dataset, load_tokenizer, require_columns
from arealite.utils.config import load_config

ROWS = [{"q": "1+1", "a": 2}, {"q": "é", "a": None}]


def load(path, **kwargs):
    return load_dataset(DatasetConfig(path=str(path), **kwargs))


def test_json_files_and_folders(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.jsonl").write_text(lines + "\n")
    (tmp_path / "train" / "b.json").write_text(json.dumps(ROWS))
    with gzip.open(tmp_path / "test.jsonl.gz", "wt") as file:
        file.write(lines)
    assert load(tmp_path / "train" / "a.jsonl") == ROWS
    assert load(tmp_path, split="train") == ROWS * 2
    assert load(tmp_path, split="test") == ROWS
    with pytest.raises(DatasetError, match=r"split 'valid'; there are: test.jsonl.gz, train/a.jsonl"):
        load(tmp_path, split="valid")


def write(folder, *names):
    """One row in each file: the file's own name."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"from": name}) + "\n")


def names_read(path, role, **kwargs):
    return [row["from"] for row in load_dataset(role(path=str(path), **kwargs))]


@pytest.mark.parametrize(
    ("files", "train", "valid"),
    [
        (["train.jsonl", "test.jsonl"], ["train.jsonl"], ["test.jsonl"]),
        (["train-0.jsonl", "train-1.jsonl", "x.jsonl", "dev.jsonl"], ["train-0.jsonl", "train-1.jsonl"], ["dev.jsonl"]),
        (["train/a.jsonl", "test/a.jsonl", "validation/a.jsonl"], ["train/a.jsonl"], ["validation/a.jsonl"]),
        (["a.jsonl", "latest.jsonl"], ["a.jsonl", "latest.jsonl"], ["a.jsonl", "latest.jsonl"]),
    ],
)
def test_a_folder_is_read_by_role(tmp_path, files, train, valid, caplog):
    caplog.set_level("INFO", "arealite")
    write(tmp_path, *files)
    assert names_read(tmp_path, DatasetConfig) == train
    assert names_read(tmp_path, ValidationDatasetConfig) == valid
    assert ("valid_dataset: reading split" in caplog.text) == (train != valid)


def test_a_folder_without_the_wanted_split_names_the_choices(tmp_path):
    write(tmp_path, "train.jsonl", "more.jsonl")
    with pytest.raises(
        DatasetError, match=r"no validation or test split .*more.jsonl, train.jsonl.* valid_dataset.split"
    ):
        names_read(tmp_path, ValidationDatasetConfig)
    assert names_read(tmp_path, ValidationDatasetConfig, split="train") == ["train.jsonl"]
    (tmp_path / "train.jsonl").rename(tmp_path / "test.jsonl")
    with pytest.raises(DatasetError, match=r"no training split .*more.jsonl, test.jsonl.* train_dataset.split"):
        names_read(tmp_path, DatasetConfig)


@pytest.mark.parametrize(
    ("splits", "train", "valid"),
    [
        (["train", "test"], "train", "test"),
        (["train", "validation", "test"], "train", "validation"),
        (["default"], "default", "default"),
        (["train"], "train", None),
        (["test"], None, "test"),
    ],
)
def test_a_hub_dataset_is_read_by_role(monkeypatch, splits, train, valid):
    def load_dataset(path, name, split):
        found = {word: [{"from": word}] for word in splits}
        return found if split is None else found[split]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for role, expected in ((DatasetConfig, train), (ValidationDatasetConfig, valid)):
        if expected is None:
            with pytest.raises(DatasetError, match=rf"it has: {splits[0]}"):
                names_read("openai/gsm8k", role)
        else:
            assert names_read("openai/gsm8k", role) == [expected]
        assert names_read("openai/gsm8k", role, split=splits[0]) == [splits[0]]


def test_the_validation_set_of_a_config_knows_its_role():
    arguments = ["experiment_name=e", "trial_name=t", "model.path=m", "train_dataset.path=d", "valid_dataset.path=d"]
    config = load_config(arguments, SFTConfig)
    assert config.valid_dataset.is_validation and not config.train_dataset.is_validation


def test_csv(tmp_path):
    (tmp_path / "a.csv").write_text('\ufeffq,a\r\n1+1,2\r\n"é, ""so""\nit is",\r\n')
    assert load(tmp_path / "a.csv") == [{"q": "1+1", "a": "2"}, {"q": 'é, "so"\nit is', "a": ""}]


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet") == ROWS


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2 is not valid JSON"),
        ("a.jsonl", "[1, 2]\n", "row 1 is list, not an object"),
        ("a.json", '{"a": 1}', "holds one object; a list of rows is needed"),
        ("a.json", "[1", "is not valid JSON"),
        ("a.csv", "q,a\n1,2\n3\n", "line 3 has another number of values than the header"),
        ("a.csv", 'q,a\n1,"2', "is not valid CSV after line 1"),
    ],
)
def test_bad_files(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    with pytest.raises(DatasetError, match=expected):
        load(tmp_path / name)


def test_a_folder_of_save_to_disk_is_an_error_with_advice(tmp_path):
    for name in ("dataset_info.json", "state.json", "data-00000-of-00001.arrow"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(DatasetError, match="write it with `to_parquet`"):
        load(tmp_path)


def test_missing_paths(tmp_path):
    with pytest.raises(DatasetError, match="there is no dataset at"):
        load(tmp_path / "none")
    with pytest.raises(DatasetError, match="there is no dataset at"):
        load("none.jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"holds no \.jsonl"):
        load(tmp_path / "empty")


def test_a_hub_name_needs_the_hub_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DatasetError, match=r"pip install 'arealite\[hub\]'"):
        load("openai/gsm8k")


def test_required_columns():
    require_columns(ROWS, ["q", "a"])
    with pytest.raises(DatasetError, match=r"needs the columns question, a; row 1 lacks question and has q, a"):
        require_columns(ROWS, ["question", "a"])


def test_a_folder_without_tokenizer_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=rf"cannot load a tokenizer from {tmp_path}: .*tokenizer_path"):
        load_tokenizer(str(tmp_path))
