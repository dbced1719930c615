"""How long a launch takes: on the device where it has a queue of its own, else as long as its evaluation.

On a device (`Chain`) launches depend on each other, as in a model, over copies of the inputs that its cache
does not hold, behind other work that keeps the device busy until the last of them is encoded. The host looks
at the clock when that work is done and again when the last launch is: what lies between is the device's time.
A timing in which the host was late, so that the device may have waited for it, counts for nothing; chains are
made shorter and the work before them longer until the host keeps up.

What makes a launch depend on the last one (`Kernel.after`) is the same for a kernel and for MLX. It is part
of both times, which draws their ratio towards 1: never to the kernel's advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from statistics import median
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from mlx_dspark.kernels.framework.bench import Bench, Queue
from mlx_dspark.kernels.framework.kernel import Case, Inputs, Kernel

Make = Callable[[Inputs], mx.array]
"""A launch: by a kernel in a geometry, or by MLX."""

TIMING = 0.02
"""Seconds that the launches of one timing should take at the most."""
MOST_COPIES, COPIES_BYTES, COPIES_SECONDS = 32, 256 << 20, 0.3
"""Of the inputs: so many, of so many bytes together, drawn in about so long; two at the least."""
_SCRATCH = 1 << 30
"""Bytes that the launches of one chain may make: all are there at once where none has begun yet."""
_LATE = 1e-4
"""Seconds that the host must have waited for the work before a chain; else it may have been late."""
_OVER = 2e-5
"""Seconds that it must then have waited for the chain; else that was over when it looked."""
_AHEAD, _SLACK, _LONGEST = 2.0, 5e-4, 0.03
"""The work before a chain takes so many times as long as encoding it, and so many seconds more; seconds at
the most."""
_TRIES = 3


class Timed(NamedTuple):
    """Seconds of one launch: on the device, and of the host to build and encode it, 0 where that is not
    known."""

    device: float
    host: float = 0.0


class Stopwatch(Protocol):
    @property
    def launches(self) -> int:
        """Of one timing."""
        ...

    def settle(self, makes: Sequence[Make]) -> bool:
        """Choose what suits all of these; False where they cannot be timed this way."""
        ...

    def time(self, make: Make) -> Timed | None:
        """None for a timing that does not count."""
        ...

    def run(self, make: Make) -> float:
        """Seconds of as many launches, with nothing done about the host's share of them."""
        ...


def usual(watch: Stopwatch, make: Make, timings: int = 3) -> float:
    """Seconds of one launch, the median of some timings; infinite where none counts."""
    found: list[float] = []
    for _ in range(3 * timings):
        if (timed := watch.time(make)) is not None:
            found.append(timed.device)
        if len(found) == timings:
            break
    return median(found) if found else float("inf")


def _once(bench: Bench, make: Make, inputs: Inputs) -> float:
    started = bench.now()
    bench.evaluate([make(inputs)])
    seconds = bench.now() - started
    bench.alive()
    return seconds


class Together:
    """Launches that do not depend on each other, evaluated together."""

    def __init__(self, inputs: Sequence[Inputs], bench: Bench, most: int) -> None:
        self._inputs, self._bench, self._most = inputs, bench, most
        self.launches = 1

    def settle(self, makes: Sequence[Make]) -> bool:
        slowest = max(_once(self._bench, make, self._inputs[0]) for make in makes)
        self.launches = max(1, min(self._most, int(TIMING / max(slowest, 1e-9))))
        return True

    def time(self, make: Make) -> Timed:
        return Timed(self.run(make) / self.launches)

    def run(self, make: Make) -> float:
        bench, inputs = self._bench, self._inputs
        started = bench.now()
        bench.evaluate([make(inputs[number % len(inputs)]) for number in range(self.launches)])
        seconds = bench.now() - started
        bench.alive()
        return seconds


@dataclass
class Chain:
    """Launches that depend on each other, at most `most`, behind other work of the queue."""

    kernel: Kernel
    held: Sequence[Inputs]
    bench: Bench
    queue: Queue
    most: int
    launches: int = 1

    def __post_init__(self) -> None:
        self._ahead = _SLACK
        self._start = self.kernel.stock(self.held[0])
        self.bench.evaluate([self._start])

    def settle(self, makes: Sequence[Make]) -> bool:
        """Costs each of `makes` two launches, two chains and a timing; more where the host is late."""
        slowest, scratch = map(max, zip(*(self._alone(make) for make in makes), strict=True))
        room = _SCRATCH // max(1, scratch)
        self.launches = max(1, min(self.most, int(TIMING / max(slowest, 1e-9)), room))
        while not self._keeps_up(makes):
            if self.launches == 1:
                return False
            self.launches //= 2
            self.most = self.launches
        return True

    def _alone(self, make: Make) -> tuple[float, int]:
        """Seconds of one launch and of what its evaluation costs, and the bytes that it makes."""
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        seconds = _once(self.bench, make, self.held[0])
        made = mx.get_peak_memory() - held
        return (seconds if seconds > TIMING else min(seconds, _once(self.bench, make, self.held[0]))), made

    def _keeps_up(self, makes: Sequence[Make]) -> bool:
        """Whether the host encodes such chains while the device does other work, whose length is chosen."""
        encoding = max(min(self._encoding(make), self._encoding(make)) for make in makes)
        self._ahead = min(_LONGEST, _AHEAD * encoding + _SLACK)
        for _ in range(_TRIES):
            if all(self.time(make) is not None for make in makes):
                return True
            self._ahead = min(_LONGEST, 2 * self._ahead)
        return False

    def _encoding(self, make: Make) -> float:
        """Seconds in which a chain is encoded."""
        last = self._chained(make, self._start)
        started = self.bench.now()
        self.queue.begin(last)
        seconds = self.bench.now() - started
        self.bench.evaluate([last])
        self.bench.alive()
        return seconds

    def time(self, make: Make) -> Timed | None:
        now, evaluate, launches = self.bench.now, self.bench.evaluate, self.launches
        first = self.queue.busy(self._start, self._ahead)
        started = now()
        last = self._chained(make, first)
        built = now() - started
        self.queue.begin(first)
        started = now()
        self.queue.begin(last)
        encoded = now()
        evaluate([first])
        begun = now()
        evaluate([last])
        seconds = now() - begun
        self.bench.alive()
        if begun - encoded < _LATE or seconds < _OVER:
            return None
        return Timed(seconds / launches, (built + encoded - started) / launches)

    def run(self, make: Make) -> float:
        started = self.bench.now()
        self.bench.evaluate([self._chained(make, self._start)])
        seconds = self.bench.now() - started
        self.bench.alive()
        return seconds

    def _chained(self, make: Make, first: mx.array) -> mx.array:
        out = first
        for number in range(self.launches):
            out = make(self.kernel.after(self.held[number % len(self.held)], out))
        return out


def copies(kernel: Kernel, case: Case, drawn: Sequence[Inputs], bench: Bench) -> list[Inputs]:
    """The inputs that were drawn, and more that are, so that the device's cache cannot hold them all."""
    held = list(drawn)
    number = max(2, min(MOST_COPIES, COPIES_BYTES // max(1, nbytes(held[0]))))
    started = bench.now()
    while len(held) < number and (len(held) < 2 or bench.now() - started < COPIES_SECONDS):
        held.append(kernel.draw(case, len(held)))
        bench.alive()
    return held


def nbytes(inputs: Any) -> int:
    """Of all arrays in it."""
    if isinstance(inputs, mx.array):
        return inputs.nbytes
    if isinstance(inputs, tuple | list):
        return sum(map(nbytes, inputs))
    if is_dataclass(inputs):
        return sum(nbytes(getattr(inputs, each.name)) for each in fields(inputs))
    return 0
