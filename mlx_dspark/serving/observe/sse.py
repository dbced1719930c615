"""Server-sent events that are no answer: of a bus, or of work under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from time import monotonic

from starlette.responses import StreamingResponse

from mlx_dspark.foundation.bus import Bus
from mlx_dspark.serving.dialects.base import Frame
from mlx_dspark.serving.streaming import SSE_HEADERS

QUEUE = 256
_LOOK = 0.5
"""Seconds after which it is looked whether the server is about to end."""


def sse(frames: AsyncIterator[bytes]) -> StreamingResponse:
    """The response that carries them."""
    headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
    return StreamingResponse(frames, headers=headers, media_type="text/event-stream")


async def frames_of(
    bus: Bus[Frame], idle: Callable[[], Frame], *, quiet: float, ended: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """What is published, until the server ends; `idle` makes a frame for every `quiet` seconds without any.

    A reader who is too slow is told how many events it missed.
    """
    wake = asyncio.Event()
    with bus.subscribe(QUEUE, wake.set) as subscription:
        spoken = monotonic()
        while not ended():
            frames, dropped = subscription.take()
            if dropped:
                frames.insert(0, Frame({"events": dropped}, "dropped"))
            if not frames and monotonic() - spoken >= quiet:
                frames = [idle()]
            if frames:
                yield b"".join(frame.encode() for frame in frames)
                spoken = monotonic()
                continue
            wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), min(_LOOK, max(0.0, spoken + quiet - monotonic())))
