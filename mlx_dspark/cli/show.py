"""What people see beside the text: progress, the closing line, errors. All of it on standard error."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from mlx_dspark.foundation.bench_settings import BenchmarkSettings, RaceSettings
from mlx_dspark.foundation.calibrate_settings import CalibrateSettings
from mlx_dspark.foundation.errors import BadCheckpoint, DsparkError
from mlx_dspark.foundation.events import Committed, Prefilled, Text
from mlx_dspark.foundation.knobs import Knob
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import (
    AskSettings,
    GenerateSettings,
    LoadSettings,
    TrainSettings,
    in_environment,
)

if TYPE_CHECKING:
    from mlx_dspark.catalog.progress import LoadProgress
    from mlx_dspark.kernels.dispatch import CpuWeightsReport
    from mlx_dspark.session import Result, Session, SessionEvent


class Progress:
    """One line that tells what is going on: redrawn on a terminal, one plain line for each step elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._redraws = self._stream.isatty()
        self._shown = ""
        self._message = ""

    def __call__(self, step: LoadProgress) -> None:
        """Tell one step of loading."""
        self.tell(step.message, step.fraction, step.detail)

    def tell(self, message: str, fraction: float | None = None, detail: str = "") -> None:
        """Show a step; `fraction` of it is done. `detail` is shown where the line is redrawn."""
        line = message if fraction is None else f"{message} {fraction:4.0%}"
        line += f" ({detail})" if detail else ""
        if self._redraws and line != self._shown:
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()
        elif not self._redraws and message != self._message:
            print(message, file=self._stream, flush=True)
        self._shown, self._message = line, message

    def clear(self) -> None:
        """Take the line away before something else is shown."""
        if self._redraws and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._shown = self._message = ""

    def reading(self, events: Iterable[SessionEvent]) -> Iterator[SessionEvent]:
        """The same events; a long prompt shows how far it has been read."""
        for event in events:
            if isinstance(event, Prefilled) and event.done < event.total:
                self.tell(f"reading the prompt, {event.total} tokens", event.done / event.total)
            elif isinstance(event, Committed):
                self.clear()
            yield event


def open_session(loading: LoadSettings, progress: Progress) -> Session:
    """Load a model and say what was loaded, and how."""
    from mlx_dspark.session.calibrate import calibrated
    from mlx_dspark.session.pair import load_parts

    parts = calibrated(load_parts(loading, progress), loading.calibrate, progress)
    session = parts.session(own_thread=False)
    progress.clear()
    about = [session.name, f"drafting: {session.mode}", weights_line(session.weights), states_line(loading)]
    about.append(str(session.kernels or ""))
    about.append(str(session.calibration or ""))
    note(" · ".join(part for part in about if part))
    for remark in (session.pairing, session.requantized):
        if remark:
            note(str(remark))
    return session


def weights_line(report: CpuWeightsReport | None) -> str:
    """How the CPU holds the weights, in a few words; empty on any other device."""
    if report is None or report.choice is None:
        return ""
    ordinary = report.reason in ("measured", "remembered", "pinned")
    return f"weights: {report.choice}" + ("" if ordinary else f" ({report.reason})")


def states_line(loading: LoadSettings) -> str:
    """In how many bits keys and values are held, where that was asked for; else empty."""
    return f"keys and values: {loading.kv_bits} bits" if loading.kv_bits is not None else ""


def printing(events: Iterable[SessionEvent], out: TextIO) -> Iterator[SessionEvent]:
    """The same events; text is written to `out` as it comes, and ends with a line break."""
    last = "\n"
    try:
        for event in events:
            if isinstance(event, Text):
                out.write(event.text)
                out.flush()
                last = event.text
            yield event
    finally:
        if not last.endswith("\n"):
            out.write("\n")
            out.flush()


LEAST_ROUNDS = 3
"""Rounds after the prompt from which their rate is told: the time of one or two says nothing of the next."""


def closing_line(result: Result) -> str:
    """Tokens, seconds, rates, accept length, rounds and who drafted, in one line."""
    ended = "context full" if result.context_full else result.finish_reason
    enough = result.num_rounds - result.prefill_rounds >= LEAST_ROUNDS
    rate = result.decode_tokens_per_sec if enough else 0.0
    parts = [
        f"{count(result.num_tokens, 'token')} in {result.seconds:.2f} s ({ended})",
        f"prompt {count(result.prompt_tokens, 'token')} at {result.prefill_tokens_per_sec:.0f} tok/s",
        f"decode {rate:.1f} tok/s" if rate else "",
        f"accept length {accept_length(result.accept_lengths)}",
        f"{count(result.num_rounds, 'round')}, {result.prefill_rounds} for the prompt" + _parked(result),
        _cap(result),
        against_plain(result) if enough else "",
        _who_drafted(result),
        *result.troubles,
    ]
    return "[" + " · ".join(part for part in parts if part) + "]"


def count(number: int, thing: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def accept_length(lengths: Sequence[int]) -> str:
    """The mean accept length, or a dash where nothing was drafted."""
    return f"{sum(lengths) / len(lengths):.2f}" if lengths else "-"


def _parked(result: Result) -> str:
    return f", {result.parked_rounds} parked" if result.parked_rounds else ""


def _cap(result: Result) -> str:
    """The cap that most drafting rounds had, and the range of all."""
    drafting = {cap: rounds for cap, rounds in result.caps.items() if cap}
    if not result.drafted or not drafting:
        return ""
    usual = max(drafting, key=lambda cap: drafting[cap])
    return f"cap {usual}" if len(drafting) == 1 else f"cap {usual}, from {min(drafting)} to {max(drafting)}"


def against_plain(result: Result) -> str:
    """The rate as a multiple of plain decoding, and what was expected of it; empty where it is not known."""
    if result.mode == "baseline" or result.observed_speedup is None or not result.drafted:
        return ""
    expected = result.predicted_speedup
    told = "" if expected is None else f" ({expected:.2f}x expected)"
    return f"{result.observed_speedup:.2f}x plain{told}"


def _who_drafted(result: Result) -> str:
    if result.mode == "baseline":
        return "plain decoding"
    drafters = [
        f"{name} {n.accepted}/{count(n.drafted, 'draft')} accepted" for name, n in result.sources.items()
    ]
    return ", ".join(drafters) or f"{result.mode} drafted nothing"


def note(text: str) -> None:
    """A remark on standard error."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def noted_warnings() -> Iterator[None]:
    """Warnings are remarks while the block runs, without the line of code that gave them."""

    def show(message: Warning | str, *_: object) -> None:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        note(f"{clear}mlx-dspark: {' '.join(str(message).split())}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def complain(error: DsparkError, who: str = "mlx-dspark", arguments: Sequence[str] = ()) -> None:
    """An error as one sentence and a next step; a setting is called by its flag, or by its variable where the
    environment gave it and not one of the `arguments`."""
    sentence, knob = error.sentence, _flags().get(error.field or "")
    of_a_file = isinstance(error, BadCheckpoint)
    if knob is not None and not of_a_file and sentence.startswith(f"{knob.name} "):
        given = any(each.partition("=")[0] == knob.flag for each in arguments)
        called = knob.env if in_environment(knob) and not given else knob.flag
        sentence = called + sentence.removeprefix(knob.name)
    note(f"{who}: {sentence} {error.next_step}".rstrip())


def _flags() -> dict[str, Knob]:
    measuring = (CalibrateSettings, BenchmarkSettings, RaceSettings)
    sections = (TrainSettings, *measuring, ServeSettings, LoadSettings, GenerateSettings, AskSettings)
    return {knob.name: knob for each in sections for knob in each.knobs()}
