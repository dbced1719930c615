"""A request on its way: what the engine thread holds of it, and the handle its reader has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Self

from mlx_dspark.foundation.events import EngineEvent, Finished
from mlx_dspark.foundation.request import GenerateRequest, StopCheck

_NUMBERS = count()


@dataclass(eq=False)
class Ticket:
    """A request, and the queue of its events. The engine thread writes events; anyone may set `cancelled`.

    The queue is not bounded: what a request can have in it is, by its prompt's chunks and its tokens, and so
    a slow reader holds nobody up. An exception in it is the last entry, as Finished is. `notify` is called in
    the engine thread after each entry; it must neither wait nor raise.
    """

    request: GenerateRequest
    number: int = field(default_factory=lambda: next(_NUMBERS))
    events: SimpleQueue[EngineEvent | Exception] = field(default_factory=SimpleQueue)
    notify: Callable[[], None] | None = None
    cancelled: bool = False
    ended: bool = False

    def put(self, event: EngineEvent | Exception) -> None:
        """Hand an event out; nothing after the last one."""
        if not self.ended:
            self.ended = isinstance(event, Finished | Exception)
            self.events.put(event)
            if self.notify is not None:
                self.notify()


class Stream:
    """The events of one request, in the order of `Engine.stream`: an iterator for one reader.

    Raises, in place of the next event, what made the request fail. Dropping the stream cancels the request,
    as `close` does.
    """

    def __init__(self, ticket: Ticket, cancel: Callable[[Ticket], None]) -> None:
        self._ticket = ticket
        self._cancel = cancel
        self._over = False

    @property
    def ended(self) -> bool:
        """Whether the engine has nothing more for it; what it had may still be to be read."""
        return self._ticket.ended

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> EngineEvent:
        return self.next()

    def next(self, timeout: float | None = None) -> EngineEvent:
        """The next event; waits up to `timeout` seconds for it.

        Raises StopIteration after the last one, TimeoutError when none came in time.
        """
        if self._over:
            raise StopIteration
        try:
            event = self._ticket.events.get(timeout=timeout)
        except Empty:
            raise TimeoutError(f"no event within {timeout} seconds") from None
        self._over = isinstance(event, Finished | Exception)
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self) -> None:
        """End the request, from any thread, within one round or one chunk of its prompt. The events decided
        until then still come, and Finished with the reason `cancelled`."""
        self._cancel(self._ticket)

    def close(self) -> None:
        """Cancel, and read no more."""
        if not self._over:
            self._over = True
            self._cancel(self._ticket)

    def __del__(self) -> None:
        self.close()


class GuardedCheck:
    """A stop check that ends its own row where it would raise, and keeps what it raised in `error`."""

    def __init__(self, check: StopCheck) -> None:
        self._check = check
        self.error: Exception | None = None

    def __call__(self, token: int) -> bool:
        try:
            return self._check(token)
        except BaseException as error:  # noqa: BLE001
            ordinary = isinstance(error, Exception)
            self.error = error if ordinary else RuntimeError(f"The stop check raised {error!r}.")
            return True
