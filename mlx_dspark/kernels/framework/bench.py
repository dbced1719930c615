"""What trials run on: a clock, MLX's evaluation, and the device's own queue where it has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Protocol

import mlx.core as mx

_SIZES = (512, 1024, 2048, 4096, 8192)
_LEAST_PRODUCT = 2e-4
"""Seconds of one product of other work: many times what its launch costs the host."""
_FEW, _MANY = 2, 10


class Queue(Protocol):
    """A device that computes what it was given while the host goes on."""

    def begin(self, array: mx.array) -> None:
        """Hand over what `array` depends on; returns when that is encoded, not when it is computed."""
        ...

    def busy(self, array: mx.array, seconds: float) -> mx.array:
        """The same array, not evaluated, after about so many seconds of other work of the device."""
        ...


@dataclass(frozen=True)
class Bench:
    """A clock in seconds, MLX's evaluation, who is told that it is alive and for how many seconds nothing may
    be heard, and the queue of a device that computes beside the host; None where computing is the host's own
    work, as on the CPU."""

    now: Callable[[], float] = perf_counter
    evaluate: Callable[[list[mx.array]], None] = lambda arrays: mx.eval(arrays)
    alive: Callable[[], None] = lambda: None
    quiet: Callable[[float], None] = lambda seconds: None
    queue: Queue | None = None

    @classmethod
    def here(
        cls, alive: Callable[[], None] = lambda: None, quiet: Callable[[float], None] = lambda seconds: None
    ) -> Bench:
        """That of MLX's default device."""
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        return cls(alive=alive, quiet=quiet, queue=None if on_cpu else GpuQueue())


class GpuQueue:
    """MLX's default device, on CUDA and Metal alike. Its other work is products of a matrix of zeros, each on
    the last one, of the first size that takes 0.2 ms: some ten milliseconds to find out, once."""

    def __init__(self) -> None:
        self._zeros: mx.array | None = None
        self._each = 0.0

    def begin(self, array: mx.array) -> None:
        mx.async_eval(array)

    def busy(self, array: mx.array, seconds: float) -> mx.array:
        if self._zeros is None:
            self._zeros, self._each = _products()
        made = _chain(self._zeros, ceil(seconds / self._each))
        return array + made[0, 0].astype(array.dtype)


def _products() -> tuple[mx.array, float]:
    """The matrix, and the seconds of one product."""
    zeros, each = mx.zeros((1, 1), mx.float16), 0.0
    for size in _SIZES:
        zeros = mx.zeros((size, size), mx.float16)
        mx.eval(zeros, _chain(zeros, 1))
        few, many = (min(_seconds(zeros, number) for _ in range(2)) for number in (_FEW, _MANY))
        each = max(1e-6, (many - few) / (_MANY - _FEW))
        if each >= _LEAST_PRODUCT:
            break
    return zeros, each


def _seconds(zeros: mx.array, number: int) -> float:
    started = perf_counter()
    mx.eval(_chain(zeros, number))
    return perf_counter() - started


def _chain(zeros: mx.array, number: int) -> mx.array:
    made = zeros
    for _ in range(number):
        made = made @ zeros
    return made
