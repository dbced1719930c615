"""Continuous batching: one thread owns MLX, and requests join and leave its batch between rounds.

Everything else posts to that thread and reads events from queues.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from threading import Thread, current_thread
from typing import Self

import mlx.core as mx

from mlx_dspark.contracts import Drafter, Target
from mlx_dspark.engine.admit import check_request
from mlx_dspark.engine.handover import settle
from mlx_dspark.engine.loop import VerifyLoop
from mlx_dspark.engine.post import Post
from mlx_dspark.engine.stream import Stream, Ticket
from mlx_dspark.engine.streams import own_stream
from mlx_dspark.engine.worker import Meter, Worker
from mlx_dspark.foundation.caps import CapPolicy, FixedCaps
from mlx_dspark.foundation.request import GenerateRequest


class Scheduler:
    """Generates from one target, for up to `max_rows` requests at once, with at most one drafter.

    Submit from any thread. A row that runs alone takes the same path as in an `Engine`, launch-ahead
    included; `loop` makes its loop, as `VerifyLoop` does; `meter` measures while batches run. A
    request that fails, fails alone: rows whose common round raised are read again, each by itself, and go on
    from there. Whatever is raised, the thread
    lives on.

    Make it in the thread that loaded `target` and `drafter`, and evaluate nothing with them elsewhere. Ends
    with `close`, when it is dropped, or with the program.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        cap: CapPolicy | None = None,
        max_rows: int = 8,
        prefill_chunk: int = 512,
        loop: Callable[..., VerifyLoop] = VerifyLoop,
        meter: Meter | None = None,
    ) -> None:
        assert max_rows >= 1
        settle(target, drafter)
        self.target = target
        self.drafter = drafter
        self.max_rows = max_rows
        self._post = Post()
        self._loop = loop(target, drafter, prefill_chunk=prefill_chunk)
        self._meter = meter
        worker = Worker(self._loop, cap if cap is not None else FixedCaps({}), max_rows, self._post, meter)
        self._thread = Thread(target=_run, args=(worker, mx.default_device()), name="engine", daemon=True)
        _LIVE[self._thread] = self._post
        self._thread.start()
        weakref.finalize(self, self._post.end, False).atexit = False

    def submit(self, request: GenerateRequest, notify: Callable[[], None] | None = None) -> Stream:
        """The events of a request, which is queued; `notify` is called in the engine thread after each.

        Raises RequestError or ContextOverflow when it cannot run on this target, or the engine is closed.
        """
        check_request(request, self.target.spec)
        ticket = Ticket(request, notify=notify)
        self._post.submit(ticket)
        return Stream(ticket, self._cancel)

    def stream(self, request: GenerateRequest) -> Stream:
        """`submit`, by the name that an `Engine` has for it."""
        return self.submit(request)

    def _cancel(self, ticket: Ticket) -> None:
        """A stream holds this method, and so keeps its engine alive."""
        self._post.cancel(ticket)

    @property
    def prefill_chunk(self) -> int:
        """Most tokens of prompts that are read at once: what a cancel and other rows may wait for."""
        return self._loop.prefill_chunk

    @prefill_chunk.setter
    def prefill_chunk(self, tokens: int) -> None:
        """Takes effect with the next chunk, from any thread; where several processes share the target, they
        must agree on it from the start."""
        assert tokens >= 1
        self._loop.prefill_chunk = tokens

    def costs_known(self, rows: int) -> bool:
        """Whether nothing of what rounds of so many rows cost is left to be measured while they run."""
        return self._meter is None or self._meter.known(rows)

    @property
    def running(self) -> bool:
        """Whether the engine thread is alive."""
        return self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the engine has nothing to do, or is closed; False when that took longer than `timeout`
        seconds."""
        return self._post.when_idle().wait(timeout)

    def close(self, *, drain: bool = False) -> None:
        """End the thread, from any thread, and wait for it. Requests that are queued or running are finished
        first with `drain`, else cancelled. Closing twice does no harm."""
        self._post.end(drain)
        if current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_LIVE: dict[Thread, Post] = {}
"""Engine threads and where to post to them, until they end."""


def _run(worker: Worker, device: mx.Device) -> None:
    try:
        with own_stream(device):
            worker.run()
    finally:
        _LIVE.pop(current_thread(), None)


@atexit.register
def _end_all() -> None:
    """MLX must not be at work while the interpreter is taken down."""
    for thread, post in list(_LIVE.items()):
        post.end(False)
        thread.join()
