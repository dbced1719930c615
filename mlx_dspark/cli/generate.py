"""`generate`: one prompt, one answer."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlx_dspark.chat.template import check_prompt, has_template
from mlx_dspark.cli.ranks import follow, follows, refuse_input_without_end
from mlx_dspark.cli.show import Progress, closing_line, note, open_session, printing
from mlx_dspark.cli.streams import require_input, require_output
from mlx_dspark.foundation.errors import EmptyPrompt, UsageError
from mlx_dspark.foundation.settings import AskSettings, GenerateSettings, LoadSettings, from_environment

if TYPE_CHECKING:
    from mlx_dspark.kernels.dispatch import CpuWeightsReport
    from mlx_dspark.session import SessionEvent


def generate(ask: AskSettings, loading: LoadSettings, answer: GenerateSettings) -> int:
    """Answer one prompt."""
    if follows():
        return follow(loading)
    asked = answer.logprobs is not None and not from_environment(answer, "logprobs")
    if asked and not ask.json:
        raise UsageError(
            "logprobs is set, and only JSON output shows them.",
            "Add --json, or leave it out.",
            field="logprobs",
        )
    require_output()
    prompt = read_prompt(ask.prompt)
    check_prompt(prompt, answer.system, chat_template=answer.chat_template)
    progress = Progress()
    session = open_session(loading, progress)
    if answer.chat_template and not has_template(session.tokenizer):
        note("The model has no chat template; it continues the prompt as raw text.")
    events = progress.reading(session.stream(prompt, answer))
    result = session.fold(_shown(events, ask))
    progress.clear()
    if ask.json:
        about = {"model": session.name, "weights": _weights(session.weights), "kernels": session.live_kernels}
        print(json.dumps(about | result.to_dict(), ensure_ascii=False))
        return 0
    if not ask.stream:
        print(result.text)
    note(closing_line(result))
    if session.kernels is not None:
        for name, reason in session.kernels.board.off.items():
            note(f"mlx-dspark: the kernel {name} was switched off: {reason}.")
    return 0


def _shown(events: Iterator[SessionEvent], ask: AskSettings) -> Iterator[SessionEvent]:
    return printing(events, sys.stdout) if ask.stream and not ask.json else events


def _weights(report: CpuWeightsReport | None) -> dict[str, object] | None:
    if report is None:
        return None
    timings = [dataclasses.asdict(timing) for timing in report.timings]
    return {"choice": report.choice, "reason": report.reason, "timings": timings}


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input for `-`. Raises EmptyPrompt or RequestError."""
    if prompt != "-":
        return prompt
    refuse_input_without_end()
    text = require_input().read()
    if not text.strip():
        raise EmptyPrompt(
            "Standard input holds no prompt.", "Write one to it, or leave --prompt - out.", field="prompt"
        )
    return text
