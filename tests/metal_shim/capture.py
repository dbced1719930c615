"""What MLX would launch: the complete Metal source, buffers and grid of each call of a custom kernel.

`mx.export_function` hands over the primitives of a graph, custom kernels with the source that MLX generated,
on machines without Metal too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal_shim.arrays import Bytes, contiguous_bytes, row_strides, strided_bytes
from tests.metal_shim.errors import NotMetal

Grid = tuple[int, int, int]
Change = tuple[str, str]


@dataclass(frozen=True)
class Buffer:
    """One buffer of a launch, in the order of the kernel's arguments."""

    data: Bytes = field(repr=False)
    written: bool = False


@dataclass(frozen=True)
class Launch:
    """One launch as MLX would make it. `grid` and `threadgroup` are in threads."""

    name: str
    source: str = field(repr=False)
    arguments: str
    buffers: tuple[Buffer, ...] = field(repr=False)
    outputs: tuple[tuple[tuple[int, ...], mx.Dtype], ...]
    grid: Grid
    threadgroup: Grid

    @property
    def threads(self) -> int:
        """Threads of a full threadgroup."""
        return prod(min(a, b) for a, b in zip(self.grid, self.threadgroup, strict=True))


Execute = Callable[[Launch], list[mx.array]]


class Factory:
    """Stands in for `mx.fast.metal_kernel`; what its kernels launch goes to `execute`.

    `change` replaces a piece of text that must occur exactly once in all sources and headers together.
    """

    def __init__(self, execute: Execute, change: Change | None = None) -> None:
        self.execute = execute
        self.change = change
        self.places = 0

    def __call__(
        self, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, **rest: Any
    ) -> Kernel:
        header = rest.pop("header", "")
        if self.change is not None:
            old, new = self.change
            self.places += source.count(old) + header.count(old)
            source, header = source.replace(old, new), header.replace(old, new)
        made = mx.fast.metal_kernel(name, list(input_names), list(output_names), source, header, **rest)
        return Kernel(made, rest.get("ensure_row_contiguous", True), self.execute)

    def check(self) -> None:
        """After the call: the change was made in one place."""
        if self.change is not None and self.places != 1:
            raise ValueError(
                f"{self.change[0]!r} occurs {self.places} times in the kernels' sources, not once"
            )


class Kernel:
    """Stands in for a kernel object of MLX."""

    def __init__(self, made: Any, contiguous: bool, execute: Execute) -> None:
        self._made = made
        self._contiguous = contiguous
        self._execute = execute

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Grid,
        threadgroup: Grid,
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
    ) -> list[mx.array]:
        arrays = [each if isinstance(each, mx.array) else mx.array(each) for each in inputs]
        given: dict[str, Any] = {
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
        }
        if template:
            given["template"] = list(template)
        if init_value is not None:
            given["init_value"] = init_value
        name, source, passed = self._generated(arrays, given)
        outputs = tuple((tuple(s), d) for s, d in zip(output_shapes, output_dtypes, strict=True))
        launch = Launch(
            name=name,
            source=source,
            arguments=_template_arguments(source, name),
            buffers=(*self._given(arrays, passed), *(_fresh(*each, init_value) for each in outputs)),
            outputs=outputs,
            grid=grid,
            threadgroup=threadgroup,
        )
        return self._execute(launch)

    def _generated(self, arrays: list[mx.array], given: dict[str, Any]) -> tuple[str, str, list[Any]]:
        found: list[Any] = []

        def seen(part: dict[str, Any]) -> None:
            if part["type"] == "primitive" and part["name"] == "CustomKernel":
                found.append(part["arguments"])

        def call(*given_arrays: mx.array) -> Any:
            return self._made(inputs=list(given_arrays), **given)

        mx.export_function(seen, call, *arrays)
        if len(found) != 1:
            raise NotMetal(f"MLX recorded {len(found)} custom kernels for one call")
        return found[0][0], found[0][1], found[0][8]

    def _given(self, arrays: list[mx.array], passed: list[Any]) -> list[Buffer]:
        """Input buffers, each followed by those of its shape, strides and dimensions where the body asks."""
        made: list[Buffer] = []
        for array, (shape, strides, ndim) in zip(arrays, passed, strict=True):
            if self._contiguous or not array.ndim:
                data, steps = contiguous_bytes(array), row_strides(array.shape)
            else:
                data, steps = strided_bytes(array)
            made.append(Buffer(data))
            if not array.ndim:
                continue
            if shape:
                made.append(Buffer(np.array(array.shape, np.int32).view(np.uint8)))
            if strides:
                made.append(Buffer(np.array(steps, np.int64).view(np.uint8)))
            if ndim:
                made.append(Buffer(np.array([array.ndim], np.int32).view(np.uint8)))
        return made


def captured(call: Callable[[Any], Any], change: Change | None = None) -> list[Launch]:
    """The launches of `call(metal_kernel)`. Nothing runs: what a kernel returns is zeros of its shape."""
    found: list[Launch] = []

    def record(launch: Launch) -> list[mx.array]:
        found.append(launch)
        return [mx.zeros(shape, dtype) for shape, dtype in launch.outputs]

    factory = Factory(record, change)
    call(factory)
    factory.check()
    return found


def _fresh(shape: tuple[int, ...], dtype: mx.Dtype, init_value: float | None) -> Buffer:
    """An output before the launch: NaN, or what it is said to start as."""
    if init_value is None:
        return Buffer(np.full(prod(shape) * dtype.size, 0xFF, np.uint8), written=True)
    return Buffer(contiguous_bytes(mx.full(shape, init_value, dtype)), written=True)


def _template_arguments(source: str, name: str) -> str:
    found = re.search(r"\[\[kernel\]\] decltype\(" + re.escape(name) + r"(<.*?>)\) ", source)
    return found.group(1) if found else ""
