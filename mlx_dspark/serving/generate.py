"""Engine and chat joined once, for every dialect: a request goes in, each answer comes out as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.chat.stops import TextStops
from mlx_dspark.chat.template import Message, encode_text, render
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.chat import Conversation
from mlx_dspark.foundation.errors import ContextOverflow
from mlx_dspark.foundation.events import (
    Committed,
    EngineEvent,
    Finished,
    Text,
    TokenLogprob,
)
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.serving.ask import Ask, Prompt, seed_of_choice
from mlx_dspark.serving.events import AnswerEvent, Ended, Ending, Logprobs, TokenText
from mlx_dspark.session.result import Folding
from mlx_dspark.session.session import Session


@dataclass(frozen=True)
class Rendered:
    """A prompt as token ids."""

    ids: tuple[int, ...]


class Answer:
    """One answer under way. Read it in one thread; `notify` is called in another when there is more."""

    def __init__(self, model: Model, stream: Stream, ask: Ask) -> None:
        self._model = model
        self._stream = stream
        self._text = model.text(ask)
        self._folding = Folding()
        self.over = False

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
        if isinstance(event, Committed):
            self._model.see(event)
            if event.logprobs:
                yield Logprobs(tuple(self._model.token_text(each) for each in self._kept(event)))
            for token in event.tokens:
                self._text(token)
            yield from self._shown(self._text.take())
        elif isinstance(event, Finished):
            self.over = True
            yield from self._shown(self._text.finish())
            yield self._ended()

    def _kept(self, event: Committed) -> Sequence[TokenLogprob]:
        ended = event.tokens[-1] in self._model.session.end_ids
        return event.logprobs[: len(event.tokens) - ended]

    def _shown(self, text: str) -> Iterator[AnswerEvent]:
        if text:
            yield Text(text)

    def _ended(self) -> Ended:
        session = self._model.session
        result = self._folding.result(session.mode, session.end_ids, session.context)
        ending: Ending = result.finish_reason
        if self._text.matched is not None:
            ending = "stop_sequence"
        return Ended(ending, result, self._text.matched)


class Model:
    """A loaded model as the server uses it."""

    def __init__(self, session: Session, context: int = 0) -> None:
        self.session = session
        self.context = min(context or session.context, session.context) or context
        self._decoder = TextDecoder(session.tokenizer)

    def render(self, prompt: Prompt) -> Rendered:
        """Token ids of a prompt. Raises RequestError, or ContextOverflow where it leaves no room."""
        match prompt:
            case Conversation():
                turns = [Message(turn.role, turn.content) for turn in prompt.turns]
                ids = render(self.session.tokenizer, turns)
            case str():
                ids = encode_text(self.session.tokenizer, prompt)
            case _:
                ids = prompt
        if 0 < self.context <= len(ids):
            raise ContextOverflow(len(ids), self.context)
        return Rendered(ids)

    def submit(self, ask: Ask, rendered: Rendered, choice: int, notify: Callable[[], None]) -> Answer:
        """Queue one answer. Raises RequestError."""
        room = self.context - len(rendered.ids) if self.context else ask.max_tokens
        sampling = replace(ask.sampling, seed=seed_of_choice(ask.sampling.seed, choice))
        check = self.text(ask) if ask.stops else None
        request = GenerateRequest(
            rendered.ids, min(ask.max_tokens, room), sampling, self.session.end_ids, check
        )
        engine: Any = self.session.engine
        return Answer(self, engine.submit(request, notify), ask)

    def text(self, ask: Ask) -> TextStops:
        """The text of one answer."""
        return TextStops(self._decoder.start(), ask.stops, self.session.end_ids)

    def token_text(self, token: TokenLogprob) -> TokenText:
        """A token's log-probability with its text."""
        top = tuple(self._token(each, logprob) for each, logprob in token.top)
        return self._token(token.token, token.logprob, top)

    def _token(self, token: int, logprob: float, top: tuple[TokenText, ...] = ()) -> TokenText:
        raw = self._decoder.bytes_of(token)
        return TokenText(raw.decode("utf-8", "replace"), raw, logprob, top)

    def see(self, event: Committed) -> None:
        """Told every round that commits tokens."""
        self.session.see(event.report)


class Generation:
    """All answers to one request, on an event loop."""

    def __init__(self, model: Model, ask: Ask, prompts: Sequence[Rendered]) -> None:
        """Queue them. Raises RequestError, and then none is left queued."""
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.answers: list[Answer] = []
        try:
            for choice in range(ask.choices):
                prompt, nth = prompts[choice // ask.n], choice % ask.n
                self.answers.append(model.submit(ask, prompt, nth, self._notify))
        except BaseException:
            self.close()
            raise

    def _notify(self) -> None:
        """In the engine thread; a loop that is closed has nobody to wake."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    @property
    def over(self) -> bool:
        """Whether every answer has ended."""
        return all(answer.over for answer in self.answers)

    async def wait(self, seconds: float) -> bool:
        """Wait until there may be more to read; False when that took too long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        woken = self._wake.is_set()
        self._wake.clear()
        return woken

    def ready(self) -> Iterator[tuple[int, AnswerEvent]]:
        """What has come, with the number of its answer. Raises what made one of them fail."""
        for number, answer in enumerate(self.answers):
            for event in answer.ready():
                yield number, event

    def close(self) -> None:
        """Cancel what is left."""
        for answer in self.answers:
            answer.close()
