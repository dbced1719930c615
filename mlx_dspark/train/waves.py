"""The texts of many waves in one line, so that the rows of an engine stay full from wave to wave."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.train.data import Answer

Steps = Generator[Sequence[GenerateRequest], list[list[int]], list[Answer]]
"""A wave, step by step: it yields requests, is sent the token ids generated for each, and in the end returns
what is to be stored."""


@dataclass(eq=False, slots=True)
class _Text:
    wave: _Wave
    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Wave:
    """`left` of the `texts` of its present step are not finished; `answers` are there when all steps are."""

    steps: Steps
    texts: list[_Text] = field(default_factory=list)
    left: int = 0
    answers: list[Answer] | None = None


class Line:
    """Hands out the requests of `waves`, those of older waves first, and begins a wave when none waits."""

    def __init__(self, waves: Iterator[Steps]) -> None:
        self._waves = waves
        self._begun: deque[_Wave] = deque()
        self._waiting: deque[_Text] = deque()
        self._running: list[_Text] = []

    def requests(self) -> Iterator[GenerateRequest]:
        """Requests, numbered from 0, until no other can be had before one of them is finished."""
        self._running = []
        while self._waiting or self._begin():
            self._running.append(self._waiting.popleft())
            yield self._running[-1].request

    def _begin(self) -> bool:
        """Begin waves until a text waits; False when there is no wave any more."""
        while not self._waiting:
            steps = next(self._waves, None)
            if steps is None:
                return False
            wave = _Wave(steps)
            self._begun.append(wave)
            self._enter(wave, next(steps))
        return True

    def extend(self, index: int, tokens: Sequence[int]) -> None:
        """Request `index` got more tokens."""
        self._running[index].tokens += tokens

    def finish(self, index: int) -> None:
        """Request `index` got all its tokens."""
        wave = self._running[index].wave
        wave.left -= 1
        self._go_on(wave)

    def _enter(self, wave: _Wave, requests: Sequence[GenerateRequest]) -> None:
        wave.texts = [_Text(wave, request) for request in requests]
        wave.left = len(wave.texts)
        self._waiting.extendleft(reversed(wave.texts))
        self._go_on(wave)

    def _go_on(self, wave: _Wave) -> None:
        """Take the next step of a wave whose present one is complete."""
        if wave.left:
            return
        try:
            requests = wave.steps.send([text.tokens for text in wave.texts])
        except StopIteration as end:
            wave.answers = end.value
        else:
            self._enter(wave, requests)

    def complete(self) -> Iterator[list[Answer]]:
        """The answers of complete waves, each once, in the order of the waves."""
        while self._begun and (answers := self._begun[0].answers) is not None:
            self._begun.popleft()
            yield answers

    @property
    def empty(self) -> bool:
        """Whether the last call of `requests` found none."""
        return not self._running
