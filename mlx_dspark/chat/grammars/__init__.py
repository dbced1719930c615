"""The syntaxes in which models call tools, and which of them a model uses."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from mlx_dspark.chat.grammars.atem import ATEM
from mlx_dspark.chat.grammars.function_tags import FUNCTION_TAGS
from mlx_dspark.chat.grammars.gemma import GEMMA_CALLS
from mlx_dspark.chat.grammars.harmony import HARMONY_CALLS
from mlx_dspark.chat.grammars.hermes import HERMES
from mlx_dspark.chat.grammars.named_function import NAMED_FUNCTION
from mlx_dspark.chat.grammars.parsed import of_mlx_lm, parsed
from mlx_dspark.chat.script import Grammar

OWN = {
    "gemma4": GEMMA_CALLS,
    "json_tools": HERMES,
    "qwen3_coder": FUNCTION_TAGS,
    "minicpm5": NAMED_FUNCTION,
    "muse_spark": ATEM,
    "harmony": HARMONY_CALLS,
    "toolcall": parsed("toolcall", "<TOOLCALL>", "</TOOLCALL>", lambda text, _: json.loads(text)),
}
"""The syntaxes read as they arrive, by the name of mlx-lm's parser for them; the others are mlx-lm's own."""


def grammar_of(tokenizer: Any, template: str, vocabulary: Collection[str]) -> Grammar | None:
    """The syntax of the model with this chat template and these added tokens; None where it has none."""
    name = _chosen(tokenizer) or _fingerprint(template, vocabulary)
    if name is None:
        return None
    return OWN.get(name) or of_mlx_lm(name)


def _chosen(tokenizer: Any) -> str | None:
    """The parser that mlx-lm chose when it loaded the tokenizer."""
    settings = getattr(tokenizer, "init_kwargs", None) or {}
    return settings.get("tool_parser_type") if getattr(tokenizer, "tool_parser", None) else None


_BY_TEMPLATE = (
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<|tool_list_start|>",), "pythonic"),
    (("<|tool_call_start|>",), "pythonic"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<TOOLCALL>",), "toolcall"),
    (("<arg_key>",), "glm47"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("<atem:function_calls>",), "muse_spark"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "json_tools"),
)
_BY_VOCABULARY = (
    (("<|channel|>", "<|message|>", "<|call|>"), "harmony"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
)


def _fingerprint(template: str, vocabulary: Collection[str]) -> str | None:
    for marks, name in _BY_TEMPLATE:
        if all(mark in template for mark in marks):
            return name
    return next((name for marks, name in _BY_VOCABULARY if all(m in vocabulary for m in marks)), None)
