"""A tiny model that knows one conversation by heart: it calls a tool, then answers with the tool's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
USER = {"role": "user", "content": "2+2?"}
ARGUMENTS = {"a": 2, "b": 2}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
FIRST, SECOND = f"Sure. {CALL}", "It is 4."
TEMPLATE = """{% if tools %}<tools>{{ tools | length }}
{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


def write_tokenizer(folder: Path) -> Any:
    """Write a tokenizer as Qwen's, but with one token per byte; returns what a server loads."""
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return AutoTokenizer.from_pretrained(folder)


def prompt_of(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    return tokenizer.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)


def history(call_id: str = "c") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
    return [USER, {"role": "assistant", "content": "Sure.", "tool_calls": [call]}, {"role": "tool", "content": "4"}]


def write_model(folder: Path) -> None:
    """Train the model until it repeats its answers, and save it with its tokenizer."""
    tokenizer = write_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    first = prompt_of(tokenizer, [USER])
    pairs = [(first, FIRST), (first, CALL), (prompt_of(tokenizer, history()), SECOND)]
    # The second answer is one that a `tool_choice` forces: its beginning is not the model's.
    skipped = (0, len(tokenizer.encode('<tool_call>\n{"name":')), 0)
    rows, labels = [], []
    for (prompt, answer), skip in zip(pairs, skipped, strict=True):
        head, tail = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
        rows.append([*head, *tail, tokenizer.eos_token_id])
        labels.append([-100] * (len(head) + skip) + [*tail[skip:], tokenizer.eos_token_id])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    target = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(300):
        loss = model(input_ids=ids, labels=target).loss
        if loss < 0.003:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.01, f"the model has not learnt its answers: loss {loss:.3f}"
    model.save_pretrained(folder)
