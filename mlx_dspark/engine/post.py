"""The way to the engine thread: whatever is asked of it goes through one queue."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, RLock

from mlx_dspark.engine.stream import Ticket
from mlx_dspark.foundation.errors import RequestError


@dataclass(frozen=True, slots=True)
class End:
    """Told to the engine thread: take nothing more; `drain`: finish what is there, else cancel it."""

    drain: bool


class Post:
    """What is posted to the engine thread. A ticket that comes again wants to be cancelled; an event wants to
    be set when nothing is left to do.

    `closed`: no request is taken any more; `silent`: the thread has read for the last time.
    """

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Ticket | End | Event] = SimpleQueue()
        self.lock = RLock()
        self.closed = False
        self.silent = False

    def submit(self, ticket: Ticket) -> None:
        with self.lock:
            if self.closed:
                raise RequestError("The engine is closed.", "Load the model again.")
            self.inbox.put(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Takes no lock: a stream may be dropped by the garbage collector, anywhere."""
        if not (ticket.cancelled or ticket.ended):
            ticket.cancelled = True
            self.inbox.put(ticket)

    def when_idle(self) -> Event:
        """Set when nothing is left to do, and when nothing more will be done."""
        idle = Event()
        with self.lock:
            if self.silent:
                idle.set()
            else:
                self.inbox.put(idle)
        return idle

    def end(self, drain: bool) -> None:
        with self.lock:
            self.closed = True
        self.inbox.put(End(drain))

    def fall_silent(self) -> list[Ticket | Event]:
        """Take nothing more; returns what was not heard."""
        with self.lock:
            self.closed = self.silent = True
            left = [self.inbox.get() for _ in range(self.inbox.qsize())]
        return [posted for posted in left if not isinstance(posted, End)]
