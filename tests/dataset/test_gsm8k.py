"""Rows of GSM8K for supervised training and for RL."""

import pytest

from arealite.api.cli_args import DatasetConfig, GenerationHyperparameters
from arealite.api.errors import DatasetError
from arealite.dataset import collate_sft, get_gsm8k_rl, get_gsm8k_sft, tokenize_sft
from arealite.workflow.rlvr import RLVRWorkflow


def test_supervised_rows_train_the_answer_and_the_end_token(gsm8k_path, tokenizer):
    rows = get_gsm8k_sft(DatasetConfig(path=str(gsm8k_path)), tokenizer)
    assert len(rows) == 32
    ids, mask = rows[3]["input_ids"], rows[3]["loss_mask"]
    trained = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(trained) == "3+4\n#### 7<eos>"
    assert tokenizer.decode(ids[: mask.index(1)]).endswith("How many?\n")


def test_rl_rows_are_chats_with_the_answer(gsm8k_path, tokenizer):
    rows = get_gsm8k_rl(DatasetConfig(path=str(gsm8k_path)), tokenizer)
    assert set(rows[0]) == {"messages", "answer"} and rows[2]["answer"].endswith("#### 5")
    assert rows[0]["messages"][0]["role"] == "user" and "Tom has 0 pens" in rows[0]["messages"][0]["content"]


def test_prompts_are_plain_text_without_a_chat_template(gsm8k_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (row, *_) = get_gsm8k_rl(DatasetConfig(path=str(gsm8k_path), max_length=500), tokenizer)
    assert set(row) == {"prompt", "answer"}
    assert row["prompt"].startswith("Question: Tom has") and row["prompt"].endswith("\nAnswer:")
    workflow = RLVRWorkflow(lambda **_: 0.0, GenerationHyperparameters(), tokenizer)
    assert workflow.encode_prompt(row) == tokenizer.encode(row["prompt"])
    with pytest.raises(DatasetError, match="no chat template"):
        workflow.encode_prompt({"messages": [{"role": "user", "content": "Hi"}]})


def test_long_rows_are_left_out(gsm8k_path, tokenizer):
    lengths = [len(r["input_ids"]) for r in get_gsm8k_sft(DatasetConfig(path=str(gsm8k_path)), tokenizer)]
    limit = min(lengths)
    kept = get_gsm8k_sft(DatasetConfig(path=str(gsm8k_path), max_length=limit), tokenizer)
    assert len(kept) == lengths.count(limit)
    with pytest.raises(DatasetError, match=r"all 32 rows .* longer than max_length=5"):
        get_gsm8k_rl(DatasetConfig(path=str(gsm8k_path), max_length=5), tokenizer)


def test_missing_columns_are_an_error(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "answer": "y"}\n')
    with pytest.raises(DatasetError, match="lacks question and has prompt, answer"):
        get_gsm8k_rl(DatasetConfig(path=str(tmp_path / "a.jsonl")), tokenizer)


def test_collate_pads_on_the_right(tokenizer):
    rows = [tokenize_sft("ab", "c", tokenizer), tokenize_sft("a", "bcd", tokenizer)]
    batch = collate_sft(rows, tokenizer)
    assert batch["input_ids"].shape == (2, 5)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["loss_mask"].tolist() == [[0, 0, 1, 1, 0], [0, 1, 1, 1, 1]]
    assert batch["input_ids"][0, -1] == tokenizer.pad_token_id
