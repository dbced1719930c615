"""Feed-forwards of few rows as one compiled call: their launches are traced once for each number of rows.

On a GPU the host takes as long to build a layer in Python as the device takes to compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from threading import get_ident
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.kernels.recast import recast

MOST_ROWS = 16
"""More are a prompt's, of ever other numbers: each would be traced anew."""

PARTS = ("gate_proj", "up_proj", "down_proj")
_FAMILIES = "mlx_lm.models."

Arrays = list[dict[str, mx.array]]
"""Of each part, by name."""

Run = Callable[[mx.array, Arrays], mx.array]


class Traced:
    """The trace of one module by each thread that calls it: MLX keeps what it compiled by thread, until the
    function is gone from there. `forget` it when the module would go another way.

    The arrays of the module are given to each call and are not in the trace: what replaces them is used, and
    nothing holds them but the module.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}
        self._parts: list[ref[Any]] = []

    def run(self, parts: Sequence[Any], make: Callable[[], Run]) -> Run:
        """The compiled `make()`, for as long as the parts are the same modules."""
        known = self._parts
        if not known or any(a() is not b for a, b in zip(known, parts, strict=True)):
            self.forget()
            self._parts = [ref(part) for part in parts]
        thread = get_ident()
        run = self._runs.get(thread)
        if run is None:
            run = self._runs[thread] = mx.compile(make())
        return run

    def forget(self) -> None:
        self._runs = {}


class _TracedForward(nn.Module):
    """What is put before the class of a module: its own forward, traced where it has few rows."""

    traced: Traced

    def __call__(self, x: mx.array) -> mx.array:
        parts: list[Any] = [self[name] for name in PARTS]
        rows = x.size // x.shape[-1] if x.size else 0
        if not 0 < rows <= MOST_ROWS or not _planned(parts):
            return super().__call__(x)
        gate = parts[0]
        together = gate.siblings
        if x.dtype != gate.plan.dtype or together is None or not together.known:
            return super().__call__(x)
        return self.traced.run(parts, self._forward)(x, [dict(part) for part in parts])

    def _forward(self) -> Run:
        own: Any = super().__call__
        body, this = own.__func__, ref(self)

        def run(x: mx.array, arrays: Arrays) -> mx.array:
            module: Any = this()
            parts = [module[name] for name in PARTS]
            held = [dict(part) for part in parts]
            try:
                _put(parts, arrays)
                return body(module, x)
            finally:
                _put(parts, held)
                for part in parts:
                    if part.siblings is not None:
                        part.siblings.drop()

        return run


def _put(parts: Sequence[Any], arrays: Arrays) -> None:
    for part, held in zip(parts, arrays, strict=True):
        part.hold(held)


def _planned(parts: Sequence[Any]) -> bool:
    """Whether all are planned matrices, which hold arrays and no modules."""
    return all("plan" in vars(part) for part in parts)


def traceable(module: nn.Module) -> bool:
    """Whether it is a feed-forward of mlx-lm's, of planned matrices: one array in, one out, and no state."""
    kind = type(module)
    if not kind.__module__.startswith(_FAMILIES) or set(module) != set(PARTS):
        return False
    if not _planned([module[name] for name in PARTS]):
        return False
    return list(signature(kind.__call__).parameters) == ["self", "x"]


def traced(module: nn.Module) -> nn.Module:
    """A module with the parts of `module`, which is traceable, and the same results."""
    trace = Traced()
    for board in {id(part.plan.board): part.plan.board for part in map(module.__getitem__, PARTS)}.values():
        board.tell(trace.forget)
    return recast(module, _form(type(module)), traced=trace)


@cache
def _form(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Traced{kind.__name__}", (_TracedForward, kind), {})
