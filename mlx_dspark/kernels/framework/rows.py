"""What products of packed matrices work on, dense or over experts: drawn, by MLX's way, and in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.after import numbers_of
from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product, ulp

FEW = 16
"""Rows of the widest case that shares its draw with narrower ones."""
_KEPT = 2
"""Draws that are kept until another shape is drawn: those that trials check."""


class Rows(NamedTuple):
    """`x` [rows, inputs] and a packed matrix; `experts` [rows], rising, which matrix of several each row is
    for."""

    x: mx.array
    source: Source
    experts: mx.array | None = None


@dataclass
class _Kept:
    """A matrix that was drawn, rows for all widths up to FEW, and their products."""

    shape: MatrixShape
    x: mx.array
    source: Source
    exact: NDArray[np.float32] | None = None


_kept: dict[int, _Kept] = {}
"""By seed, of the shape that was drawn last."""


def drawn_rows(case: Case, seed: int) -> Rows:
    """Random rows of a case's shape and width, for experts where its shape has some. Up to FEW rows are the
    first of those of every such width."""
    shape = MatrixShape.parse(case.shape)
    if case.width <= FEW and not shape.experts:
        drawn = _drawn(shape, seed)
        first = drawn.x[: case.width]
        mx.eval(first)
        return Rows(first, drawn.source)
    _kept.clear()
    x, source = shape.draw_rows(case.width, seed), shape.draw(seed)
    if not shape.experts:
        return Rows(x, source)
    experts = mx.random.randint(0, shape.experts, (case.width,), key=mx.random.key(seed))
    return Rows(x, source, mx.sort(experts))


def _drawn(shape: MatrixShape, seed: int) -> _Kept:
    if any(each.shape != shape for each in _kept.values()):
        _kept.clear()
    if seed in _kept:
        return _kept[seed]
    drawn = _Kept(shape, shape.draw_rows(FEW, seed), shape.draw(seed))
    if seed < _KEPT:
        _kept[seed] = drawn
    return drawn


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
        kept = _exact_kept(x, source)
        return exact_product(x, source) if kept is None else kept
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


def _exact_kept(x: mx.array, source: Source) -> NDArray[np.float32] | None:
    """The products of rows that were drawn, whose matrix is dequantized once for all widths."""
    for drawn in _kept.values():
        if drawn.source is source and len(x) <= FEW and mx.array_equal(x, drawn.x[: len(x)]):
            if drawn.exact is None:
                drawn.exact = exact_product(drawn.x, source)
            return drawn.exact[: len(x)]
    return None


class RowsKernel:
    """The part of the contract that is the same for every kernel of such products."""

    def draw(self, case: Case, seed: int) -> Rows:
        return drawn_rows(case, seed)

    def stock(self, inputs: Rows) -> mx.array:
        return stock_rows(inputs)

    def after(self, inputs: Rows, out: mx.array) -> Rows:
        return inputs._replace(x=numbers_of(out, inputs.x.shape))

    def reference(self, inputs: Rows) -> NDArray[np.float32]:
        return exact_rows(inputs)

    def tolerance(self, case: Case) -> float:
        return ulp(MatrixShape.parse(case.shape).dtype)
