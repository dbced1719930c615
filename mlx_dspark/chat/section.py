"""A section of an answer that holds calls, read by a grammar's script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from mlx_dspark.chat.script import Ask, Begin, Broken, Calls, Declare, End, Json, Say, Schemas, Script
from mlx_dspark.foundation.events import ToolCallArguments, ToolCallBegan, ToolCallEnded

CallEvent = ToolCallBegan | ToolCallArguments | ToolCallEnded


class Section:
    """Runs one script over the text after `opened`.

    `closed` once the section is over; `called` when calls were all that it held. What is not a complete call
    of a declared tool is given back as text, the mark that opened the section included. The last character of
    a call's arguments waits for the end of the call: without it, none that breaks off can be run.
    """

    def __init__(
        self, opened: str, script: Script, tools: Schemas, index: Iterator[int], new_id: Callable[[], str]
    ) -> None:
        self.closed = False
        self.called = True
        self._script, self._tools, self._index, self._new_id = script, tools, index, new_id
        self._source = [opened]
        self._spill: list[str] = []
        self._events: list[CallEvent] = []
        self._muted = False
        self._open: int | None = None
        self._tail = ""
        self._ask: Ask | None = None
        self._advance(None)

    def push(self, text: str, *, ended: bool) -> tuple[list[CallEvent], str, str]:
        """The events that the text completed, the text that is no call and follows them, and the rest of
        `text`, which was not read."""
        while not self.closed and self._ask is not None:
            ask = self._ask
            used = ask.feed(text, ended)
            self._read(text[:used])
            text = text[used:]
            self._stream(ask)
            if ask.failed:
                self._break()
            elif ask.done:
                self._advance(ask.value)
            else:
                break
        events, self._events = self._events, []
        spill, self._spill = "".join(self._spill), []
        return events, spill, text

    def _read(self, text: str) -> None:
        (self._spill if self._muted else self._source).append(text)

    def _stream(self, ask: Ask) -> None:
        if isinstance(ask, Json) and ask.streamed and self._open is not None and (piece := ask.taken()):
            piece, self._tail = (self._tail + piece)[:-1], piece[-1]
            self._tell(piece)

    def _tell(self, piece: str) -> None:
        if piece and self._open is not None:
            self._events.append(ToolCallArguments(self._open, piece))

    def _advance(self, value: object) -> None:
        """Let the script go on to its next question."""
        try:
            asked = self._script.send(value)
            while not isinstance(asked, Ask):
                self._hear(asked)
                asked = self._script.send(None)
            self._ask = asked
        except StopIteration:
            self.closed = True
        except Broken:
            self._break()

    def _hear(self, said: Say) -> None:
        if isinstance(said, Declare) and said.name not in self._tools:
            self._mute()
        if self._muted:
            return
        match said:
            case Begin():
                self._begin(said.name)
            case End():
                self._end(complete=True)
            case Calls():
                self._whole(said)

    def _whole(self, said: Calls) -> None:
        if not all(name in self._tools and isinstance(given, dict) for name, given in said.calls):
            raise Broken
        texts = [_dumped(given) for _, given in said.calls]
        for (name, _), text in zip(said.calls, texts, strict=True):
            self._begin(name)
            assert self._open is not None
            self._events.append(ToolCallArguments(self._open, text))
            self._end(complete=True)

    def _begin(self, name: str) -> None:
        self._open = next(self._index)
        self._events.append(ToolCallBegan(self._open, self._new_id(), name))

    def _end(self, *, complete: bool) -> None:
        if complete:
            self._tell(self._tail)
        if self._open is not None:
            self._events.append(ToolCallEnded(self._open, complete))
        self._open, self._tail = None, ""
        if complete:
            self._source.clear()

    def _mute(self) -> None:
        self._muted, self.called = True, False
        self._spill += self._source
        self._source.clear()

    def _break(self) -> None:
        self._end(complete=False)
        self._mute()
        self.closed = True


def _dumped(arguments: object) -> str:
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Broken from error
