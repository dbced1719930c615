"""Texts of many pieces of work in one line, so that the rows of an engine stay full from one to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mlx_dspark.foundation.request import GenerateRequest

T = TypeVar("T")

Steps = Generator[GenerateRequest, list[int], T]
"""A piece of work, step by step: it yields a request, is sent the token ids generated for it, and in the end
returns its result."""


@dataclass(eq=False, slots=True)
class _Text(Generic[T]):
    steps: Steps[T]
    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)


class Line(Generic[T]):
    """Hands out the requests of `pieces`, those of begun ones first, and begins a piece when none waits."""

    def __init__(self, pieces: Iterator[Steps[T]]) -> None:
        self._pieces = pieces
        self._waiting: deque[_Text[T]] = deque()
        self._running: list[_Text[T]] = []
        self._results: list[T] = []

    def requests(self) -> Iterator[GenerateRequest]:
        """Requests, numbered from 0, until no other can be had before one of them is finished."""
        self._running = []
        while self._waiting or self._begin():
            self._running.append(self._waiting.popleft())
            yield self._running[-1].request

    def _begin(self) -> bool:
        """Begin pieces until a text waits; False when there is no piece any more."""
        while not self._waiting:
            steps = next(self._pieces, None)
            if steps is None:
                return False
            self._enter(steps, None)
        return True

    def extend(self, index: int, tokens: Sequence[int]) -> None:
        """Request `index` got more tokens."""
        self._running[index].tokens += tokens

    def finish(self, index: int) -> None:
        """Request `index` got all its tokens."""
        text = self._running[index]
        self._enter(text.steps, text.tokens)

    def _enter(self, steps: Steps[T], tokens: list[int] | None) -> None:
        """Take the next step of a piece; `tokens` are those of the step before, None at its beginning."""
        try:
            request = next(steps) if tokens is None else steps.send(tokens)
        except StopIteration as end:
            self._results.append(end.value)
        else:
            self._waiting.append(_Text(steps, request))

    def results(self) -> list[T]:
        """What pieces returned since the last call, in the order in which they ended."""
        taken, self._results = self._results, []
        return taken

    @property
    def empty(self) -> bool:
        """Whether the last call of `requests` found none."""
        return not self._running
