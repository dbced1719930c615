"""One answer under way: the engine's events become text, text becomes channels and calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from mlx_dspark.chat.channels import ChannelParser
from mlx_dspark.chat.stops import TextStops
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.events import (
    ChatEvent,
    Committed,
    EngineEvent,
    Finished,
    Started,
    Text,
    TokenLogprob,
    ToolCallEnded,
)
from mlx_dspark.serving.events import AnswerEvent, Ended, Ending, Logprobs, TokenText
from mlx_dspark.session.result import Folding
from mlx_dspark.session.session import Session


class Tells(Protocol):
    """What an answer asks its model."""

    session: Session

    def token_text(self, token: TokenLogprob) -> TokenText: ...


class Answer:
    """Read it in one thread. `reasons`: it begins within reasoning."""

    def __init__(
        self,
        model: Tells,
        stream: Stream,
        text: TextStops,
        parser: ChannelParser | None = None,
        *,
        reasons: bool = False,
    ) -> None:
        self._model = model
        self._stream = stream
        self._text = text
        self._parser = parser
        self._reasons = reasons
        self._reasoning_tokens = 0
        self._called = False
        self._folding = Folding()
        self.started = False
        self.over = False

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
        self._folding.take(event)
        match event:
            case Started():
                self.started = True
            case Committed():
                self._model.session.see(event.report)
                if event.logprobs:
                    yield Logprobs(tuple(map(self._model.token_text, self._kept(event))))
                for token in event.tokens:
                    yield from self._token(token)
            case Finished():
                self.over = True
                yield from self._read(self._text.finish())
                yield from self._told(self._parser.finish() if self._parser else [])
                yield self._ended()
            case _:
                pass

    def _kept(self, event: Committed) -> Sequence[TokenLogprob]:
        ended = event.tokens[-1] in self._model.session.end_ids
        return event.logprobs[: len(event.tokens) - ended]

    def _token(self, token: int) -> Iterator[AnswerEvent]:
        self._reasoning_tokens += self._reasons and token not in self._model.session.end_ids
        self._text(token)
        yield from self._read(self._text.take())

    def _read(self, text: str) -> Iterator[AnswerEvent]:
        if text and self._parser:
            yield from self._told(self._parser.feed(text))
            self._reasons = self._parser.state == "reasoning"
        elif text:
            yield Text(text)

    def _told(self, events: Sequence[ChatEvent]) -> Iterator[AnswerEvent]:
        for event in events:
            if isinstance(event, ToolCallEnded) and event.complete:
                self._called = True
            yield event

    def _ended(self) -> Ended:
        session = self._model.session
        result = self._folding.result(session.mode, session.end_ids, session.context)
        ending: Ending = result.finish_reason
        if self._text.matched is not None:
            ending = "stop_sequence"
        elif ending == "stop" and self._called:
            ending = "tool_calls"
        return Ended(ending, result, self._text.matched, self._reasoning_tokens)
