"""An answer's text as channels and calls, while it arrives.

Law: the events, with neighbouring pieces joined, do not depend on where the text is cut into pieces. Nothing
is lost but marks, headers, and white space next to them: what is not a mark in its place, or not a complete
call of a declared tool, is text.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable
from functools import lru_cache

from mlx_dspark.chat.grammars.harmony import call_to
from mlx_dspark.chat.headers import header_in
from mlx_dspark.chat.layouts import Layout, State
from mlx_dspark.chat.marks import Prose, held_back, is_quote
from mlx_dspark.chat.script import Grammar, Schemas
from mlx_dspark.chat.section import Section
from mlx_dspark.chat.spacing import Spacing
from mlx_dspark.foundation.events import ChatEvent, Text


def new_call_id() -> str:
    """An id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class ChannelParser:
    """Reads one answer that begins in `state`; `tools` are the schemas of the declared tools by their names.

    A mark that is quoted is text: see Prose. Tags that open reasoning must begin a line; those that close it
    count anywhere but between two quotation marks.
    """

    def __init__(
        self,
        layout: Layout,
        state: State = "text",
        grammar: Grammar | None = None,
        tools: Schemas | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._layout = layout
        self._state: State = state
        self._tools = tools or {}
        self._grammar = grammar if self._tools else None
        self._new_id, self._index = new_id, itertools.count()
        self._held, self._ended = "", False
        self._events: list[ChatEvent] = []
        self._section: Section | None = None
        self._prose, self._spacing = Prose(), Spacing()
        if state == "reasoning":
            self._spacing.enter("reasoning")

    @property
    def state(self) -> State:
        """What the answer is in."""
        return self._state

    def feed(self, text: str) -> list[ChatEvent]:
        """What the next piece of the text makes certain."""
        self._held += text
        return self._run()

    def finish(self) -> list[ChatEvent]:
        """What was waiting; no more will come."""
        self._ended = True
        events = self._run()
        if self._state != "header" and (space := self._spacing.finish()):
            events += self._run_text(space)
        return events

    def _run_text(self, text: str) -> list[ChatEvent]:
        return [Text(text, "reasoning" if self._state == "reasoning" else "text")]

    def _run(self) -> list[ChatEvent]:
        while self._held or (self._ended and self._section is not None):
            if self._section is not None:
                going = self._section_on(self._section)
            else:
                going = self._header_on() if self._state == "header" else self._body_on()
            if not going:
                break
        events, self._events = self._events, []
        return events

    # body ------------------------------------------------------------------------------------------

    def _body_on(self) -> bool:
        marks = self._marks()
        found = _alternatives(marks).search(self._held) if marks else None
        if found is None:
            kept = 0 if self._ended else held_back(self._held, marks)
            self._release(self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            return False
        self._release(self._held[: found.start()])
        self._held = self._held[found.start() :]
        mark = found.group()
        quoted = self._quoted(mark)
        if quoted is None:
            return False
        if quoted:
            self._release(mark[0])
            self._held = self._held[1:]
        else:
            self._enter(mark)
        return True

    def _marks(self) -> tuple[str, ...]:
        """The marks that mean something where the answer is now."""
        layout = self._layout
        marks: tuple[str, ...] = (*layout.ends, *layout.starts)
        if self._state == "reasoning":
            marks += (layout.closer, layout.opener if self._spacing.fresh else "")
        else:
            marks += (layout.opener, *(self._grammar.openers if self._grammar else ()))
        return tuple(filter(None, marks))

    def _quoted(self, mark: str) -> bool | None:
        """Whether the mark that the held text begins with is only quoted; None where that is not certain."""
        layout, prose = self._layout, self._prose
        if mark == layout.opener and self._state == "reasoning":
            return not self._spacing.fresh
        if mark == layout.closer or mark in layout.ends:
            if self._state == "text" and prose.fenced:
                return True
            if not prose.after_quote:
                return False
            after = self._held[len(mark) : len(mark) + 1]
            return None if not after and not self._ended else is_quote(after)
        if mark == layout.opener and not layout.control and not prose.line_begins:
            return True
        return prose.quoting

    def _enter(self, mark: str) -> None:
        layout = self._layout
        if mark in layout.starts:
            self._state = "header"
            return
        self._held = self._held[len(mark) :]
        if mark == layout.opener:
            self._turn("reasoning")
        elif mark == layout.closer:
            self._turn("text")
        elif mark in layout.ends:
            self._state = "header"
        else:
            assert self._grammar is not None
            self._open(mark, self._grammar)

    def _turn(self, state: State) -> None:
        self._state, self._prose = state, Prose()
        self._spacing.enter("reasoning" if state == "reasoning" else "text")

    def _release(self, text: str) -> None:
        self._prose.advance(text)
        if shown := self._spacing.release(text):
            self._events += self._run_text(shown)

    # headers ---------------------------------------------------------------------------------------

    def _header_on(self) -> bool:
        header = header_in(self._layout.name, self._held, ended=self._ended)
        if header is True:
            return False
        if not header:
            self._no_header()
            return True
        opened, self._held = self._held[: header.length], self._held[header.length :]
        self._turn(header.channel)
        if header.tool:
            self._section = Section(opened, call_to(header.tool), self._tools, self._index, self._new_id)
        return True

    def _no_header(self) -> None:
        """What is no header is text; of one that the end of the answer cut off, nothing is shown."""
        if self._ended and self._held.lstrip().startswith(self._layout.starts):
            self._held = ""
            return
        self._turn("text")
        self._spacing.keep()
        if self._held.startswith(self._layout.starts):
            self._release(self._held[:1])
            self._held = self._held[1:]

    # calls -----------------------------------------------------------------------------------------

    def _open(self, mark: str, grammar: Grammar) -> None:
        script = grammar.read(mark, self._tools)
        self._section = Section(mark, script, self._tools, self._index, self._new_id)

    def _section_on(self, section: Section) -> bool:
        events, spill, self._held = section.push(self._held, ended=self._ended)
        self._events += events
        self._release(spill)
        if not section.closed:
            return False
        self._section = None
        if section.called:
            self._turn("text")
            if self._layout.name == "harmony":
                self._state = "header"
        return True


@lru_cache(maxsize=64)
def _alternatives(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
