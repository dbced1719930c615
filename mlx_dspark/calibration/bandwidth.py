"""How fast this machine's memory delivers to MLX's default device, measured by reading an array."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from time import perf_counter, time

import mlx.core as mx
import numpy as np

from mlx_dspark.kernels.threads import usable_cores

_BYTES = {"cpu": 128 << 20, "gpu": 512 << 20}
"""More than any cache of processors holds, by device."""
_REPEATS = 5


def read_bandwidth(clock: Callable[[], float] = perf_counter) -> float:
    """Bytes a second, of the fastest of several readings; takes well below a second.

    A GPU multiplies a matrix with a vector. On the CPU all cores read their shares at once, without MLX,
    whose own matrices are read by one core.
    """
    device = mx.default_device().type.name
    nbytes = _BYTES[device]
    read, close = _cpu_reader(nbytes) if device == "cpu" else _gpu_reader(nbytes)
    best = float("inf")
    for _ in range(_REPEATS):
        begun = clock()
        read()
        best = min(best, clock() - begun)
    close()
    return nbytes / best


def _gpu_reader(nbytes: int) -> tuple[Callable[[], object], Callable[[], None]]:
    array, vector = mx.ones((nbytes // (4 * 4096), 4096)), mx.ones((4096,))
    mx.eval(array, vector)
    return lambda: mx.eval(array @ vector), mx.clear_cache


def _cpu_reader(nbytes: int) -> tuple[Callable[[], object], Callable[[], None]]:
    cores = usable_cores()
    shares = np.array_split(np.ones(nbytes // 4, np.float32), cores)
    pool = ThreadPoolExecutor(cores)

    def one(share: np.ndarray) -> float:
        return float(np.dot(share, share))

    return lambda: list(pool.map(one, shares)), pool.shutdown


@dataclass(frozen=True)
class Bandwidth:
    """In bytes a second; `measured_at` is unix time."""

    rate: float
    measured_at: float


@cache
def bandwidth_here() -> Bandwidth:
    """That of this machine, measured when it is first asked for, which is best done while nothing else runs.

    Calls MLX.
    """
    return Bandwidth(read_bandwidth(), time())
