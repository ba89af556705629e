"""Rows of files that are read when they are needed equal those that are loaded at once."""

import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import DatasetError
from arealite.dataset import StatefulDataLoader, load_dataset
from arealite.dataset import streamed as module
from arealite.dataset.prompts import AS_THEY_ARE, load_prompts
from arealite.dataset.streamed import open_streamed

ROWS = [{"prompt": "é" * (i % 7 + 1) + str(i), "n": i} for i in range(100)]


def write(folder, kind):
    if kind == "jsonl":
        (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"".join(json.dumps(r).encode() + b"\n" for r in ROWS[:60]))
        (folder / "b.jsonl").write_text("\n\n" + "\n".join(json.dumps(r, ensure_ascii=False) for r in ROWS[60:]))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet", row_group_size=7)
    else:
        table = pyarrow.Table.from_pylist(ROWS)
        with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    return DatasetConfig(path=str(folder), streaming=True, batch_size=8)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_streamed_rows_equal_loaded_ones(tmp_path, kind):
    config = write(tmp_path, kind)
    rows = open_streamed(config)
    assert len(rows) == 100 and list(rows) == load_dataset(config) == ROWS
    assert rows[-1] == ROWS[-1] and rows[3:5] == ROWS[3:5]
    with pytest.raises(IndexError):
        rows[100]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_batches_of_streamed_prompts_resume_exactly(tmp_path, tokenizer, kind, capsys):
    config = write(tmp_path, kind)
    config.max_length = 24
    rows = load_prompts(config, AS_THEY_ARE, tokenizer)
    kept = [row["n"] for row in rows]
    assert 0 < len(kept) < 100
    assert f"note: {100 - len(kept)} of 100 rows of {tmp_path}" in capsys.readouterr().out
    config.streaming = False
    assert list(rows) == load_prompts(config, AS_THEY_ARE, tokenizer)

    def loader():
        return StatefulDataLoader(rows, config, seed=2)

    straight, first, second = loader().cycle(), loader(), loader()
    expected = [[row["n"] for row in next(straight)] for _ in range(12)]
    batches = first.cycle()
    found = [[row["n"] for row in next(batches)] for _ in range(5)]
    second.load_state_dict(first.state_dict())
    batches = second.cycle()
    assert found + [[row["n"] for row in next(batches)] for _ in range(7)] == expected
    epoch = [n for batch in expected[: len(loader())] for n in batch]
    assert set(epoch) <= set(kept) and len(set(epoch)) == len(epoch) and epoch != sorted(epoch)


def test_few_row_groups_are_in_memory(tmp_path):
    config = write(tmp_path, "parquet")
    rows = open_streamed(config)
    for batch in StatefulDataLoader(rows, config):
        assert batch and len(rows._groups) <= module.WINDOW


def test_an_index_that_cannot_be_written_is_not_kept(tmp_path, tokenizer, monkeypatch, caplog):
    (tmp_path / "data").mkdir()
    config = write(tmp_path / "data", "jsonl")

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_file", fail)
    rows = load_prompts(config, AS_THEY_ARE, tokenizer, cache=tmp_path / "run" / "data")
    assert len(rows) == 100 and "not kept" in caplog.text and "No space left" in caplog.text


def test_the_index_is_built_once_and_again_for_a_changed_file(tmp_path, tokenizer, monkeypatch):
    config = write(tmp_path / "data" if (tmp_path / "data").mkdir() is None else tmp_path, "jsonl")
    cache, passes = tmp_path / "run" / "data", []
    find = module._line_offsets
    monkeypatch.setattr(module, "_line_offsets", lambda file: (passes.append(file.name), find(file))[1])
    first = list(load_prompts(config, AS_THEY_ARE, tokenizer, cache=cache))
    assert list(load_prompts(config, AS_THEY_ARE, tokenizer, cache=cache)) == first
    assert passes == ["a.jsonl", "b.jsonl"]
    with (tmp_path / "data" / "b.jsonl").open("a") as file:
        file.write('\n{"prompt": "new", "n": 100}\n')
    os.utime(tmp_path / "data" / "b.jsonl", ns=(1, 1))
    assert len(load_prompts(config, AS_THEY_ARE, tokenizer, cache=cache)) == 101
    assert passes == ["a.jsonl", "b.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "a.jsonl, row 2: not a valid row"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "a.jsonl, row 1: not a valid row"),
        ("a.jsonl", b"[1]\n", "a.jsonl, row 1: not a valid row"),
        ("a.jsonl", b"\n", "is empty"),
        ("a.parquet", b"no", "cannot read .*a.parquet"),
        ("a.csv", b"prompt\nx\n", "cannot be read row by row: give .jsonl, .parquet or .arrow"),
    ],
)
def test_bad_files_are_refused(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        load_prompts(DatasetConfig(path=str(tmp_path / name), streaming=True), AS_THEY_ARE, tokenizer)


def test_damage_behind_the_first_row_group_is_an_error_of_the_dataset(tmp_path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"a": "x" * i} for i in range(9)]), file, row_group_size=3)
    start = pyarrow.parquet.ParquetFile(file).metadata.row_group(1).column(0).dictionary_page_offset
    whole = file.read_bytes()
    file.write_bytes(whole[:start] + b"\xff" * 8 + whole[start + 8 :])
    rows = open_streamed(DatasetConfig(path=str(file), streaming=True))
    assert rows[2] == {"a": "xx"}
    with pytest.raises(DatasetError, match=r"cannot read .*a\.parquet, row 4: "):
        rows[3]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_text_of_a_table_that_is_not_utf8_is_an_error_of_the_dataset(tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    table = pyarrow.table({"a": pyarrow.array([b"good", b"\xff"]).view(pyarrow.string())})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_stream(str(file), table.schema) as writer:
            writer.write_table(table)
    rows = open_streamed(DatasetConfig(path=str(file), streaming=True))
    assert rows[0] == {"a": "good"}
    with pytest.raises(DatasetError, match=rf"cannot read .*a\.{kind}, row 2: .*utf-8"):
        rows[1]
