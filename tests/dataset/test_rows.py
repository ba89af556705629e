import gzip
import json

import pytest

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.dataset import load_dataset, load_tokenizer, require_columns

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
    assert len(load(tmp_path)) == 6
    with pytest.raises(DatasetError, match=r"split 'valid'; there are: test.jsonl.gz, train/a.jsonl"):
        load(tmp_path, split="valid")


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


def test_a_folder_of_save_to_disk_says_what_to_do(tmp_path):
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


def test_a_hub_name_without_the_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DatasetError, match=r"pip install 'arealite\[hub\]'"):
        load("openai/gsm8k")


def test_required_columns():
    require_columns(ROWS, ["q", "a"])
    with pytest.raises(DatasetError, match=r"needs the columns question, a; row 1 lacks question and has q, a"):
        require_columns(ROWS, ["question", "a"])


def test_a_folder_without_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=rf"cannot load a tokenizer from {tmp_path}: .*tokenizer_path"):
        load_tokenizer(str(tmp_path))
