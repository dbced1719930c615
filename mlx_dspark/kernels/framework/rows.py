"""What products of packed matrices work on, dense or over experts: drawn, by MLX's way, and in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product, ulp


class Rows(NamedTuple):
    """`x` [rows, inputs] and a packed matrix; `experts` [rows], rising, which matrix of several each row is
    for."""

    x: mx.array
    source: Source
    experts: mx.array | None = None


def drawn_rows(case: Case, seed: int) -> Rows:
    """Random rows of a case's shape and width, for experts where its shape has some."""
    shape = MatrixShape.parse(case.shape)
    x, source = shape.draw_rows(case.width, seed), shape.draw(seed)
    if not shape.experts:
        return Rows(x, source)
    experts = mx.random.randint(0, shape.experts, (case.width,), key=mx.random.key(seed))
    return Rows(x, source, mx.sort(experts))


def stock_rows(rows: Rows) -> mx.array:
    """[rows, outputs], MLX's own product, not evaluated."""
    x, source, experts = rows
    assert source.scales is not None
    packed, group, bits = (source.weight, source.scales, source.biases), source.group_size, source.bits
    if experts is None:
        return mx.quantized_matmul(x, *packed, transpose=True, group_size=group, bits=bits)
    gathered = mx.gather_qmm(
        x[:, None],
        *packed,
        rhs_indices=experts,
        transpose=True,
        group_size=group,
        bits=bits,
        sorted_indices=True,
    )
    return gathered[:, 0]


def exact_rows(rows: Rows) -> NDArray[np.float32]:
    """[rows, outputs] in float32, as `exact_product`."""
    x, source, experts = rows
    if experts is None:
        return exact_product(x, source)
    assert source.scales is not None
    assert source.biases is not None
    assigned = np.array(experts)
    out = np.zeros((len(assigned), source.outputs), np.float32)
    for expert in np.unique(assigned).tolist():
        scales, biases = source.scales[expert], source.biases[expert]
        one = replace(source, weight=source.weight[expert], scales=scales, biases=biases)
        mine = np.flatnonzero(assigned == expert)
        out[mine] = exact_product(x[mx.array(mine)], one)
    return out


class RowsKernel:
    """The part of the contract that is the same for every kernel of such products."""

    def draw(self, case: Case, seed: int) -> Rows:
        return drawn_rows(case, seed)

    def stock(self, inputs: Rows) -> mx.array:
        return stock_rows(inputs)

    def reference(self, inputs: Rows) -> NDArray[np.float32]:
        return exact_rows(inputs)

    def tolerance(self, case: Case) -> float:
        return ulp(MatrixShape.parse(case.shape).dtype)
