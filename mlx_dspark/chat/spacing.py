"""White space next to marks, which is layout and not shown."""

from __future__ import annotations

from mlx_dspark.foundation.events import Channel


class Spacing:
    """Holds back the white space at the end of what a channel said, until more of it comes.

    After a mark, white space up to its last line break is dropped; at the end of a channel that says no more,
    all of it.
    """

    def __init__(self) -> None:
        self._channel: Channel = "text"
        self._waiting: dict[Channel, str] = {"text": "", "reasoning": ""}
        self._spoke: set[Channel] = set()
        self._lead = ""
        self.fresh = False

    def enter(self, channel: Channel) -> None:
        """A mark: what follows is said in `channel`."""
        if self._channel not in self._spoke:
            self._waiting[self._channel] = ""
        self._channel, self.fresh, self._lead = channel, True, ""

    def keep(self) -> None:
        """What follows is no mark's, so its white space counts."""
        self.fresh = False

    def release(self, text: str) -> str:
        """The text that is now certain to be shown."""
        if self.fresh:
            text = self._lead + text
            body = text.lstrip()
            if not body:
                self._lead = text
                return ""
            lead = text[: len(text) - len(body)]
            text = lead[lead.rfind("\n") + 1 :] + body
            self.fresh, self._lead = False, ""
        body = text.rstrip()
        if not body:
            self._waiting[self._channel] += text
            return ""
        shown = self._waiting[self._channel] + body
        self._waiting[self._channel] = text[len(body) :]
        self._spoke.add(self._channel)
        return shown

    def finish(self) -> str:
        """The white space that nothing followed; of a channel that a mark has just opened, none."""
        return "" if self.fresh else self._waiting[self._channel]
