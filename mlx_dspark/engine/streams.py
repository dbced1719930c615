"""Threads and MLX: streams for engine threads, and turns of threads that share an engine.

MLX keeps a thread of the operating system for every CPU stream there ever was, and gives each Python thread
that calls it one of its own. So engine threads, of which one may follow another, borrow streams that any
thread may use.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from weakref import WeakSet

import mlx.core as mx

_LOCK = Lock()
_FREE: list[tuple[mx.Device, mx.Stream]] = []


@contextmanager
def own_stream(device: mx.Device) -> Iterator[None]:
    """In this thread MLX works on `device`, on a stream that no other thread uses meanwhile."""
    stream = _borrow(device)
    mx.set_default_device(device)
    mx.set_default_stream(stream)
    try:
        yield
    finally:
        mx.synchronize(stream)
        mx.clear_streams()
        with _LOCK:
            _FREE.append((device, stream))


def _borrow(device: mx.Device) -> mx.Stream:
    with _LOCK:
        for i, (of, _) in enumerate(_FREE):
            if of == device:
                return _FREE.pop(i)[1]
    return mx.new_thread_unsafe_stream(device)


class Turn:
    """A context in which one thread at a time works with MLX.

    It is taken for good when the program ends: no thread may be inside MLX while the interpreter is taken
    down.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        _TURNS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_TURNS: WeakSet[Turn] = WeakSet()


@atexit.register
def _take_all() -> None:
    for turn in list(_TURNS):
        turn.__enter__()
