"""Arms that answer one prompt in laps, each against its own clock, so that all share heat and load alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from mlx_dspark.bench.arms import Answer, answer_of
from mlx_dspark.bench.suite import AskGap, Tell, with_gap
from mlx_dspark.bench.verdict import Verdict, compared
from mlx_dspark.chat.template import Prompt, encode_prompt
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished, Text
from mlx_dspark.foundation.settings import GenerateSettings
from mlx_dspark.session.result import SessionEvent
from mlx_dspark.session.session import Session

LAP_SECONDS = 0.15
WARM_UP_TOKENS = 32
Clock = Callable[[], float]
Settle = Callable[[], None]


@dataclass
class Lane:
    """One arm under way: what it has said, and the seconds of its own laps."""

    label: str
    events: Iterator[SessionEvent]
    seen: list[SessionEvent] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    first_at: float | None = None
    first_tokens: int = 0
    done: bool = False

    def lap(self, seconds: float, clock: Clock, settle: Settle) -> None:
        """Go on for so long, or to the end; `settle` waits for what is still being computed."""
        started = clock()
        try:
            while not self.done and clock() - started < seconds:
                event = next(self.events, None)
                self._take(event, self.seconds + clock() - started)
            settle()
        finally:
            self.seconds += clock() - started

    def _take(self, event: SessionEvent | None, at: float) -> None:
        if event is None or isinstance(event, Finished):
            self.done = True
        if event is None:
            return
        self.seen.append(event)
        if isinstance(event, Text):
            self.text += event.text
        elif isinstance(event, Committed):
            self.tokens += len(event.tokens)
            if self.first_at is None:
                self.first_at, self.first_tokens = at, len(event.tokens)

    @property
    def rate(self) -> float:
        """Tokens a second since the first."""
        if self.first_at is None or self.seconds <= self.first_at:
            return 0.0
        return (self.tokens - self.first_tokens) / (self.seconds - self.first_at)

    @property
    def answer(self) -> Answer:
        """What it has committed so far."""
        return answer_of(event for event in self.seen if isinstance(event, EngineEvent))


def laps(
    lanes: Sequence[Lane],
    *,
    lap_seconds: float = LAP_SECONDS,
    clock: Clock = perf_counter,
    settle: Settle = lambda: None,
) -> Iterator[Lane]:
    """Run all lanes to their ends; yields each after a lap. Next is whoever has run for the shortest time, so
    that lanes stand side by side as they would if they ran at once."""
    while running := [lane for lane in lanes if not lane.done]:
        lane = min(running, key=lambda each: each.seconds)
        lane.lap(lap_seconds, clock, settle)
        yield lane


@dataclass(frozen=True)
class Outcome:
    """How a race ended. `verdicts` compares each lane with the control's answer, as far as the lane came, and
    is empty where there was none. `same_reading`: all read the prompt in the same rounds."""

    lanes: Sequence[Lane]
    verdicts: Sequence[Verdict]
    same_reading: bool
    interrupted: bool

    @property
    def identical(self) -> bool:
        """Whether every lane wrote the control's tokens."""
        return bool(self.verdicts) and all(verdict.same for verdict in self.verdicts)


def run_race(
    arms: Mapping[str, Session],
    control: Session,
    prompt: Prompt,
    answer: GenerateSettings,
    *,
    ask: AskGap,
    show: Callable[[Sequence[Lane]], None] = lambda _: None,
    tell: Tell = lambda *_: None,
    settle: Settle = lambda: None,
) -> Outcome:
    """Race sessions over one target on a prompt; an interrupt ends the race where it is.

    The control answers first, by itself: with the drafter at a cap of 0, it is what every lane must write.
    `show` sees the lanes after every lap.
    """
    truth = Lane("control", control.stream(prompt, answer))
    lanes = [Lane(label, session.stream(prompt, answer)) for label, session in arms.items()]
    short = replace(answer, max_new_tokens=min(answer.max_new_tokens, WARM_UP_TOKENS))
    interrupted = False
    try:
        for label, session in arms.items():
            tell(f"warming up {label}", None)
            Lane(label, session.stream(prompt, short)).lap(float("inf"), perf_counter, settle)
        tell("the control answers", None)
        truth.lap(float("inf"), perf_counter, settle)
        for _ in laps(lanes, settle=settle):
            show(lanes)
    except KeyboardInterrupt:
        interrupted = True
    answers = [lane.answer for lane in lanes]
    same_reading = all(each.reading == truth.answer.reading for each in answers if each.reading)
    ids = encode_prompt(control.tokenizer, prompt, system=answer.system, chat_template=answer.chat_template)
    verdicts = _verdicts(truth, lanes, ids, ask) if truth.done else []
    return Outcome(lanes, verdicts, same_reading, interrupted)


def _verdicts(truth: Lane, lanes: Sequence[Lane], prompt: Sequence[int], ask: AskGap) -> list[Verdict]:
    """An interrupt leaves differences without the target's say."""
    expected = truth.answer.tokens
    verdicts: list[Verdict] = []
    for lane in lanes:
        got = lane.answer.tokens
        verdicts.append(compared(expected if lane.done else expected[: len(got)], got))
    try:
        return [with_gap(verdict, prompt, expected, ask) for verdict in verdicts]
    except KeyboardInterrupt:
        return verdicts
