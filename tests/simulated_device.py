"""A host and a device that computes beside it, as a GPU does, in simulated time."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import mlx.core as mx

from mlx_dspark.kernels.framework.bench import Bench

US = 1e-6


@dataclass
class SimulatedDevice:
    """Seconds pass on the host by building and encoding launches, and by waiting for the device, which begins
    with a launch when it is encoded and the last one is done. It keeps time for `Scripted`.

    host     seconds of one launch, a third of them for building it
    wake     seconds until the host goes on after it waited
    room     launches that can be encoded and not done; the host waits where there are more
    jitter   of every time on the host, as a share
    pauses   chance that the host stands still for `pause` seconds while it encodes a launch
    """

    host: float = 30 * US
    wake: float = 20 * US
    room: int = 300
    jitter: float = 0.0
    pauses: float = 0.0
    pause: float = 1e-3
    seconds: float = 0.0
    free: float = 0.0

    def __post_init__(self) -> None:
        self.encoded: list[float] = []
        self._random = Random(1)
        self._waiting: list[tuple[mx.array, float, bool]] = []
        self._done: dict[int, float] = {}
        self._kept: list[mx.array] = []

    def bench(self, *, asynchronous: bool = True) -> Bench:
        return Bench(lambda: self.seconds, self.evaluate, queue=self if asynchronous else None)

    def cost(self, out: mx.array, seconds: float, *, refused: bool = False) -> mx.array:
        self._spend(self.host / 3)
        self._waiting.append((out, seconds, refused))
        return out

    def busy(self, array: mx.array, seconds: float) -> mx.array:
        return self.cost(array + 0, seconds)

    def begin(self, array: mx.array) -> None:
        """Encodes what was built up to `array`, in the order in which it was built. The host can wait for all
        of it, and not for a part."""
        last = next((place for place, (out, *_) in enumerate(self._waiting) if out is array), -1)
        begun, self._waiting = self._waiting[: last + 1], self._waiting[last + 1 :]
        for _, seconds, refused in begun:
            if refused:
                self._waiting.clear()
                raise ValueError("[metal] thread group size exceeds what the device allows")
            self._encode(seconds)
        for out, *_ in begun:
            self._done[id(out)] = self.free
            self._kept.append(out)

    def evaluate(self, arrays: list[mx.array]) -> None:
        for array in arrays:
            self.begin(array)
        mx.eval(arrays)
        done = max(self._done.get(id(array), 0.0) for array in arrays)
        if done > self.seconds:
            self.seconds = done
            self._spend(self.wake)

    def _encode(self, seconds: float) -> None:
        self._spend(self.host * 2 / 3)
        if self._random.random() < self.pauses:
            self._spend(self.pause)
        if len(self.encoded) >= self.room:
            self.seconds = max(self.seconds, self.encoded[-self.room])
        self.free = max(self.free, self.seconds) + seconds
        self.encoded.append(self.free)

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds * (1 + self.jitter * self._random.random())
