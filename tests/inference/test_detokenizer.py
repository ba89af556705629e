"""Text of growing sequences: nothing is given out that is taken back, whatever tokens split."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from arealite.inference.detokenizer import IncrementalText


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
    """As Llama 2 and Gemma have it: letters, and a token per byte for what is none of them."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abEND\u2581"]
    made = Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>")


def test_long_runs_of_bytes_are_the_text_they_are(by_fallback):
    text = "日本語の文章 a 🙂🙂🙂🙂🙂🙂 b"
    given, follower = feed(by_fallback, text, [])
    assert given == text == follower.text


def test_a_stop_string_in_a_run_of_bytes_is_found_at_once(by_fallback):
    given, follower = feed(by_fallback, "a🙂\n日本", ["\n"])
    assert (given, follower.text, follower.matched) == ("a🙂", "a🙂", "\n")
    given, follower = feed(by_fallback, "日\n本\nE", ["\n"], min_tokens=5)
    assert (given, follower.matched, len(follower._ids)) == ("日\n本", "\n", 8)


@pytest.mark.parametrize("skip", [True, False])
def test_bytes_are_given_out_as_the_whole_text_has_them(by_fallback, skip):
    rng = random.Random(0)
    size = len(by_fallback)
    for _ in range(500):
        ids = by_fallback.encode("".join(rng.choice("a日🙂 \n") for _ in range(5)))
        for _ in range(6):
            ids.insert(rng.randrange(len(ids) + 1), rng.randrange(size))
        whole = by_fallback.decode(ids, skip_special_tokens=skip)
        cut = rng.randrange(len(whole))
        follower = IncrementalText(by_fallback, ["aEND", whole[cut : cut + 3]], skip)
        given = ""
        for token in ids:
            given += follower.add(token)
            if follower.matched:
                break
        assert whole.startswith(given) or follower.matched
        assert given == follower.text if follower.matched else follower.text.startswith(given)


def feed(tokenizer, text: str, stop: list[str], min_tokens: int = 0) -> tuple[str, IncrementalText]:
    """What is given out piece by piece until a stop string is found."""
    follower, given = IncrementalText(tokenizer, stop, skip_special_tokens=True), ""
    for i, token in enumerate(tokenizer.encode(text)):
        given += follower.add(token, may_stop=i + 1 >= min_tokens)
        if follower.matched is not None:
            break
    return given, follower


def test_characters_come_whole(by_bytes):
    text = "héllo 🙂🎉 日本語 e\u0301 👨\u200d👩 a\ufffdb"
    follower = IncrementalText(by_bytes, [], skip_special_tokens=True)
    pieces = [follower.add(token) for token in by_bytes.encode(text)]
    assert "".join(pieces) == text == follower.text
    assert "🙂" in pieces and "本" in pieces


def test_bytes_that_are_no_text_do_not_pile_up(by_bytes):
    lone = by_bytes.encode("é")[1]
    follower = IncrementalText(by_bytes, [], skip_special_tokens=True)
    given = "".join(follower.add(lone) for _ in range(100))
    assert set(given) == {"\ufffd"} and len(given) > 80
    assert max(len(follower._ids) - follower._start, 0) < 100


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
def test_a_stop_string_is_cut_and_none_of_it_was_given_out(by_bytes, stop, kept, matched):
    given, follower = feed(by_bytes, "so 🎉 ENEND then", stop)
    assert (follower.text, follower.matched) == (kept, matched)
    assert given == kept


def test_a_stop_string_is_found_although_its_token_begins_the_next_character(by_bytes):
    """Vocabularies have tokens like `END` followed by the first byte of a character."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("END日x")[0][0]
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab | {alphabet[:4]: len(vocab)}, merges=[]))
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    follower = IncrementalText(tokenizer, ["END"], skip_special_tokens=True)
    assert follower.add(vocab["x"]) == "x"
    assert follower.add(len(vocab)) == ""
    assert (follower.matched, follower.text) == ("END", "x")
    other = IncrementalText(tokenizer, ["ENDED"], skip_special_tokens=True)
    pieces = [other.add(token) for token in (vocab["x"], len(vocab), *(vocab[char] for char in alphabet[4:]))]
    assert "".join(pieces) == other.text == "xEND日x" and other.matched is None


def test_what_only_began_like_a_stop_string_is_given_out_late(by_bytes):
    given, follower = feed(by_bytes, "abcabd", ["abcabc", "abx"])
    assert given == "abcabd" == follower.text
    assert feed(by_bytes, "abcab", ["abcabc"])[0] == ""  # the rest is in the output's own text


def test_before_the_least_length_nothing_stops_and_nothing_is_lost(by_bytes):
    given, follower = feed(by_bytes, "a.b.c.d", ["."], min_tokens=5)
    assert (given, follower.text, follower.matched) == ("a.b.c", "a.b.c", ".")
    assert feed(by_bytes, "xENDyENDz", ["END", "a longer one"], min_tokens=5)[0] == "xENDy"


def test_pieces_are_a_beginning_of_the_whole_text_whatever_is_sampled(by_bytes):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(rng.choice("aé日🙂 \ufffd") for _ in range(8))
        ids = by_bytes.encode(text)[: rng.randrange(1, 24)] + [rng.randrange(256) for _ in range(3)]
        follower = IncrementalText(by_bytes, ["é日", "🙂🙂🙂"], skip_special_tokens=True)
        given = ""
        for token in ids:
            given += follower.add(token)
            if follower.matched:
                break
        assert by_bytes.decode(ids).startswith(given)
        assert given == follower.text or follower.matched is None
