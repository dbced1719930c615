"""The prefill's product as two operations of MLX: dequantize, then multiply. Used only where it is faster
than MLX's quantized product and gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.kernel import Case, Geometry
from mlx_dspark.kernels.framework.rows import Rows, RowsKernel
from mlx_dspark.kernels.framework.shapes import MatrixShape

WIDTHS = (64, 128, 512, 2048)
"""Rows of chunks of a prompt, and of several prompts."""
_VOCABULARY = 1 << 16
"""Outputs of a vocabulary head, which sees one row of a chunk."""
MOST_BYTES = 1 << 30
"""Bytes of a dequantized matrix, or of all experts of a layer."""
_HALVES = (mx.float16, mx.bfloat16, mx.float32)


class WideGemm(RowsKernel):
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

    def geometries(self, case: Case) -> Sequence[Geometry]:
        del case
        return [("whole",)]

    def launch(self, inputs: Rows, geometry: Geometry) -> mx.array:
        return self.multiply(inputs.x, inputs.source, geometry)

    def multiply(self, x: mx.array, source: Source, geometry: Geometry) -> mx.array:
        del geometry
        made = x.reshape(-1, source.inputs) @ _whole(source).T
        return made.reshape(*x.shape[:-1], source.outputs)

    _dimensions = 2


class WideExperts(WideGemm):
    """The same over the experts of a layer: rows come sorted by their expert, as MLX's gathered product wants
    them. `multiply` is of no use here; `gather` is."""

    name = "wide-gemm-experts"
    _dimensions = 3

    def check_cases(self) -> Sequence[Case]:
        return [Case(str(MatrixShape(256, 256, 4, 64, mx.float16, experts=8)), 256)]

    def launch(self, inputs: Rows, geometry: Geometry) -> mx.array:
        assert inputs.experts is not None
        return self.gather(inputs.x[:, None], inputs.source, inputs.experts, geometry)[:, 0]

    def gather(self, x: mx.array, source: Source, experts: mx.array, geometry: Geometry) -> mx.array:
        """[rows, 1, inputs] -> [rows, 1, outputs]; `experts` [rows], rising."""
        del geometry
        whole = _whole(source).swapaxes(-1, -2)
        return mx.gather_mm(x, whole, rhs_indices=experts, sorted_indices=True)


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
