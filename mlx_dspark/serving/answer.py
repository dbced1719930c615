"""One answer under way: the engine's events become text, channels and calls as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from mlx_dspark.chat.reader import ChatReader
from mlx_dspark.chat.stops import TextStops
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.events import (
    ChatEvent,
    Committed,
    EngineEvent,
    Finished,
    Prefilled,
    Started,
    Text,
    TokenLogprob,
    ToolCallEnded,
)
from mlx_dspark.foundation.request import FinishReason
from mlx_dspark.serving.events import AnswerEvent, Ended, Ending, Logprobs, TokenText
from mlx_dspark.session.result import Folding
from mlx_dspark.session.session import Session


class TextReader:
    """Raw text read token by token, as `ChatReader` reads conversations."""

    def __init__(self, text: TextStops) -> None:
        self.text = text
        self.reasoning_tokens = 0
        self.spent = False

    def __call__(self, token: int) -> bool:
        return self.text(token)

    def take(self) -> list[ChatEvent]:
        """The text that became certain since the last call."""
        return _pieces(self.text.take())

    def finish(self) -> list[ChatEvent]:
        """The last of it."""
        return _pieces(self.text.finish())

    def resume(self) -> tuple[int, ...]:
        """Raw text has no budget to be spent."""
        raise AssertionError


Reader = ChatReader | TextReader


class Tells(Protocol):
    """What an answer asks its model."""

    session: Session
    context: int

    def token_text(self, token: TokenLogprob) -> TokenText: ...


class Answer:
    """Read it in one thread.

    `begin` queues a request with this prompt, or None for the first, and this many tokens. Where a budget
    for reasoning is spent, the request ends and another one goes on; to its reader it is one answer.
    """

    def __init__(
        self,
        model: Tells,
        reader: Reader,
        begin: Callable[[tuple[int, ...] | None, int], Stream | None],
        limit: int,
        check: Reader | None = None,
    ) -> None:
        """Begins it. Raises RequestError."""
        self._model = model
        self._reader = reader
        self._begin = begin
        self._left = limit
        self._check = check
        self._called = self._resumed = False
        self._folding = Folding()
        self.started = False
        self.over = False
        stream = begin(None, limit)
        assert stream is not None
        self._stream = stream

    @property
    def ended(self) -> bool:
        """Whether the engine is done with it; what it said may still be to be read."""
        return self._stream.ended

    def ready(self) -> Iterator[AnswerEvent]:
        """The events that have come, without waiting. Raises what made the answer fail."""
        while not self.over:
            try:
                event = self._stream.next(timeout=0)
            except TimeoutError:
                return
            except BaseException:
                self.over = True
                raise
            yield from self._take(event)

    def close(self) -> None:
        """Cancel what is left, within one round."""
        self.over = True
        self._stream.close()

    def _take(self, event: EngineEvent) -> Iterator[AnswerEvent]:
        match event:
            case Finished():
                yield from self._finished(event)
            case Started() | Prefilled() if self._resumed:
                pass
            case Committed():
                self._folding.take(event)
                self._model.session.see(event.report)
                yield from self._committed(event)
            case _:
                self.started = True
                self._folding.take(event)

    def _committed(self, event: Committed) -> Iterator[AnswerEvent]:
        self._left -= len(event.tokens)
        if event.logprobs:
            yield Logprobs(tuple(map(self._model.token_text, self._kept(event))))
        for token in event.tokens:
            self._reader(token)
        yield from self._told(self._reader.take())

    def _kept(self, event: Committed) -> Sequence[TokenLogprob]:
        ended = event.tokens[-1] in self._model.session.end_ids
        return event.logprobs[: len(event.tokens) - ended]

    def _told(self, events: Sequence[ChatEvent]) -> Iterator[AnswerEvent]:
        for event in events:
            self._called |= isinstance(event, ToolCallEnded) and event.complete
            yield event

    def _finished(self, event: Finished) -> Iterator[AnswerEvent]:
        spent = event.reason == "stop" and self._reader.spent
        if spent and self._resume():
            return
        self.over = True
        yield from self._told(self._reader.finish())
        reason: FinishReason = "length" if spent else event.reason
        self._folding.take(Finished(reason, event.prompt_tokens, event.completion_tokens))
        yield self._ended()

    def _resume(self) -> bool:
        """Go on with a request of its own; False where no room is left."""
        if self._left < 1:
            return False
        if self._check is not None:
            self._check.resume()
        stream = self._begin(self._reader.resume(), self._left)
        if stream is None:
            return False
        self._stream, self._resumed = stream, True
        return True

    def _ended(self) -> Ended:
        session, stop = self._model.session, self._reader.text.matched
        result = self._folding.result(session.mode, session.end_ids, self._model.context)
        ending: Ending = result.finish_reason
        if stop is not None:
            ending = "stop_sequence"
        elif ending == "stop" and self._called:
            ending = "tool_calls"
        return Ended(ending, result, stop, self._reader.reasoning_tokens)


def _pieces(text: str) -> list[ChatEvent]:
    return [Text(text)] if text else []
