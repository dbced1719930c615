"""The answer to a conversation as one stream of events, in however many requests it is made."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from mlx_dspark.chat.reader import ChatReader
from mlx_dspark.foundation.events import Committed, EngineEvent, Finished, Prefilled, RoundReport, Started
from mlx_dspark.foundation.request import FinishReason, GenerateRequest

if TYPE_CHECKING:
    from mlx_dspark.session.result import SessionEvent


class Streams(Protocol):
    """The part of an engine that makes answers."""

    def stream(self, request: GenerateRequest) -> Iterator[EngineEvent]: ...


class Answering:
    """One answer under way.

    Where a thinking budget is spent, the request ends, and one with the closing marks after what was said
    goes on with it; to the reader of the events it is one answer. `context` is the most tokens that a request
    may have, 0 where that is not known; without `check`, the request has no stop string and no budget.
    """

    def __init__(
        self,
        engine: Streams,
        request: GenerateRequest,
        reader: ChatReader,
        check: ChatReader | None,
        *,
        context: int = 0,
    ) -> None:
        """Begins it. Raises RequestError."""
        self._engine, self._request = engine, replace(request, stop_check=check)
        self._reader, self._check = reader, check
        self._context = context
        self._committed = 0
        self._events = engine.stream(self._request)

    def events(
        self, cancelled: Callable[[], bool], see: Callable[[RoundReport], None]
    ) -> Iterator[SessionEvent]:
        """The engine's events, and after each Committed those of the text that it released."""
        first, going = True, True
        reason: FinishReason = "cancelled"
        while going:
            reason = yield from self._part(cancelled, see, first=first)
            spent = reason == "stop" and self._reader.spent
            going, first = spent and self._resume(), False
            reason = "length" if spent else reason
        yield from self._reader.finish()
        yield Finished(reason, len(self._request.prompt), self._committed)

    def _part(
        self, cancelled: Callable[[], bool], see: Callable[[RoundReport], None], *, first: bool
    ) -> Generator[SessionEvent, None, FinishReason]:
        """The events of one request; returns why it ended."""
        try:
            while not cancelled() and (event := next(self._events, None)) is not None:
                if isinstance(event, Finished):
                    return event.reason
                if first or not isinstance(event, Started | Prefilled):
                    yield event
                if isinstance(event, Committed):
                    yield from self._read(event, see)
            return "cancelled"
        finally:
            close = getattr(self._events, "close", None)
            if close is not None:
                close()

    def _read(self, event: Committed, see: Callable[[RoundReport], None]) -> Iterator[SessionEvent]:
        self._committed += len(event.tokens)
        see(event.report)
        for token in event.tokens:
            self._reader(token)
        yield from self._reader.take()

    def _resume(self) -> bool:
        """Go on with a request of its own; False where no room is left."""
        left = self._request.max_new_tokens - self._committed
        if left < 1:
            return False
        if self._check is not None:
            self._check.resume()
        ids = self._reader.resume()
        if 0 < self._context <= len(ids):
            return False
        self._events = self._engine.stream(replace(self._request, prompt=ids, max_new_tokens=left))
        return True
