"""Sharing one piece of work among a few threads, for functions that release the interpreter lock.

The calling thread takes part and never waits for a thread that has not begun: with a busy neighbour on the
machine it simply does more of the work itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _helpers(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="cpu-kernel")


def share(count: int, parts: int, job: Callable[[int, int], None], threads: int | None = None) -> None:
    """Run `job(first, last)` over `range(count)`, cut into about `parts` spans, on up to `threads` threads.

    Spans are disjoint, so a job that writes only its own span gives the same result whatever `threads` is.
    `threads` is the number of usable cores when absent.
    """
    parts = max(1, min(parts, count))
    threads = min(parts, usable_cores() if threads is None else threads)
    if threads <= 1:
        job(0, count)
        return
    spans = iter([(count * part // parts, count * (part + 1) // parts) for part in range(parts)])

    def drain() -> None:
        for first, last in spans:
            job(first, last)

    helping = [_helpers(threads - 1).submit(drain) for _ in range(threads - 1)]
    drain()
    for future in helping:
        if not future.cancel():
            future.result()
