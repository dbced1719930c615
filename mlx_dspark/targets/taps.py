"""Seeing the residual stream of a model without touching its forward.

Each decoder layer object gets a subclass of its own class whose call also notes what enters or leaves it. The
model's code, its parameter names and its attributes stay as they are, so its own forward is the authority.

A looped model runs its layers several times: tap `pass * layers + k` is the stream of layer `k` in that pass,
and that of a pass's last layer is what enters the next pass, after the norm that may stand between.
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

    `layers` is how many layers report. One forward runs at a time: another thread's waits.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._lock = Lock()
        self._wanted: frozenset[int] = frozenset()
        self._seen: dict[int, mx.array] = {}
        self.passes = 0
        """How often the layers were gone through since recording began."""

    def enter(self, index: int, stream: Any) -> None:
        """Layer `index` is called with `stream`."""
        if index == 0:
            self._note(self.passes * self._layers - 1, stream)
            self.passes += 1

    def leave(self, index: int, stream: Any) -> None:
        """Layer `index` gives `stream`."""
        self._note((self.passes - 1) * self._layers + index, stream)

    def _note(self, tap: int, stream: Any) -> None:
        if tap in self._wanted:
            self._seen[tap] = stream

    @contextmanager
    def recording(self, taps: tuple[int, ...]) -> Iterator[None]:
        """Collect `taps` until leaving; what was not taken by `features` is dropped."""
        with self._lock:
            self._wanted = frozenset(taps)
            self.passes = 0
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

        Raises UnsupportedModel when the model did not call a tapped layer as a layer of one stream.
        """
        if not taps:
            return None
        streams = [self._seen.get(tap) for tap in taps]
        if not all(isinstance(stream, mx.array) and stream.ndim == 3 for stream in streams):
            raise UnsupportedModel(
                "This model does not pass one stream through its layers, one after another: a drafter cannot "
                "read them.",
                "Use --mode lookup.",
                field="drafter",
            )
        return mx.concatenate(streams, axis=-1)  # type: ignore[arg-type]


@cache
def _tapped(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder, index = self._tap
        recorder.enter(index, next(iter((*args, *kwargs.values()))))
        out = kind.__call__(self, *args, **kwargs)  # type: ignore[operator]
        recorder.leave(index, out[0] if isinstance(out, tuple) else out)
        return out

    body = {"__call__": call, "__module__": kind.__module__, "tapped": True}
    return type(f"Tapped{kind.__name__}", (kind,), body)


def tap_layers(layers: Sequence[nn.Module]) -> TapRecorder:
    """Make every layer report to one recorder: tap `k` is what leaves layer `k`, -1 what enters layer 0.

    Layers that reported to another recorder report to this one.
    """
    recorder = TapRecorder(len(layers))
    for index, layer in enumerate(layers):
        if not hasattr(type(layer), "tapped"):
            layer.__class__ = _tapped(type(layer))
        object.__setattr__(layer, "_tap", (recorder, index))
    return recorder
