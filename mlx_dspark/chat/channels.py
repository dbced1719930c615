"""An answer's text as channels and calls, while it arrives."""

from __future__ import annotations

from mlx_dspark.chat.layouts import Layout, State
from mlx_dspark.foundation.events import ChatEvent, Text


class ChannelParser:
    """Reads one answer."""

    def __init__(self, layout: Layout, state: State) -> None:
        self._layout, self._state = layout, state

    def feed(self, text: str) -> list[ChatEvent]:
        """What the next piece of the text makes certain."""
        return [Text(text, "reasoning" if self._state == "reasoning" else "text")] if text else []

    def finish(self) -> list[ChatEvent]:
        """What was waiting; no more will come."""
        return []
