"""The prefill's product as two operations of MLX: dequantize, then multiply. Used only where it is faster
than MLX's quantized product and gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.kernel import Case, Geometry
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product, stock_product, ulp

WIDTHS = (64, 128, 512, 2048)
"""Rows of chunks of a prompt, and of several prompts."""
_VOCABULARY = 1 << 16
"""Outputs of a vocabulary head, which sees one row of a chunk."""
MOST_BYTES = 1 << 30
"""Bytes of a dequantized matrix, or of all experts of a layer."""
_HALVES = (mx.float16, mx.bfloat16, mx.float32)


class Wide(NamedTuple):
    """`x` [rows, inputs]; `experts` [rows], rising, which matrix of several each row is for."""

    x: mx.array
    source: Source
    experts: mx.array | None = None


class WideGemm:
    """x [rows, inputs] times the transposed matrix [outputs, inputs]."""

    name = "wide-gemm"
    version = 1
    back_end = "any"
    same_bits = True
    widths: Sequence[int] = WIDTHS

    def refusal(self, source: Source, dtype: mx.Dtype) -> str | None:
        if source.weight.ndim != self._dimensions:
            return "it is not a matrix" if self._dimensions == 2 else "it is not one of several experts"
        return _refusal(source, dtype)

    def case(self, source: Source, dtype: mx.Dtype, width: int) -> Case:
        return Case(str(MatrixShape.of(source, dtype)), width)

    def check_cases(self) -> Sequence[Case]:
        shapes = [MatrixShape(1024, 1024, bits, 64, mx.float16) for bits in (4, 8)]
        return [Case(str(shape), width) for shape in shapes for width in (64, 256)]

    def draw(self, case: Case, seed: int) -> Wide:
        shape = MatrixShape.parse(case.shape)
        return Wide(shape.draw_rows(case.width, seed), shape.draw(seed))

    def geometries(self, case: Case) -> Sequence[Geometry]:
        del case
        return [("whole",)]

    def launch(self, inputs: Wide, geometry: Geometry) -> mx.array:
        return self.multiply(inputs.x, inputs.source, geometry)

    def multiply(self, x: mx.array, source: Source, geometry: Geometry) -> mx.array:
        del geometry
        return x @ _whole(source).T

    def stock(self, inputs: Wide) -> mx.array:
        return stock_product(inputs.x, inputs.source)

    def reference(self, inputs: Wide) -> NDArray[np.float32]:
        return exact_product(inputs.x, inputs.source)

    def tolerance(self, case: Case) -> float:
        return ulp(MatrixShape.parse(case.shape).dtype)

    _dimensions = 2


class WideExperts(WideGemm):
    """The same over the experts of a layer: rows come sorted by their expert, as MLX's gathered product wants
    them. `multiply` is of no use here; `gather` is."""

    name = "wide-gemm-experts"
    _dimensions = 3

    def check_cases(self) -> Sequence[Case]:
        return [Case(str(MatrixShape(256, 256, 4, 64, mx.float16, experts=8)), 256)]

    def draw(self, case: Case, seed: int) -> Wide:
        shape = MatrixShape.parse(case.shape)
        experts = mx.random.randint(0, shape.experts, (case.width,), key=mx.random.key(seed))
        return Wide(shape.draw_rows(case.width, seed), shape.draw(seed), mx.sort(experts))

    def launch(self, inputs: Wide, geometry: Geometry) -> mx.array:
        assert inputs.experts is not None
        return self.gather(inputs.x[:, None], inputs.source, inputs.experts, geometry)[:, 0]

    def gather(self, x: mx.array, source: Source, experts: mx.array, geometry: Geometry) -> mx.array:
        """[rows, 1, inputs] -> [rows, 1, outputs]; `experts` [rows], rising."""
        del geometry
        whole = _whole(source).swapaxes(-1, -2)
        return mx.gather_mm(x, whole, rhs_indices=experts, sorted_indices=True)

    def stock(self, inputs: Wide) -> mx.array:
        source = inputs.source
        assert source.scales is not None
        return mx.gather_qmm(
            inputs.x[:, None],
            source.weight,
            source.scales,
            source.biases,
            rhs_indices=inputs.experts,
            transpose=True,
            group_size=source.group_size,
            bits=source.bits,
            sorted_indices=True,
        )[:, 0]

    def reference(self, inputs: Wide) -> NDArray[np.float32]:
        x, source, assigned = inputs.x, inputs.source, np.array(inputs.experts)
        assert source.scales is not None
        assert source.biases is not None
        out = np.zeros((len(assigned), source.outputs), np.float32)
        for expert in np.unique(assigned).tolist():
            one = Source(
                source.outputs,
                source.inputs,
                source.weight[expert],
                source.scales[expert],
                source.biases[expert],
                source.bits,
                source.group_size,
                source.mode,
            )
            mine = np.flatnonzero(assigned == expert)
            out[mine] = exact_product(x[mx.array(mine)], one)
        return out


def _refusal(source: Source, dtype: mx.Dtype) -> str | None:
    if not source.bits or source.scales is None or source.biases is None or source.mode != "affine":
        return "it is not of affine codes"
    if dtype not in _HALVES or source.scales.dtype != dtype:
        return f"its scales are {source.scales.dtype} and x is {dtype}"
    if source.outputs >= _VOCABULARY:
        return "a vocabulary head sees one row of a chunk"
    many = source.weight.shape[0] if source.weight.ndim == 3 else 1
    if many * source.outputs * source.inputs * dtype.size > MOST_BYTES:
        return f"dequantized it has more than {MOST_BYTES >> 20} MiB"
    return None


def _whole(source: Source) -> mx.array:
    assert source.scales is not None
    return mx.dequantize(source.weight, source.scales, source.biases, source.group_size, source.bits)


def kernel() -> WideGemm:
    return WideGemm()


def experts_kernel() -> WideExperts:
    return WideExperts()
