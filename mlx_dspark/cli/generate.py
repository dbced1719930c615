"""`generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlx_dspark.chat.template import has_template
from mlx_dspark.cli.show import Progress, closing_line, note, open_session, printing
from mlx_dspark.foundation.errors import EmptyPrompt, RequestError, UsageError
from mlx_dspark.foundation.settings import AskSettings, GenerateSettings, LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.session import SessionEvent


def generate(ask: AskSettings, loading: LoadSettings, answer: GenerateSettings) -> int:
    """Answer one prompt."""
    if answer.logprobs is not None and not ask.json:
        raise UsageError(
            "logprobs is set, and only JSON output shows them.",
            "Add --json, or leave it out.",
            field="logprobs",
        )
    prompt = _read(ask.prompt)
    progress = Progress()
    session = open_session(loading, progress)
    if answer.chat_template and not has_template(session.tokenizer):
        note("The model has no chat template; it continues the prompt as raw text.")
    events = progress.reading(session.stream(prompt, answer))
    result = session.fold(_shown(events, ask))
    progress.clear()
    if ask.json:
        print(
            json.dumps(
                {"model": session.name, "weights": session.weights, **result.to_dict()}, ensure_ascii=False
            )
        )
        return 0
    if not ask.stream:
        print(result.text)
    note(closing_line(result))
    return 0


def _shown(events: Iterator[SessionEvent], ask: AskSettings) -> Iterator[SessionEvent]:
    return printing(events, sys.stdout) if ask.stream and not ask.json else events


def _read(prompt: str) -> str:
    """The prompt, or standard input for `-`. Raises EmptyPrompt or RequestError."""
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(
            "Standard input is not valid UTF-8.", "Give the prompt as UTF-8 text.", field="prompt"
        ) from error
    if not text.strip():
        raise EmptyPrompt(
            "Standard input holds no prompt.", "Write one to it, or leave --prompt - out.", field="prompt"
        )
    return text
