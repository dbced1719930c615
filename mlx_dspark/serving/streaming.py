"""An answer on its way to one client: frames as they come or their fold, keep-alives by the clock, and a
client that goes away cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from mlx_dspark.serving.dialects.base import Dialect, Encoder, Frame, json_bytes
from mlx_dspark.serving.faults import fault_of, refused
from mlx_dspark.serving.generate import Generation

T = TypeVar("T")

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_EVER = 3600.0
ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
"""When the request that is being answered came, by `monotonic`."""


@dataclass(frozen=True)
class Clock:
    """Seconds: of silence before a keep-alive, for one write to a slow client, in the queue, and until an
    answer must be complete."""

    keep_alive: float = 15.0
    write: float = 60.0
    queue: float = 300.0
    deadline: float | None = None

    def left(self, since: float, *, begun: bool) -> float:
        """Seconds until a request that came then, and was `begun` or not, is at a limit. Raises Refused when
        it is."""
        spent, left = monotonic() - since, _EVER
        if not begun:
            left = self.queue - spent
            if left <= 0:
                raise refused("overloaded", f"No turn came within {self.queue:g} s; the server is busy.")
        if self.deadline is not None:
            left = min(left, self.deadline - spent)
            if left <= 0:
                raise refused("timeout", f"The answer was not complete within {self.deadline:g} s.")
        return left


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Sink(Protocol):
    """Where frames go. `waiting` is called where there was nothing to write, and not before `quiet` seconds
    went by without a word from the engine."""

    async def write(self, frames: Sequence[Frame]) -> None: ...

    async def waiting(self) -> None: ...

    @property
    def quiet(self) -> float: ...


class Answering(Response):
    """The response to one request, streamed or plain. `done` is called once, with what ended it if it was
    not answered in full."""

    def __init__(
        self,
        generation: Generation,
        encoder: Encoder,
        dialect: Dialect,
        *,
        stream: bool,
        clock: Clock,
        done: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__()
        self._generation = generation
        self._encoder = encoder
        self._dialect = dialect
        self._stream = stream
        self._clock = clock
        self._done = done
        self._begun = ARRIVED.get() or monotonic()
        self._error: BaseException | None = None

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._streamed(send) if self._stream else self._plain(send))
        except ClientGone as gone:
            self._error = gone
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._generation.close()
            self._done(self._error)

    async def _streamed(self, send: Send) -> None:
        wire = _Wire(send, self._encoder, self._clock)
        await wire.start()
        try:
            await self._pump(wire)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001
            self._error = error
            await wire.write(self._encoder.failed(fault_of(error)))
        await wire.finish()

    async def _plain(self, send: Send) -> None:
        kept = _Kept()
        try:
            await self._pump(kept)
            status, body, headers = 200, self._encoder.fold(kept.frames), {}
        except Exception as error:  # noqa: BLE001
            self._error, fault = error, fault_of(error)
            status, body, headers = self._dialect.status(fault), self._dialect.error(fault), fault.headers
        await send_json(send, status, body, headers)

    async def _pump(self, sink: Sink) -> None:
        """All frames of the answer into the sink. Raises what made it fail."""
        await sink.write(self._encoder.begin())
        while not self._generation.over:
            if not await self._generation.wait(max(0.0, min(sink.quiet, self._left()))):
                await sink.waiting()
                continue
            frames = [f for n, event in self._generation.ready() for f in self._encoder.take(n, event)]
            await (sink.write(frames) if frames else sink.waiting())
        await sink.write(self._encoder.end())

    def _left(self) -> float:
        """Seconds until a limit is reached. Raises Refused when one is."""
        return self._clock.left(self._begun, begun=self._generation.started)


class _Kept:
    """Frames to be folded."""

    quiet = _EVER

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    async def write(self, frames: Sequence[Frame]) -> None:
        self.frames += frames

    async def waiting(self) -> None:
        """A plain answer has nothing to say before its end."""


class _Wire:
    """Frames to a client that reads them as they come."""

    def __init__(self, send: Send, encoder: Encoder, clock: Clock) -> None:
        self._send = send
        self._encoder = encoder
        self._clock = clock
        self._written = monotonic()

    @property
    def quiet(self) -> float:
        return max(0.0, self._written + self._clock.keep_alive - monotonic())

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": SSE_HEADERS})

    async def write(self, frames: Sequence[Frame]) -> None:
        if frames:
            await self._body(b"".join(frame.encode() for frame in frames), more=True)

    async def waiting(self) -> None:
        if self.quiet <= 0:
            await self.write(self._encoder.keep_alive())

    async def finish(self) -> None:
        await self._body(b"", more=False)

    async def _body(self, body: bytes, *, more: bool) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more}
        try:
            await asyncio.wait_for(self._send(message), self._clock.write)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error
        self._written = monotonic()


async def send_json(send: Send, status: int, body: Any, headers: Mapping[str, str]) -> None:
    """One whole response."""
    raw = json_bytes(body)
    named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    named += [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": raw})


async def until_gone(receive: Receive, answering: Coroutine[Any, Any, T]) -> T:
    """What `answering` returns, unless the client leaves before. Raises ClientGone."""
    writer = asyncio.ensure_future(answering)
    listener = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({writer, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not writer.done():
            raise ClientGone
        return await writer
    finally:
        writer.cancel()
        listener.cancel()
        await asyncio.gather(writer, listener, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
