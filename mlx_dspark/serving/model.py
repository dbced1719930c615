"""A loaded model as the server uses it: prompts rendered, answers begun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.chat.format import ChatFormat, ChatPrompt
from mlx_dspark.chat.stops import TextStops
from mlx_dspark.chat.template import encode_text
from mlx_dspark.foundation.chat import Conversation
from mlx_dspark.foundation.errors import ContextOverflow
from mlx_dspark.foundation.events import TokenLogprob
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.serving.answer import Answer
from mlx_dspark.serving.ask import Ask, Prompt, seed_of_choice
from mlx_dspark.serving.events import TokenText
from mlx_dspark.serving.watch import Pulse
from mlx_dspark.session.session import Session

LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, for which JSON has no number."""


@dataclass(frozen=True)
class Rendered:
    """A prompt as token ids; `chat` is what a conversation was rendered to, None for raw text."""

    ids: tuple[int, ...]
    conversation: Conversation | None = None
    chat: ChatPrompt | None = None


class Model:
    """A session, how its model writes conversations, and the pulse of its engine.

    `context` is the most tokens that prompt and answer may have together, 0 where nothing is known.
    """

    def __init__(self, session: Session, context_window: int | None = None) -> None:
        self.session = session
        self.context = min(filter(None, (session.context, context_window)), default=0)
        self.engine: Any = session.engine
        self.pulse = Pulse(lambda: self.engine.running)
        self.format = ChatFormat(session.tokenizer)
        self._decoder = TextDecoder(session.tokenizer)

    def render(self, prompt: Prompt) -> Rendered:
        """Token ids of a prompt. Raises RequestError, and ContextOverflow where no room is left to answer."""
        if isinstance(prompt, Conversation):
            chat = self.format.render(prompt)
            rendered = Rendered(tuple(chat.ids), prompt, chat)
        elif isinstance(prompt, str):
            rendered = Rendered(encode_text(self.session.tokenizer, prompt))
        else:
            rendered = Rendered(prompt)
        if 0 < self.context <= len(rendered.ids):
            raise ContextOverflow(len(rendered.ids), self.context)
        return rendered

    def submit(self, ask: Ask, rendered: Rendered, nth: int, notify: Callable[[], None]) -> Answer:
        """Queue the `nth` answer to a prompt; `notify` is called in the engine's thread when there is more to
        read. Raises RequestError."""
        chat = rendered.chat

        def text() -> TextStops:
            decoder = self._decoder if chat is None else self.format.decoder
            return TextStops(decoder.start(), ask.stops, self.session.end_ids)

        def heard() -> None:
            self.pulse.heard()
            notify()

        room = self.context - len(rendered.ids) if self.context else ask.max_tokens
        sampling = replace(ask.sampling, seed=seed_of_choice(ask.sampling.seed, nth))
        check = text() if ask.stops else None
        limit = min(ask.max_tokens, room)
        stream = self.engine.submit(
            GenerateRequest(rendered.ids, limit, sampling, self.session.end_ids, check), heard
        )
        self.pulse.expect(stream)
        if chat is None or rendered.conversation is None:
            return Answer(self, stream, text())
        parser = self.format.parser(chat, rendered.conversation)
        return Answer(self, stream, text(), parser, reasons=chat.opens == "reasoning")

    def warm_up(self, tokens: int, new: int) -> None:
        """Read a prompt of so many tokens and write a few, so that the first request finds all compiled."""
        room = self.context or tokens + new
        ids = (self.session.tokenizer.encode("a") * tokens)[: max(1, min(tokens, room - new))]
        stream = self.engine.submit(GenerateRequest(tuple(ids), new), self.pulse.heard)
        self.pulse.expect(stream)
        for _ in stream:
            pass

    def token_text(self, token: TokenLogprob) -> TokenText:
        """A token's log-probability with its text."""
        top = tuple(self._token(each, logprob) for each, logprob in token.top)
        return self._token(token.token, token.logprob, top)

    def _token(self, token: int, logprob: float, top: tuple[TokenText, ...] = ()) -> TokenText:
        raw = self._decoder.bytes_of(token)
        return TokenText(raw.decode("utf-8", "replace"), raw, max(logprob, LOWEST_LOGPROB), top)
