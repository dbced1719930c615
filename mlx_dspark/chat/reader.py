"""One answer to a conversation, read token by token: its text, its stop strings, its channels and calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mlx_dspark.chat.channels import ChannelParser
from mlx_dspark.chat.detokenize import Detokenizer
from mlx_dspark.chat.format import ChatFormat, ChatPrompt
from mlx_dspark.chat.stops import TextStops
from mlx_dspark.foundation.chat import Conversation
from mlx_dspark.foundation.events import ChatEvent


class ChatReader:
    """Told every committed token in order; answers True, as a StopCheck does, when the request must end.

    A request ends at an end-of-sequence id, at a stop string, and where the conversation's `thinking_budget`
    is spent (`spent`). In the last case the answer is not over: `resume` closes the reasoning and gives the
    prompt of the request that goes on with it. Engine and reader have one each, since they may be different
    threads; both are to be resumed. `text` is the text since the answer began or was resumed.
    """

    def __init__(
        self,
        form: ChatFormat,
        prompt: ChatPrompt,
        conversation: Conversation,
        *,
        stops: Sequence[str] = (),
        end_ids: Collection[int] = (),
    ) -> None:
        """Raises RequestError when a stop string is empty."""
        self._form, self._prompt = form, prompt
        self._parser: ChannelParser = form.parser(prompt, conversation)
        self._budget = conversation.thinking_budget
        self._stops, self._end_ids = tuple(stops), frozenset(end_ids)
        self._ids = list(prompt.ids)
        self._ready: list[ChatEvent] = []
        self.reasoning_tokens = 0
        self.spent = False
        self._begin()

    def __call__(self, token: int) -> bool:
        self._ids.append(token)
        ended = self.text(token)
        if text := self.text.take():
            self._ready += self._parser.feed(text)
        if self._parser.state == "reasoning" and not ended:
            self.reasoning_tokens += 1
            self.spent = self._over_budget and self._whole.whole
        return ended or self.spent

    def take(self) -> list[ChatEvent]:
        """The events that became certain since the last call."""
        events, self._ready = self._ready, []
        return events

    def finish(self) -> list[ChatEvent]:
        """The last of the events. Call once, when no more tokens come."""
        self._flush()
        self._ready += self._parser.finish()
        return self.take()

    def resume(self) -> tuple[int, ...]:
        """Close the reasoning, and give the ids of prompt, answer so far and closing marks."""
        self._flush()
        shut = self._form.layout.shut
        self._ready += self._parser.feed(shut)
        self._ids += self._form.encode(shut)
        self.spent = False
        self._begin()
        return tuple(self._ids)

    @property
    def _over_budget(self) -> bool:
        return self._budget is not None and self.reasoning_tokens >= self._budget

    def _begin(self) -> None:
        self._whole = _Whole(self._form.decoder.start())
        self.text = TextStops(self._whole, self._stops, self._end_ids)

    def _flush(self) -> None:
        if text := self.text.finish():
            self._ready += self._parser.feed(text)


class _Whole:
    """A detokenizer that knows whether it has given out all the characters it began."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self.whole = True

    def push(self, token: int) -> str:
        text = self._detokenizer.push(token)
        self.whole = bool(text)
        return text

    def finish(self) -> str:
        return self._detokenizer.finish()
