"""An answer on its way to one client: frames as they come or their fold, keep-alives by the clock, and a
client that goes away cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from starlette.responses import Response

from mlx_dspark.serving.dialects.base import Encoder, Frame, json_bytes
from mlx_dspark.serving.faults import Fault, fault_of, refused
from mlx_dspark.serving.generate import Generation

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class Clock:
    """Seconds between keep-alives, for one write to a slow client, and until an answer must be complete."""

    keep_alive: float = 15.0
    write: float = 60.0
    deadline: float | None = None


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Sink(Protocol):
    """Where frames go. `waiting` is called when there was nothing to write for as long as `quiet`."""

    async def write(self, frames: Sequence[Frame]) -> None: ...

    async def waiting(self) -> None: ...

    @property
    def quiet(self) -> float: ...


class Answering(Response):
    """The response to one request, streamed or plain. `done` is called once, however it ends."""

    def __init__(
        self,
        generation: Generation,
        encoder: Encoder,
        *,
        stream: bool,
        clock: Clock,
        error_body: Callable[[Fault], dict[str, Any]],
        done: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__()
        self._generation = generation
        self._encoder = encoder
        self._stream = stream
        self._clock = clock
        self._error_body = error_body
        self._done = done

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        cause: BaseException | None = None
        try:
            await self._until_gone(receive, self._streamed(send) if self._stream else self._plain(send))
        except ClientGone as gone:
            cause = gone
        except BaseException as error:
            cause = error
            raise
        finally:
            self._generation.close()
            self._done(cause)

    async def _until_gone(self, receive: Receive, answering: Any) -> None:
        """Run `answering` until it is done or the client is gone. Raises ClientGone."""
        writer = asyncio.ensure_future(answering)
        listener = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writer, listener}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                raise ClientGone
            await writer
        finally:
            writer.cancel()
            listener.cancel()
            await asyncio.gather(writer, listener, return_exceptions=True)

    async def _streamed(self, send: Send) -> None:
        wire = _Wire(send, self._encoder, self._clock)
        await wire.start()
        try:
            await self._pump(wire)
        except Exception as error:
            if isinstance(error, ClientGone):
                raise
            await wire.write(self._encoder.failed(fault_of(error)))
        await wire.finish()

    async def _plain(self, send: Send) -> None:
        kept = _Kept()
        try:
            await self._pump(kept)
        except Exception as error:  # noqa: BLE001
            fault = fault_of(error)
            await _send_json(send, fault.code, self._error_body(fault), fault.headers)
            return
        await _send_json(send, 200, self._encoder.fold(kept.frames), {})

    async def _pump(self, sink: Sink) -> None:
        """All frames of the answer into the sink. Raises what made it fail."""
        until = None if self._clock.deadline is None else monotonic() + self._clock.deadline
        await sink.write(self._encoder.begin())
        while not self._generation.over:
            if until is not None and monotonic() >= until:
                raise refused("timeout", f"The answer was not complete within {self._clock.deadline:g} s.")
            wait = sink.quiet if until is None else min(sink.quiet, until - monotonic())
            if not await self._generation.wait(max(wait, 0.0)):
                await sink.waiting()
                continue
            frames = [f for n, event in self._generation.ready() for f in self._encoder.take(n, event)]
            if frames:
                await sink.write(frames)
        await sink.write(self._encoder.end())


class _Kept:
    """Frames to be folded."""

    quiet = 3600.0

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    async def write(self, frames: Sequence[Frame]) -> None:
        self.frames += frames

    async def waiting(self) -> None:
        """Nobody is to be kept waiting."""


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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_json(send: Send, status: int, body: Any, headers: Any) -> None:
    raw = json_bytes(body)
    named = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    named += [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": named})
    await send({"type": "http.response.body", "body": raw})
