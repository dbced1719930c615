"""Seeing the residual stream of a model without touching its forward.

Each decoder layer object gets a subclass of its own class whose call also notes what enters or leaves it. The
model's code, its parameter names and its attributes stay as they are, so its own forward is the authority.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.foundation.errors import UnsupportedModel


class TapRecorder:
    """Holds the wanted residual streams of the forward that is running; empty between forwards.

    One forward runs at a time: another thread's waits.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._wanted: frozenset[int] = frozenset()
        self._seen: dict[int, mx.array] = {}

    def note(self, tap: int, stream: mx.array) -> None:
        if tap in self._wanted:
            self._seen[tap] = stream

    @contextmanager
    def recording(self, taps: tuple[int, ...]) -> Iterator[None]:
        """Collect `taps` until leaving; what was not taken by `features` is dropped."""
        with self._lock:
            self._wanted = frozenset(taps)
            try:
                yield
            finally:
                self._wanted = frozenset()
                self._seen = {}

    def seen(self, tap: int) -> mx.array | None:
        """What was noted for `tap`, which was wanted; None where the model called no such layer."""
        return self._seen.get(tap)

    def features(self, taps: tuple[int, ...]) -> mx.array | None:
        """`[rows, width, taps * hidden]` in the order of `taps`, or None without taps.

        Raises UnsupportedModel when the model did not call a tapped layer as a layer.
        """
        if not taps:
            return None
        if not self._seen.keys() >= set(taps):
            raise UnsupportedModel(
                "This model does not call its layers one after another: a drafter cannot read them.",
                "Use --mode lookup.",
                field="drafter",
            )
        return mx.concatenate([self._seen[tap] for tap in taps], axis=-1)


@cache
def _tapped(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        recorder, index = self._tap
        if index == 0:
            recorder.note(-1, x)
        out = kind.__call__(self, x, *args, **kwargs)  # type: ignore[operator]
        recorder.note(index, out[0] if isinstance(out, tuple) else out)
        return out

    return type(f"Tapped{kind.__name__}", (kind,), {"__call__": call, "__module__": kind.__module__})


def tap_layers(layers: Sequence[nn.Module]) -> TapRecorder:
    """Make every layer report to one recorder: tap `k` is what leaves layer `k`, -1 what enters layer 0."""
    recorder = TapRecorder()
    for index, layer in enumerate(layers):
        layer.__class__ = _tapped(type(layer))
        object.__setattr__(layer, "_tap", (recorder, index))
    return recorder
