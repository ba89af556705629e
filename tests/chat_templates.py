"""Chat templates like those of well-known models, abridged, and a small tokenizer for each."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# Each: the template, the token that ends a turn, and the other special tokens.
_CHATML_TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
"""
_CHATML_RESULT = """\
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
"""
_CALL = """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
"""

QWEN25 = f"""{_CHATML_TOOLS}
{{%- for message in messages %}}
{{%- if message.role in ('user', 'system') or (message.role == 'assistant' and not message.tool_calls) %}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- elif message.role == 'assistant' %}}
{{{{- '<|im_start|>assistant' }}}}{{%- if message.content %}}{{{{- '\\n' + message.content }}}}{{%- endif %}}
{{%- for call in message.tool_calls %}}{{{{- '\\n' }}}}{_CALL}{{%- endfor %}}{{{{- '<|im_end|>\\n' }}}}
{_CHATML_RESULT}{{%- endif %}}"""

# Removes the thoughts of earlier turns, and thinks in the last one.
QWEN3 = f"""{_CHATML_TOOLS}
{{%- set ns = namespace(last=-1) %}}
{{%- for message in messages %}}
{{%- if message.role == 'user' %}}{{%- set ns.last = loop.index0 %}}{{%- endif %}}{{%- endfor %}}
{{%- for message in messages %}}
{{%- if message.role in ('user', 'system') %}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- elif message.role == 'assistant' %}}
{{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}}
{{{{- '<|im_start|>assistant\\n' }}}}
{{%- if loop.index0 > ns.last and loop.last %}}{{{{- '<think>\\n\\n</think>\\n\\n' }}}}{{%- endif %}}
{{{{- content }}}}
{{%- for call in message.tool_calls or [] %}}
{{%- if content or not loop.first %}}{{{{- '\\n' }}}}{{%- endif %}}{_CALL}{{%- endfor %}}{{{{- '<|im_end|>\\n' }}}}
{_CHATML_RESULT}{{%- if enable_thinking is defined and not enable_thinking %}}{{{{- '<think>\\n\\n</think>\\n\\n' }}}}
{{%- endif %}}{{%- endif %}}"""

HERMES = f"""{_CHATML_TOOLS}
{{%- for message in messages %}}
{{%- if message.role in ('user', 'system') or (message.role == 'assistant' and not message.tool_calls) %}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}}}
{{%- elif message.role == 'assistant' %}}
{{{{- '<|im_start|>assistant' }}}}
{{%- for call in message.tool_calls %}}{{{{- '\\n' }}}}{_CALL}{{%- endfor %}}{{{{- '<|im_end|>\\n' }}}}
{{%- elif message.role == 'tool' %}}
{{%- if loop.previtem.role != 'tool' %}}{{{{- '<|im_start|>tool\\n' }}}}{{%- endif %}}
{{{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' }}}}
{{%- if loop.last or loop.nextitem.role != 'tool' %}}{{{{- '<|im_end|>' }}}}{{%- endif %}}{{{{- '\\n' }}}}
{{%- endif %}}{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""

# Trims every message, and has one call at a time.
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once!') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Demands that roles alternate and that a result has the call before it; repeats tools before the last question.
MISTRAL = """{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}
{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should have length 9!') }}{%- endif %}
{{- call.function | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message.content + '}[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception('Only user, assistant and tool roles are supported') }}
{%- endif %}
{%- endfor %}"""

# Ends the last turn of a conversation in another way than the others.
PHI3 = """{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""

_LLAMA_TOKENS = ["<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|eom_id|>", "<|python_tag|>"]
_CHATML_TOKENS = ("<|im_end|>", ["<|im_start|>", "<|endoftext|>"])
TEMPLATES: dict[str, tuple[str, str, list[str]]] = {
    "qwen25": (QWEN25, *_CHATML_TOKENS),
    "qwen3": (QWEN3, *_CHATML_TOKENS),
    "hermes": (HERMES, *_CHATML_TOKENS),
    "llama3": (LLAMA3, "<|eot_id|>", _LLAMA_TOKENS),
    "mistral": (MISTRAL, "</s>", ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "phi3": (PHI3, "<|end|>", ["<|user|>", "<|assistant|>", "<|endoftext|>"]),
}


def make_chat_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character, the special tokens and the template of a model."""
    template, end, others = TEMPLATES[name]
    characters = [chr(i) for i in (10, *range(32, 127), *range(0xC0, 0x100))]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    bos = {"llama3": "<|begin_of_text|>", "mistral": "<s>"}.get(name)
    eos = "<|endoftext|>" if name == "phi3" else end
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token=eos, bos_token=bos, clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [t for t in (end, *others) if t not in (eos, bos)]})
    tokenizer.chat_template = template
    return tokenizer


def end_of_turn(name: str) -> str:
    return TEMPLATES[name][1]
