"""Weight matrices in a kernel's cases: their names, random ones, and products in float32."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source

_TEXT = re.compile(r"(?:e(\d+)-)?(\d+)x(\d+)-(?:(\d+)b-g(\d+)-)?(float16|bfloat16|float32)")
_ULPS = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float32: 1e-5}
_AT_ONCE = 1 << 24
"""Weights that are made float32 at once."""


@dataclass(frozen=True)
class MatrixShape:
    """A matrix [outputs, inputs] of affine codes, or of numbers where `bits` is 0; `experts` of them, where
    that is not 0. `dtype` is that of x, scales and biases."""

    outputs: int
    inputs: int
    bits: int
    group_size: int
    dtype: mx.Dtype
    experts: int = 0

    def __str__(self) -> str:
        form = f"{self.bits}b-g{self.group_size}-" if self.bits else ""
        many = f"e{self.experts}-" if self.experts else ""
        return f"{many}{self.outputs}x{self.inputs}-{form}{str(self.dtype).rpartition('.')[2]}"

    @classmethod
    def of(cls, source: Source, dtype: mx.Dtype) -> MatrixShape:
        experts = source.weight.shape[0] if source.weight.ndim == 3 else 0
        return cls(source.outputs, source.inputs, source.bits, source.group_size, dtype, experts)

    @classmethod
    def parse(cls, text: str) -> MatrixShape:
        """Raises ValueError for what is not written by `str`."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no shape of a matrix")
        experts, outputs, inputs, bits, group, dtype = found.groups(default="0")
        return cls(int(outputs), int(inputs), int(bits), int(group), getattr(mx, dtype), int(experts))

    def draw(self, seed: int) -> Source:
        """A random one, evaluated, whose products with normal numbers are of size 1."""
        code, more, low, high = mx.random.split(mx.random.key(seed), 4)
        many = (self.experts,) if self.experts else ()
        size = self.inputs**-0.5
        if not self.bits:
            weight = (mx.random.normal((*many, self.outputs, self.inputs), key=code) * size).astype(
                self.dtype
            )
            mx.eval(weight)
            return Source(self.outputs, self.inputs, weight)
        words = (*many, self.outputs, self.inputs * self.bits // 32)
        groups = (*many, self.outputs, self.inputs // self.group_size)
        halves = [mx.random.randint(0, 1 << 16, words, dtype=mx.uint32, key=key) for key in (code, more)]
        weight = halves[0] | (halves[1] << 16)
        step = size / 2**self.bits * 3.5
        scales = (mx.random.uniform(0.5, 1.5, groups, key=low) * step).astype(self.dtype)
        shift = mx.random.uniform(0.95, 1.05, groups, key=high)
        biases = (scales * (-(2**self.bits - 1) / 2) * shift).astype(self.dtype)
        mx.eval(weight, scales, biases)
        return Source(
            self.outputs, self.inputs, weight, scales, biases, self.bits, self.group_size, mode="affine"
        )

    def outline(self) -> Source:
        """One of zeros that nobody evaluates, for what looks at shapes only."""
        many = (self.experts,) if self.experts else ()
        if not self.bits:
            weight = mx.zeros((*many, self.outputs, self.inputs), self.dtype)
            return Source(self.outputs, self.inputs, weight)
        words = mx.zeros((*many, self.outputs, self.inputs * self.bits // 32), mx.uint32)
        held = mx.zeros((*many, self.outputs, self.inputs // self.group_size), self.dtype)
        form = (self.bits, self.group_size, "affine")
        return Source(self.outputs, self.inputs, words, held, held, *form)

    def draw_rows(self, rows: int, seed: int) -> mx.array:
        """[rows, inputs], normal numbers, evaluated."""
        x = mx.random.normal((rows, self.inputs), key=mx.random.key(seed + 1000)).astype(self.dtype)
        mx.eval(x)
        return x


def ulp(dtype: mx.Dtype) -> float:
    """A unit in the last place as a share of the number; of float32 the rounding of a long sum."""
    return _ULPS[dtype]


def exact_product(x: mx.array, source: Source) -> NDArray[np.float32]:
    """[rows, inputs] -> [rows, outputs] in float32, summed in float64, of weights that are dequantized in
    float32 on the CPU."""
    rows = np.array(x.astype(mx.float32)).astype(np.float64)
    step = max(1, _AT_ONCE // source.inputs)
    parts = [
        rows @ _exact(source, start, start + step).T.astype(np.float64)
        for start in range(0, source.outputs, step)
    ]
    return np.concatenate(parts, axis=1).astype(np.float32)


def _exact(source: Source, first: int, last: int) -> NDArray[np.float32]:
    """Some rows of the matrix in float32."""
    with mx.stream(mx.cpu):
        weight = source.weight[first:last]
        if source.bits:
            scales, biases = source.float32_scales()
            form: dict[str, Any] = {"bits": source.bits, "group_size": source.group_size, "mode": source.mode}
            zeros = None if biases is None else biases[first:last]
            weight = mx.dequantize(weight, scales[first:last], zeros, **form)
        return np.array(weight.astype(mx.float32))
