"""How families of models mark what they say: reasoning between tags, or messages with headers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

State = Literal["text", "reasoning", "header"]
"""What an answer is in: a channel, or the header that says which channel follows."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The marks of one family.

    With `message` empty, reasoning stands between `opener` and `closer`. Else an answer is a row of messages,
    each `header message body`, and a body ends with one of `ends` or where `starts` begin the next header.
    `control`: the marks are control tokens, which may stand anywhere in a line. `shut` closes an open block
    of reasoning from outside, and `skip` is put into a prompt so that the model answers without reasoning.
    """

    name: str
    opener: str = ""
    closer: str = ""
    message: str = ""
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    control: bool = False
    shut: str = ""
    skip: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Every text that the family writes as a mark."""
        found = (self.opener, self.closer, self.message, *self.starts, *self.ends, *self.also)
        return tuple(mark for mark in found if mark)

    @property
    def also(self) -> tuple[str, ...]:
        """Marks within headers."""
        return ("<|constrain|>",) if self.name == "harmony" else ()


def _tags(opener: str, closer: str, *, control: bool = False) -> Layout:
    return Layout(
        opener,
        opener,
        closer,
        control=control,
        shut=f"\n{closer}\n\n",
        skip=f"{opener}\n\n{closer}\n\n",
    )


PLAIN = Layout("plain")
HARMONY = Layout(
    "harmony",
    message="<|message|>",
    starts=("<|start|>", "<|channel|>"),
    ends=("<|end|>", "<|return|>", "<|call|>"),
    control=True,
    shut="<|end|><|start|>assistant<|channel|>final<|message|>",
    skip="<|channel|>final<|message|>",
)
"""gpt-oss (OpenAI harmony response format)."""
MUSE = Layout(
    "muse",
    message="<|message|>",
    starts=("<|start|>",),
    ends=("<|eom|>", "<|eot|>"),
    control=True,
    shut="<|eom|><|start|>assistant to=user<|message|>",
    skip=" to=user<|message|>",
)
"""Muse (mlx-lm `chat_templates/muse_spark.py`)."""
GEMMA = Layout(
    "gemma",
    "<|channel>thought",
    "<channel|>",
    control=True,
    shut="\n<channel|>",
    skip="<|channel>thought\n<channel|>",
)
"""Gemma 4."""
_TAGS = (
    _tags("<think>", "</think>"),
    _tags("<longcat_think>", "</longcat_think>"),
    _tags("<|think:start|>", "<|think:end|>", control=True),
    _tags("<seed:think>", "</seed:think>"),
    _tags("[THINK]", "[/THINK]", control=True),
)


def layout_of(template: str, vocabulary: Collection[str]) -> Layout:
    """The layout of the model with this chat template and these added tokens."""
    if "<|eom|>" in vocabulary and "<|message|>" in vocabulary:
        return MUSE
    if "<|channel|>" in vocabulary and "<|message|>" in vocabulary:
        return HARMONY
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:
        return GEMMA
    for tags in _TAGS:
        if (tags.opener in vocabulary and tags.closer in vocabulary) or tags.closer in template:
            return tags
    return PLAIN
