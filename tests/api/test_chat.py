"""Tokens of conversations: what follows a sampled turn equals the rendering of the whole conversation.

And their texts: those of many sequences at once equal those of each.
"""

import copy
import json
import random

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from arealite.api.chat import decode_all, encode_behind, encode_chat, encode_next, encode_text
from arealite.api.errors import DatasetError, RequestError
from tests.chat_templates import TEMPLATES, end_of_turn, make_chat_tokenizer
from tests.tiny_model import make_spaced_tokenizer, make_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
# How much of a history each template can render.
HAS_TOOLS = {"qwen25", "qwen3", "hermes", "llama3", "mistral"}
HAS_PARALLEL_CALLS = HAS_TOOLS - {"llama3"}


def random_text(rng):
    text = "".join(rng.choice("abcxyz 0189.,:{}<>\"'\n|[]/é") for _ in range(rng.randint(0, 30)))
    # Templates may strip a message.
    return f"a{text}b"


def random_history(rng, name):
    """Return turns: the messages of each, then a reply (text, and calls if it has some)."""
    turns, num_calls = [], 0
    for _ in range(rng.randint(1, 6)):
        if num_calls:
            messages = [
                {"role": "tool", "name": "add", "tool_call_id": f"abcdefgh{i}", "content": json.dumps(random_text(rng))}
                for i in range(num_calls)
            ]
        else:
            messages = [{"role": "user", "content": random_text(rng)}]
        most = 3 if name in HAS_PARALLEL_CALLS else 1
        num_calls = rng.randint(1, most) if name in HAS_TOOLS and rng.random() < 0.5 else 0
        turns.append((messages, random_text(rng), num_calls))
    return turns


def reply_of(name, text, num_calls):
    """Return a reply as a message, and the text that a model samples for it."""
    if not num_calls:
        return {"role": "assistant", "content": text}, text
    arguments = [{"text": f"{text}{i}"} for i in range(num_calls)]
    calls = [
        {"type": "function", "id": f"abcdefgh{i}", "function": {"name": "add", "arguments": own}}
        for i, own in enumerate(arguments)
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    dumped = [json.dumps(own, ensure_ascii=False) for own in arguments]
    if name == "mistral":
        functions = [f'{{"name": "add", "arguments": {own}}}' for own in dumped]
        return message, f"[TOOL_CALLS][{', '.join(functions)}]"
    if name == "llama3":
        return message, f'{{"name": "add", "parameters": {dumped[0]}}}'
    text = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {own}}}\n</tool_call>' for own in dumped)
    return message, text


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_turn_by_turn_equals_the_whole_conversation(name):
    tokenizer, rng = make_chat_tokenizer(name), random.Random(name)
    # Mistral and Qwen 3 are not prefix-preserving with tools and thoughts: those move with every question.
    tools = TOOLS if name in HAS_TOOLS - {"mistral"} else None
    kwargs = {"enable_thinking": True} if name == "qwen3" else {}
    num_checked = 0
    for _ in range(100):
        history, ids, sampled = [], [], []
        for messages, text, num_calls in random_history(rng, name):
            if history:
                ids += encode_next(tokenizer, messages, tools, sampled=sampled, **kwargs)
            else:
                ids = encode_chat(tokenizer, messages, tools, **kwargs)
            history += messages
            assert ids == encode_chat(tokenizer, history, tools, **kwargs), history
            num_checked += 1
            message, text = reply_of(name, text, num_calls)
            history.append(message)
            sampled = tokenizer.encode(text, add_special_tokens=False)
            if rng.random() < 0.8:
                # Otherwise the reply was cut off before its end.
                sampled += [tokenizer.convert_tokens_to_ids(end_of_turn(name))]
                ids += sampled
            else:
                ids += sampled
    assert num_checked > 200


def test_a_sampled_turn_is_kept_whatever_it_is(tokenizer):
    """Tokens that no encoder would make, none at all, or only an end: the turn stays, and the next one follows."""
    chat = make_chat_tokenizer("qwen25")
    end = chat.convert_tokens_to_ids("<|im_end|>")
    after = chat.encode("\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    message = [{"role": "user", "content": "hi"}]
    newline = chat.encode("\n", add_special_tokens=False)
    assert encode_next(chat, message, sampled=[end]) == after
    assert encode_next(chat, message, sampled=[5, end, *newline]) == after[1:]
    assert encode_next(chat, message, sampled=[]) == [end, *after]
    assert encode_next(chat, message, sampled=[end, 5]) == [end, *after]
    # A template without an end token of its own: the model ends by the end of the text.
    assert (
        tokenizer.decode(encode_next(tokenizer, message, sampled=[tokenizer.eos_token_id])) == "\n<user>hi\n<assistant>"
    )


def test_another_end_token_ends_a_turn_too():
    chat = make_chat_tokenizer("llama3")
    ids = encode_next(chat, [{"role": "tool", "content": "4"}], sampled=[5, chat.convert_tokens_to_ids("<|eom_id|>")])
    assert chat.decode(ids).startswith("<|start_header_id|>ipython")


def test_messages_that_contain_the_words_of_this_module():
    """Messages are data: they cannot move the place where the reply ends."""
    chat = make_chat_tokenizer("qwen25")
    for text in ("OneReplyOfTheAssistant", "OneArgumentOfACall", '<tool_call>{"name": "add"}</tool_call>'):
        for role in ("user", "tool"):
            ids = encode_next(chat, [{"role": role, "content": text}], sampled=[5])
            assert chat.decode(ids).count(text) == 1 and chat.decode(ids).startswith("<|im_end|>\n<|im_start|>user")


def test_what_a_template_cannot_do_is_an_error():
    mistral = make_chat_tokenizer("mistral")
    with pytest.raises(RequestError, match=r"roles \['user', 'assistant', 'system'\]: Only user"):
        encode_next(mistral, [{"role": "system", "content": "be brief"}], sampled=[5])
    forgetful = make_tokenizer()
    forgetful.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(RequestError, match="leaves out the reply"):
        encode_next(forgetful, [{"role": "user", "content": "x"}], sampled=[5])
    with pytest.raises(RequestError, match="cannot render messages"):
        encode_chat(forgetful, [])
    forgetful.chat_template = None
    with pytest.raises(DatasetError, match="no chat template"):
        encode_chat(forgetful, [{"role": "user", "content": "x"}])


class Shouting(PreTrainedTokenizerFast):
    """Decodes in a way of its own."""

    def _decode(self, *args, **kwargs):
        return super()._decode(*args, **kwargs).upper()


class Plain:
    """A tokenizer of somebody else, which does not know special tokens."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_many_sequences_at_once_have_the_texts_that_each_has_alone():
    own = make_tokenizer()
    sequences = [[], [own.eos_token_id], [*own.encode("one , two ."), own.eos_token_id, own.pad_token_id], [7] * 300]
    spaces = make_tokenizer()
    spaces.clean_up_tokenization_spaces = True
    shouting = Shouting(tokenizer_object=own.backend_tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    for tokenizer in (own, spaces, shouting, make_chat_tokenizer("qwen25")):
        for skips in (True, False):
            alone = [tokenizer.decode(ids, skip_special_tokens=skips) for ids in sequences]
            assert decode_all(tokenizer, sequences, skip_special_tokens=skips) == alone
            assert decode_all(tokenizer, sequences[:3], skip_special_tokens=skips) == alone[:3]
    # They differ where they should: else the texts above would prove nothing.
    assert {decode_all(each, sequences)[2] for each in (own, spaces, shouting)} == {
        "one , two .<eos><pad>", "one, two.<eos><pad>", "ONE , TWO .<EOS><PAD>"
    }  # fmt: skip
    assert decode_all(Plain(), [[104, 105], []]) == ["hi", ""]
    own.decode = lambda ids: "replaced"
    assert decode_all(own, [[7]]) == ["replaced"]


class Whispering(PreTrainedTokenizerFast):
    """Encodes in a way of its own."""

    def _encode_plus(self, text, *args, **kwargs):
        return super()._encode_plus(text.lower(), *args, **kwargs)


@pytest.mark.parametrize("text", ["", "one , two .", "One two", "three " * 500])
def test_a_text_has_the_tokens_that_its_tokenizer_gives_it(text):
    own, chat, cut = make_tokenizer(), make_chat_tokenizer("qwen25"), make_tokenizer()
    cut.backend_tokenizer.enable_truncation(2)
    whispering = Whispering(tokenizer_object=own.backend_tokenizer, unk_token="<pad>")
    framing = make_tokenizer()
    framing.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", special_tokens=[("<eos>", 1)])
    for tokenizer in (own, chat, whispering, framing, cut):
        for special in (True, False):
            expected = copy.deepcopy(tokenizer).encode(text, add_special_tokens=special)
            assert encode_text(tokenizer, text, add_special_tokens=special) == expected
    assert encode_text(framing, text) == [1, *encode_text(own, text)]


@pytest.mark.parametrize("text", ["", "more", " more", "\nmore", "  more"])
def test_a_text_that_follows_tokens_gets_no_space_of_the_tokenizer(text):
    for tokenizer in (make_spaced_tokenizer(), make_tokenizer()):
        assert tokenizer.decode(encode_behind(tokenizer, text)) == text
    chat = make_chat_tokenizer("qwen25")
    assert encode_behind(chat, text) == chat.encode(text, add_special_tokens=False)
