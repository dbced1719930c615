"""Where answers report to: folds for `/metrics`, the newest rounds for `/rounds`, and a bus for `/events`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from mlx_dspark.foundation.bus import Bus
from mlx_dspark.foundation.events import Committed, EngineEvent, Prefilled, RoundReport, Started
from mlx_dspark.serving.answer import Answer
from mlx_dspark.serving.dialects.base import About, Frame
from mlx_dspark.serving.observe.folds import Answers, Rounds
from mlx_dspark.serving.stats import stats_of
from mlx_dspark.serving.streaming import ClientGone

KEPT_ROUNDS = 512
REPLAYED = 32


@dataclass
class _Watched:
    """One answer under way: its number on this server, and its rounds so far."""

    number: int
    request: str
    choice: int
    mode: str
    rounds: int = 0
    reading: RoundReport | None = None


class Board:
    """Used on the host's event loop. Nothing here waits, and nothing here grows with time."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.rounds = Rounds()
        self.answers = Answers()
        self.newest: deque[dict[str, Any]] = deque(maxlen=KEPT_ROUNDS)
        self.bus: Bus[Frame] = Bus(REPLAYED)
        self.started_at = now()
        self._now = now
        self._numbers = count(1)
        self._seq = count(1)

    def follow(self, answers: Sequence[Answer], about: About) -> Callable[[BaseException | None], None]:
        """Watch the answers to one request. Returns what to call when they are over, with what ended them."""
        watched = [
            _Watched(next(self._numbers), about.id, choice, about.mode) for choice in range(len(answers))
        ]
        for answer, each in zip(answers, watched, strict=True):
            answer.watch = lambda event, each=each: self._take(each, event)

        def over(error: BaseException | None) -> None:
            for answer, each in zip(answers, watched, strict=True):
                self._over(answer, each, error)

        return over

    def tell(self, event: str, **about: Any) -> None:
        """Publish something that is no round."""
        self.bus.publish(Frame(about | {"seq": next(self._seq), "t": round(self._now(), 3)}, event))

    def _take(self, watched: _Watched, event: EngineEvent) -> None:
        match event:
            case Started():
                self.tell("began", **_who(watched), prompt_tokens=event.prompt_tokens, reused=event.reused)
            case Prefilled():
                watched.reading = event.report
                self.rounds.read(event.report)
                read = {"processed": event.done, "total": event.total, "done": event.done >= event.total}
                self.tell("prefill", **_who(watched), **read, ms=_ms(event.report))
            case Committed() if event.report is not watched.reading:
                self.rounds.decoded(event.report)
                self._round(watched, event.report)
            case Committed():
                self.tell("first", **_who(watched), committed=event.report.committed)
            case _:
                pass

    def _round(self, watched: _Watched, report: RoundReport) -> None:
        names = ("drafted", "accepted", "committed", "cap", "source", "parked", "rows", "depth")
        told = _who(watched) | {"i": watched.rounds, "ms": _ms(report)}
        told |= {name: getattr(report, name) for name in names}
        watched.rounds += 1
        self.tell("round", **told)
        self.newest.append(told)

    def _over(self, answer: Answer, watched: _Watched, error: BaseException | None) -> None:
        result = answer.result()
        ending: str = result.finish_reason
        if ending == "cancelled" and isinstance(error, Exception) and not isinstance(error, ClientGone):
            ending = "failed"
        self.answers.ended(result, ending)
        self.tell("answer", **_who(watched), ending=ending, stats=stats_of([result]))


def _who(watched: _Watched) -> dict[str, Any]:
    return {
        "req": watched.number,
        "id": watched.request,
        "choice": watched.choice,
        "mode": watched.mode,
    }


def _ms(report: RoundReport) -> float:
    return round(1000 * (report.landed_at - report.launched_at), 3)
