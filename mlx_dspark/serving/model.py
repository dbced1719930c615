"""A loaded model as the server uses it: prompts rendered, answers begun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.chat.format import ChatPrompt
from mlx_dspark.chat.reader import ChatReader
from mlx_dspark.chat.stops import TextStops
from mlx_dspark.chat.template import encode_text, is_text
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.chat import Conversation
from mlx_dspark.foundation.errors import ContextOverflow, EngineLost
from mlx_dspark.foundation.events import Prefilled, TokenLogprob
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.serving.answer import Answer, Reader, TextReader
from mlx_dspark.serving.ask import Ask, Prompt, seed_of_choice
from mlx_dspark.serving.events import TokenText
from mlx_dspark.serving.watch import Pulse
from mlx_dspark.session.session import Session

LOWEST_LOGPROB = -9999.0
"""In place of minus infinity, for which JSON has no number."""

_WARM_TOKENS = 12
_TIMED_PROMPT = 128
_CHUNK_SECONDS = 0.4
"""What a chunk of a prompt may take."""
_SHORTEST_CHUNK = 64
_LONG_TOKEN = 8
"""Characters of a token that is longer than tokens mostly are."""
_PIECE = 32_768
_SURELY = 1.1
"""Text cut into pieces has no more tokens than this, as a multiple of what it has whole."""


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
        self._decoder = TextDecoder(session.tokenizer)

    def render(self, prompt: Prompt) -> Rendered:
        """Token ids of a prompt. Raises RequestError, and ContextOverflow where no room is left to answer."""
        self._measure(prompt)
        if isinstance(prompt, Conversation):
            chat = self.session.format.render(prompt)
            rendered = Rendered(tuple(chat.ids), prompt, chat)
        elif isinstance(prompt, str):
            rendered = Rendered(encode_text(self.session.tokenizer, prompt))
        else:
            rendered = Rendered(prompt)
        if 0 < self.context <= len(rendered.ids):
            raise self._overflow(prompt, len(rendered.ids))
        return rendered

    def _measure(self, prompt: Prompt) -> None:
        """Refuse what is far too long without reading all of it. Raises ContextOverflow."""
        texts = texts_of(prompt)
        if self.context and sum(map(len, texts)) > self.context * _LONG_TOKEN:
            tokens = tokens_in(self.session.tokenizer, texts, round(self.context * _SURELY))
            if tokens > self.context * _SURELY:
                raise self._overflow(prompt, round(tokens / _SURELY), at_least=True)

    def _overflow(self, prompt: Prompt, tokens: int, *, at_least: bool = False) -> ContextOverflow:
        return ContextOverflow(
            tokens,
            self.context,
            field="messages" if isinstance(prompt, Conversation) else "prompt",
            at_least=at_least,
            window=self.context < self.session.context,
        )

    def submit(self, ask: Ask, rendered: Rendered, nth: int, notify: Callable[[], None]) -> Answer:
        """Queue the `nth` answer to a prompt; `notify` is called in the engine's thread when there is more to
        read. Raises RequestError."""
        sampling = replace(ask.sampling, seed=seed_of_choice(ask.sampling.seed, nth))
        reader, check = self._reader(ask, rendered), None
        if ask.stops or (rendered.conversation and rendered.conversation.thinking_budget is not None):
            check = self._reader(ask, rendered)

        def heard() -> None:
            self.pulse.heard()
            notify()

        def begin(resumed: tuple[int, ...] | None, left: int) -> Stream | None:
            ids = rendered.ids if resumed is None else resumed
            room = self.context - len(ids) if self.context else left
            if room < 1:
                return None
            request = GenerateRequest(ids, min(left, room), sampling, self.session.end_ids, check)
            stream = self.engine.submit(request, heard)
            self.pulse.expect(stream)
            return stream

        return Answer(self, reader, begin, ask.max_tokens, check)

    def _reader(self, ask: Ask, rendered: Rendered) -> Reader:
        ends = self.session.end_ids
        if rendered.chat is None or rendered.conversation is None:
            return TextReader(TextStops(self._decoder.start(), ask.stops, ends))
        form = self.session.format
        return ChatReader(form, rendered.chat, rendered.conversation, stops=ask.stops, end_ids=ends)

    def warm_up(self, tell: Callable[[], None] = lambda: None) -> None:
        """Read and write a little, so that the first request finds all compiled, and see how long reading
        takes: a cancel, and everybody else's next token, wait for a chunk of a prompt at most.

        `tell` is called after every step, and may raise to end it.
        """
        tell()
        self._read(self.engine.prefill_chunk, _WARM_TOKENS, tell)
        tokens = min(_TIMED_PROMPT, self.engine.prefill_chunk)
        seconds = self._read(tokens, 1, tell)
        if not self.session.shared:
            self.engine.prefill_chunk = chunk_of(tokens, seconds, self.engine.prefill_chunk)

    def _read(self, tokens: int, new: int, tell: Callable[[], None]) -> float:
        """Seconds for a prompt of up to so many tokens."""
        room = (self.context or tokens + new) - new
        some = self.session.tokenizer.encode("a", add_special_tokens=False)
        ids = tuple(some * tokens)[: max(1, min(tokens, room))]
        stream = self.engine.submit(GenerateRequest(ids, new), self.pulse.heard)
        self.pulse.expect(stream)
        seconds = 0.0
        try:
            for event in stream:
                tell()
                if isinstance(event, Prefilled):
                    seconds += event.report.landed_at - event.report.launched_at
        finally:
            stream.close()
        return seconds

    def close(self, seconds: float = 10.0) -> None:
        """End the engine, once nobody waits for it any more. Raises EngineLost where it does not come to rest
        in so long, since its thread cannot be ended then."""
        if not self.engine.wait(seconds):
            raise EngineLost("The engine does not come to rest.", "It may hang; end the process.")
        self.session.close()

    def token_text(self, token: TokenLogprob) -> TokenText:
        """A token's log-probability with its text."""
        top = tuple(self._token(each, logprob) for each, logprob in token.top)
        return self._token(token.token, token.logprob, top)

    def _token(self, token: int, logprob: float, top: tuple[TokenText, ...] = ()) -> TokenText:
        raw = self._decoder.bytes_of(token)
        return TokenText(raw.decode("utf-8", "replace"), raw, max(logprob, LOWEST_LOGPROB), top)


def chunk_of(tokens: int, seconds: float, most: int) -> int:
    """How many tokens of a prompt to read at once, where so many took so long; `most` where that is quick."""
    fitting = int(tokens * _CHUNK_SECONDS / seconds) if seconds > 0 else most
    return min(most, max(_SHORTEST_CHUNK, fitting // _SHORTEST_CHUNK * _SHORTEST_CHUNK))


def texts_of(prompt: Prompt) -> list[str]:
    """What a prompt surely has of text, but for text that is not valid: templates may leave out some of what
    the assistant said."""
    if isinstance(prompt, Conversation):
        said = [turn.content.strip() for turn in prompt.turns if turn.role != "assistant"]
        return list(filter(is_text, said))
    return [prompt] if isinstance(prompt, str) and is_text(prompt) else []


def tokens_in(tokenizer: Any, texts: Sequence[str], enough: int) -> int:
    """How many tokens texts have, piece by piece; counting ends when there are more than `enough`."""
    tokens = 0
    for text in texts:
        for start in range(0, len(text), _PIECE):
            tokens += len(tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
            if tokens > enough:
                return tokens
    return tokens
