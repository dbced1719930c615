"""Small chat templates, each with what sets one family's apart, and tokenizers that carry them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.tiny import tiny_tokenizer

_HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
_TAIL = "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
_CALLS = (
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    '{% for call in m.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>\n{% endfor %}"
)
SWITCHED = (
    _TOOLS
    + _HEAD
    + _CALLS
    + _TAIL
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    + "{% endif %}"
)
"""Reasons unless `enable_thinking` is false, as Qwen3 does."""
OPENED = _TOOLS + _HEAD + _CALLS + _TAIL + "<think>\n{% endif %}"
"""Opens the reasoning whatever is asked."""
UNASKED = _HEAD + "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
"""Knows reasoning only as something to leave out, and has no place for tools."""
PLAIN = _HEAD + _TAIL + "{% endif %}"
EFFORT_WRITTEN = "Reasoning: {{ reasoning_effort | default('medium') }}\n" + PLAIN
"""Writes any effort into the prompt."""
EFFORT_CHOSEN = (
    "{% if reasoning_effort == 'high' %}Think hard.{% elif reasoning_effort == 'low' %}Be quick.{% endif %}"
    + PLAIN
)
EFFORT_CHECKED = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'max'] %}"
    "{{ raise_exception('unknown effort') }}{% endif %}{{ reasoning_effort }}" + PLAIN
)
TEXT_ARGUMENTS = (
    _TOOLS
    + _HEAD
    + "{% for call in m.tool_calls or [] %}{{ 'args: ' + call.function.arguments }}{% endfor %}"
    + _TAIL
    + "{% endif %}"
)
"""Takes arguments as JSON text only."""
HARMONY = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ONE_CALL = (
    "{% for m in messages %}{% set message = m %}[{{ m.role }}|{{ m.content }}|{{ message.thinking }}|"
    "{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{{ (message.tool_calls[0]).function.name }}{% endif %}]{% endfor %}{{ tools }}"
)
"""Reads the first call of a turn, and reasoning or text beside it, as gpt-oss does."""
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
)
"""Takes user and assistant by turns, and no system turn, as Gemma 2 does."""
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 %}{{ raise_exception('no') }}{% endif %}"
    "[{{ m.role }}|{{ m.content }}]{% endfor %}"
)
"""Takes a system turn at the beginning only, as Qwen3 does."""
SHORT_IDS = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id|length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}<{{ call.id }}>{% endfor %}"
    "{% if m.role == 'tool' %}<{{ m.tool_call_id }}|{{ m.name }}>{% endif %}{% endfor %}{{ tools }}"
)
"""Takes ids of nine characters, as Mistral does."""
RESPONSES = (
    "{% for message in messages %}[{{ message.role }}|{{ message.content }}|"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }};{% endfor %}|"
    "{% for each in message.tool_responses or [] %}{{ each.name }}={{ each.response }};{% endfor %}]"
    "{% endfor %}{{ tools }}"
)
"""Knows results as a part of the turn that asked for them, as Gemma 4 does."""
HARMONY_MARKS = (
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<|constrain|>",
)
GEMMA_MARKS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
GEMMA = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% if enable_thinking %}<|think|>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}model\n{# <|tool_call> <tool_call|> #}"
)


def tokenizer_of(template: str, special: Iterable[str] = (), added: Iterable[str] = ()) -> Any:
    """The tiny tokenizer with this template, more special tokens, and more added ones that are shown."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(special)}, replace_extra_special_tokens=False
    )
    tokenizer.add_tokens(list(added))
    return tokenizer
