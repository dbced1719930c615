"""Publish and subscribe, with queues that drop: whoever does not read holds nobody up. Used in one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Bus(Generic[T]):
    """Hands what is published to every subscriber; a new one gets the last `replay` first."""

    def __init__(self, replay: int = 0) -> None:
        self._last: deque[T] = deque(maxlen=replay)
        self._subscribers: list[Subscription[T]] = []
        self.dropped = 0

    @property
    def subscribers(self) -> int:
        """How many there are."""
        return len(self._subscribers)

    def publish(self, item: T) -> None:
        """Takes the same time whether anybody reads or not."""
        self._last.append(item)
        for subscriber in self._subscribers:
            self.dropped += subscriber.put(item)

    def subscribe(self, size: int, notify: Callable[[], None]) -> Subscription[T]:
        """A queue of at most `size` items; `notify` is called after each, and must not wait."""
        subscriber = Subscription(self._subscribers, list(self._last)[-size:], size, notify)
        self._subscribers.append(subscriber)
        return subscriber


class Subscription(Generic[T]):
    """One subscriber's queue. `dropped` counts what was lost since it was last asked for."""

    def __init__(
        self, among: list[Subscription[T]], first: list[T], size: int, notify: Callable[[], None]
    ) -> None:
        self._among = among
        self._items: deque[T] = deque(first)
        self._size = size
        self._notify = notify
        self._dropped = 0

    def put(self, item: T) -> bool:
        """Add an item; where there is no room the oldest goes, and that is True."""
        full = len(self._items) >= self._size
        if full:
            self._items.popleft()
            self._dropped += 1
        self._items.append(item)
        self._notify()
        return full

    def take(self) -> tuple[list[T], int]:
        """What is there, and how many items before it were lost."""
        items, dropped = list(self._items), self._dropped
        self._items.clear()
        self._dropped = 0
        return items, dropped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._among.remove(self)
