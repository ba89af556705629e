"""Tests of incremental detokenization: returned text never changes, however tokens split characters."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arealite.protocol.detokenizer import IncrementalText


@pytest.fixture(scope="module")
def by_bytes() -> PreTrainedTokenizerFast:
    """One token per byte, so that every character beyond ASCII is split."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def by_fallback() -> PreTrainedTokenizerFast:
    """Letters, and byte tokens for all other characters, as in Llama 2 and Gemma."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abEND\u2581"]
    made = Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


def test_long_runs_of_byte_tokens_decode_to_the_text(by_fallback):
    text = "日本語の文章 a 🙂🙂🙂🙂🙂🙂 b"
    returned, incremental = feed(by_fallback, text, [])
    assert returned == text == incremental.text


def test_stop_string_in_a_run_of_byte_tokens_is_found_at_once(by_fallback):
    returned, incremental = feed(by_fallback, "a🙂\n日本", ["\n"])
    assert (returned, incremental.text, incremental.matched) == ("a🙂", "a🙂", "\n")
    returned, incremental = feed(by_fallback, "日\n本\nE", ["\n"], min_tokens=5)
    assert (returned, incremental.matched, len(incremental._ids)) == ("日\n本", "\n", 8)


@pytest.mark.parametrize("skip", [True, False])
def test_random_byte_tokens_decode_like_the_whole_text(by_fallback, skip):
    rng = random.Random(0)
    size = len(by_fallback)
    for _ in range(500):
        ids = by_fallback.encode("".join(rng.choice("a日🙂 \n") for _ in range(5)))
        for _ in range(6):
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(size))
        whole = by_fallback.decode(ids, skip_special_tokens=skip)
        cut = rng.randrange(len(whole))
        incremental = IncrementalText(by_fallback, ["aEND", whole[cut : cut + 3]], skip)
        returned = ""
        for token in ids:
            returned += incremental.add(token)
            if incremental.matched:
                break
        assert whole.startswith(returned) or incremental.matched
        assert returned == incremental.text if incremental.matched else incremental.text.startswith(returned)


def feed(tokenizer, text: str, stop: list[str], min_tokens: int = 0) -> tuple[str, IncrementalText]:
    """Add tokens until a stop string is found; returns the joined pieces and the detokenizer."""
    incremental, returned = IncrementalText(tokenizer, stop, skip_special_tokens=True), ""
    for i, token in enumerate(tokenizer.encode(text)):
        returned += incremental.add(token, may_stop=i + 1 >= min_tokens)
        if incremental.matched is not None:
            break
    return returned, incremental


def test_characters_are_not_split(by_bytes):
    text = "héllo 🙂🎉 日本語 e\u0301 👨\u200d👩 a\ufffdb"
    incremental = IncrementalText(by_bytes, [], skip_special_tokens=True)
    pieces = [incremental.add(token) for token in by_bytes.encode(text)]
    assert "".join(pieces) == text == incremental.text
    assert "🙂" in pieces and "本" in pieces


def test_invalid_bytes_are_not_held_back_forever(by_bytes):
    lone = by_bytes.encode("é")[1]
    incremental = IncrementalText(by_bytes, [], skip_special_tokens=True)
    returned = "".join(incremental.add(lone) for _ in range(100))
    assert set(returned) == {"\ufffd"} and len(returned) > 80
    assert max(len(incremental._ids) - incremental._start, 0) < 100


@pytest.mark.parametrize(
    ("stop", "kept", "matched"),
    [
        (["END"], "so 🎉 EN", "END"),
        (["🎉"], "so ", "🎉"),
        (["\n\n", "END"], "so 🎉 EN", "END"),
        (["E", "ENEND"], "so 🎉 ", "E"),
        (["ND then"], "so 🎉 ENE", "ND then"),
        (["END never"], "so 🎉 ENEND then", None),
    ],
)
def test_stop_string_is_removed_and_never_returned(by_bytes, stop, kept, matched):
    returned, incremental = feed(by_bytes, "so 🎉 ENEND then", stop)
    assert (incremental.text, incremental.matched) == (kept, matched)
    assert returned == kept


def test_stop_string_is_found_in_a_token_with_a_partial_character(by_bytes):
    """Vocabularies have tokens like `END` followed by the first byte of a character."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("END日x")[0][0]
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab | {alphabet[:4]: len(vocab)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    incremental = IncrementalText(tokenizer, ["END"], skip_special_tokens=True)
    assert incremental.add(vocab["x"]) == "x"
    assert incremental.add(len(vocab)) == ""
    assert (incremental.matched, incremental.text) == ("END", "x")
    other = IncrementalText(tokenizer, ["ENDED"], skip_special_tokens=True)
    pieces = [other.add(token) for token in (vocab["x"], len(vocab), *(vocab[char] for char in alphabet[4:]))]
    assert "".join(pieces) == other.text == "xEND日x" and other.matched is None


def test_prefix_of_a_stop_string_is_returned_later(by_bytes):
    returned, incremental = feed(by_bytes, "abcabd", ["abcabc", "abx"])
    assert returned == "abcabd" == incremental.text
    assert feed(by_bytes, "abcab", ["abcabc"])[0] == ""  # the final output has the rest


def test_stop_strings_before_the_minimum_length_are_text(by_bytes):
    returned, incremental = feed(by_bytes, "a.b.c.d", ["."], min_tokens=5)
    assert (returned, incremental.text, incremental.matched) == ("a.b.c", "a.b.c", ".")
    assert feed(by_bytes, "xENDyENDz", ["END", "a longer one"], min_tokens=5)[0] == "xENDy"


def test_pieces_are_a_prefix_of_the_text_for_random_tokens(by_bytes):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("aé日🙂 \ufffd") for _ in range(8))
        ids = by_bytes.encode(text)[: rng.randrange(1, 24)] + [rng.randrange(256) for _ in range(3)]
        incremental = IncrementalText(by_bytes, ["é日", "🙂🙂🙂"], skip_special_tokens=True)
        returned = ""
        for token in ids:
            returned += incremental.add(token)
            if incremental.matched:
                break
        assert by_bytes.decode(ids).startswith(returned)
        assert returned == incremental.text or incremental.matched is None
