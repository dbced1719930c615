"""A thread for work that calls MLX, awaited on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

import mlx.core as mx

from mlx_dspark.engine.streams import own_stream

T = TypeVar("T")


async def in_mlx_thread(work: Callable[[], T]) -> T:
    """What `work` returns, run in a thread of its own on MLX's default device. Raises what it raises.

    The thread goes on to its end where the wait is cancelled.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    device = mx.default_device()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def run() -> None:
        value, failure = None, None
        with own_stream(device):
            try:
                value = work()
            except BaseException as error:  # noqa: BLE001
                failure = error
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, value, failure)

    Thread(target=run, name="load", daemon=True).start()
    return await done
