"""Prompts to train on: read from files, or written by the target itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_dspark.chat.template import Message, encode_text, has_template, render
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.train.records import FIELDS, BadRecord, Reader, opener_of, prompt_of

_SENTINEL = "USERTURN"
JSON_LINES = (".jsonl", ".json")


@dataclass(frozen=True)
class Opener:
    """How a self-made user turn begins and, where it has a set ending, ends."""

    begin: str
    end: str = ""


OPENERS = tuple(
    map(
        Opener,
        (
            *("", "", "", "", "Write a", "How do I", "What is", "What are", "Explain", "Can you", "Give me"),
            *("Create a", "Solve", "Implement", "Write a Python function", "Describe", "Summarize"),
            *("Calculate", "A store", "If", "Why", "Write an email", "Tell me", "Compare", "List", "Find"),
            *("Design", "Help me", "Write a story", "Translate", "Please", "def", "from typing import List"),
            *("You are", "Imagine", "Who", "When", "A train", "There are", "Let", "Suppose", "In the"),
            *("The following", "Rewrite", "Which", "Should I", "What would"),
        ),
    )
)
"""The usual openers; the empty ones leave the first word to the target."""


def read_prompts(path: Path, field: str = "prompts") -> list[Any]:
    """The prompts of a file: a JSON object a line, with one of FIELDS; or plain text, a prompt a paragraph.

    Raises UsageError naming the file and line; `field` is the setting that names the file.
    """
    content = _content(path, field)
    if path.suffix in JSON_LINES:
        found = list(_records(path, content, FIELDS, prompt_of, field))
    else:
        found = [part.strip() for part in content.split("\n\n") if part.strip()]
    if not found:
        raise UsageError(f"{path} holds no prompt.", "Give a file with at least one.", field=field)
    return found


def read_openers(path: Path) -> list[Opener]:
    """How self-made turns of a domain begin: a JSON object a line with `begin` and perhaps `end`, or plain
    text, an opener a line.

    Raises UsageError naming the file and line.
    """
    content = _content(path, "self_openers")
    if path.suffix in JSON_LINES:
        records = _records(path, content, ("begin",), opener_of, "self_openers")
        found = [Opener(begin, end) for begin, end in records]
    else:
        found = [Opener(line) for line in content.splitlines() if line.strip()]
    if not found:
        raise UsageError(f"{path} holds no opener.", "Give a file with at least one.", field="self_openers")
    return found


def _content(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", "Name a UTF-8 text file.", field=field) from None


def _records(path: Path, content: str, names: Sequence[str], read: Reader, field: str) -> Iterator[Any]:
    """What `read` makes of the JSON objects of a file, each with at least one of `names`."""
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            record = error
        if not isinstance(record, dict) or not any(name in record for name in names):
            raise UsageError(
                f"{path} line {number} is not a JSON object with {_either(names)}.",
                f'Write one a line, such as {{"{names[0]}": "..."}}.',
                field=field,
            )
        try:
            yield read(record)
        except BadRecord as error:
            raise UsageError(f"{path} line {number}: {error}.", error.next_step, field=field) from None


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


class UserTurns:
    """What stands around a user's turn in this model's template, so that the model can write the turn."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if not has_template(tokenizer):
            raise UsageError(
                "The target has no chat template, so it cannot write user turns.",
                "Give prompts with --prompts.",
                field="self_prompts",
            )
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _SENTINEL}], add_generation_prompt=True, tokenize=False
        )
        before, found, after = text.partition(_SENTINEL)
        if not found:
            raise UsageError(
                "The target's chat template does not show the user's text as it is.",
                "Give prompts with --prompts.",
                field="self_prompts",
            )
        self._before, self._after = before, after

    def opened(self, opener: Opener) -> tuple[int, ...]:
        """Ids of everything up to the user's text, and how that begins."""
        return self._ids(self._before + opener.begin)

    def closing(self, opener: Opener) -> tuple[int, ...]:
        """Ids of the text's set ending and of everything from there to where the answer begins."""
        return self._ids(opener.end + self._after)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def encode(tokenizer: Any, prompt: Any) -> tuple[int, ...]:
    """Ids of a prompt from a file, through the model's template where it has one."""
    if not has_template(tokenizer):
        return encode_text(tokenizer, prompt if isinstance(prompt, str) else prompt[-1]["content"])
    messages: Sequence[Message] = (
        [Message("user", prompt)]
        if isinstance(prompt, str)
        else [Message(m["role"], m["content"]) for m in prompt]
    )
    return render(tokenizer, messages)
