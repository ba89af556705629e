"""Loading rows from files, folders and hubs."""

import gzip
import json
import os
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest

from arealite.api.cli_args import DatasetConfig, SFTConfig, ValidationDatasetConfig
from arealite.api.errors import ConfigError, DatasetError
from arealite.dataset import load_dataset, load_tokenizer, map_rows, require_columns, require_text
from arealite.utils.config import load_config
from tests.tiny_model import make_tokenizer

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
        (["train.jsonl", ".ipynb_checkpoints/train-checkpoint.jsonl", "._train.jsonl", "test.jsonl"],
         ["train.jsonl"], ["test.jsonl"]),
        ([".cache/a.json", "a.jsonl", ".b.csv"], ["a.jsonl"], ["a.jsonl"]),
        (["a.jsonl", "latest.jsonl"], ["a.jsonl", "latest.jsonl"], ["a.jsonl", "latest.jsonl"]),
    ],
)  # fmt: skip
def test_a_folder_is_read_by_role(tmp_path, files, train, valid, caplog):
    caplog.set_level("INFO", "arealite")
    write(tmp_path, *files)
    assert names_read(tmp_path, DatasetConfig) == train
    assert names_read(tmp_path, ValidationDatasetConfig) == valid
    assert ("valid_dataset: reading split" in caplog.text) == (train != valid)


def test_a_download_of_a_hub_dataset_has_a_folder_for_each_configuration(tmp_path):
    write(tmp_path, "main/train-0.jsonl", "main/test-0.jsonl", "socratic/train-0.jsonl", "socratic/test-0.jsonl")
    assert names_read(tmp_path, DatasetConfig, name="main") == ["main/train-0.jsonl"]
    assert names_read(tmp_path, DatasetConfig, name="socratic", split="test") == ["socratic/test-0.jsonl"]
    # One configuration alone may lie at the top.
    assert names_read(tmp_path / "main", DatasetConfig, name="main") == ["main/train-0.jsonl"]


def test_a_folder_may_be_in_a_hidden_one(tmp_path):
    write(tmp_path / ".cache", "a.jsonl")
    assert names_read(tmp_path / ".cache", DatasetConfig) == ["a.jsonl"]


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
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert load(tmp_path / "a.parquet") == ROWS


GOOD_LINE = b'{"a": 1}\n'
DEEP = b"[" * 100_000 + b"]" * 100_000
COMPRESSED = gzip.compress(b"".join(b'{"a": %d}\n' % i for i in range(1000)))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', "line 3: not valid JSON"),
        ("a.jsonl", b"[1, 2]\n", "row 1 is list, not an object"),
        ("a.jsonl", GOOD_LINE + b'{"a": ' + DEEP + b"}\n", "line 2: its values are nested too deeply"),
        ("a.jsonl", GOOD_LINE + b'{"a": ' + b"1" * 10_000 + b"}\n", "line 2: .*digits"),
        ("a.jsonl", GOOD_LINE * 5000 + b'{"a": "\xff"}\n', "row 5001 holds text that is not valid UTF-8"),
        ("a.jsonl", GOOD_LINE + b'{"a": ["\\ud800"]}\n', "row 2 holds text that is not valid UTF-8"),
        ("a.jsonl.gz", COMPRESSED[: len(COMPRESSED) // 2], "line .*ended before the end-of-stream"),
        ("a.jsonl.gz", COMPRESSED[:20] + b"\xff\xff\xff" + COMPRESSED[23:], "line 1: .*decompressing"),
        ("a.jsonl.gz", b"plain text", "Not a gzipped file"),
        ("a.jsonl.gz", b"", "is empty"),
        ("a.json", b'{"a": 1}', r"holds one value \(dict\); a list of rows is needed"),
        ("a.json", b"5", r"holds one value \(int\)"),
        ("a.json", b"null", r"holds one value \(NoneType\)"),
        ("a.json", b'"text"', r"holds one value \(str\)"),
        ("a.json", b"[1", "not valid JSON"),
        ("a.json", b"", "not valid JSON"),
        ("a.json", GOOD_LINE * 2, r"not valid JSON: Extra data: line 2 .* a row: rename it to end in \.jsonl"),
        ("a.json", DEEP, "nested too deeply"),
        ("a.json", b'[{"a": ' + b"1" * 10_000 + b"}]", "digits"),
        ("a.json", b'[{"a": "\xff"}]', "row 1 holds text that is not valid UTF-8"),
        ("a.csv", b"q,a\n1,2\n3\n", "line 3: it has another number of values than the header"),
        ("a.csv", b'q,a\n1,"2', "line 2: unexpected end of data"),
        ("a.csv", b"q,a,q\n1,2,3\n", "line 1: the header names a column twice"),
        ("a.csv", b"q,a\n1,\xff\n", "row 1 holds text that is not valid UTF-8"),
        ("a.csv", b"", "is empty"),
        ("a.txt", b"1+1?\n", r"line 1: not valid JSON.*\. A file that is no \.jsonl, .* is read as lines of JSON"),
        ("a.parquet", b"", "a.parquet"),
        ("a.parquet", b"PAR1" + b"x" * 1000 + b"PAR1", "a.parquet"),
    ],
)
def test_bad_files_are_one_line_with_the_file_and_the_row(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=expected) as caught:
        load(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_damaged_parquet_files_are_errors_of_the_dataset(tmp_path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": i, "b": "x" * i} for i in range(100)]), file)
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:20] + b"\xff" * 100 + whole[120:]):
        file.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"cannot read .*a\.parquet: "):
            load(file)


def test_csv_fields_may_be_long(tmp_path):
    text = "x" * 1_000_000
    (tmp_path / "a.csv").write_text(f"q,a\n{text},1\n")
    assert load(tmp_path / "a.csv") == [{"q": text, "a": "1"}]


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DatasetError, match="neither a file nor a folder"):
        load(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(DatasetError, match=r"holds no \.jsonl"):
        load(tmp_path / "b.jsonl")


@pytest.mark.parametrize("form", ["stream", "file"])
def test_arrow_files_and_folders_of_save_to_disk(tmp_path, form):
    folder = tmp_path / "data" / "train"
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(ROWS)
    new = pyarrow.ipc.new_stream if form == "stream" else pyarrow.ipc.new_file
    for name in ("data-00000-of-00001.arrow", "cache-0123.arrow"):
        with new(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    # What `save_to_disk` writes beside the rows.
    (folder / "state.json").write_text('{"_split": "train"}')
    (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert load(tmp_path / "data") == load(folder) == load(folder / "data-00000-of-00001.arrow") == ROWS
    (folder / "data-00000-of-00001.arrow").write_text("{}")
    with pytest.raises(DatasetError, match=r"cannot read .*arrow"):
        load(folder)


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
    assert map_rows(ROWS, lambda row: require_columns(row, "q", "a"), "d.jsonl") == ROWS
    with pytest.raises(DatasetError, match=r"d.jsonl, row 1: it needs the columns question, a; it lacks question and"):
        map_rows(ROWS, lambda row: require_text(row, "question", "a"), "d.jsonl")


def test_columns_that_must_be_text():
    with pytest.raises(DatasetError, match=r"d.jsonl, row 2: `a` must be text, not NoneType"):
        map_rows([{"a": ""}, {"a": None}], lambda row: require_text(row, "a"), "d.jsonl")


def test_a_folder_without_tokenizer_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=rf"cannot load a tokenizer from {tmp_path}: .*tokenizer_path"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma"])
def test_a_model_folder_without_tokenizer_is_refused(tmp_path, kind):
    """For these transformers makes a tokenizer that knows special tokens only."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ConfigError, match=r"cannot load a tokenizer from .* There is none"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_for_chat_needs_a_template(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "chat")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    assert load_tokenizer(str(tmp_path / "chat"), for_chat=True).chat_template
    load_tokenizer(str(tmp_path / "plain"))
    with pytest.raises(ConfigError, match=r"plain has no chat template.*instruct model"):
        load_tokenizer(str(tmp_path / "plain"), for_chat=True)
