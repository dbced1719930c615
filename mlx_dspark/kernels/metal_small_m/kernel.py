"""The kernel as the framework asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.rows import Rows, RowsKernel
from mlx_dspark.kernels.framework.shapes import MatrixShape
from mlx_dspark.kernels.metal_small_m import cases
from mlx_dspark.kernels.metal_small_m.cases import MOST_ROWS, SmallMGeometry, row_tiles

WIDTHS = (2, 3, 4, 6, 8, 12, 16)
EXPERT_WIDTHS = (64, 96, 128)
"""Rows times experts of each; fewer are not sorted by mlx-lm."""


class MetalSmallM(RowsKernel):
    """x [rows, inputs] times the transposed matrix [outputs, inputs], for up to 16 rows.

    `metal_kernel` is MLX's, or what stands in for it.
    """

    name = "metal-small-m"
    version = 1
    back_end = "metal"
    widths: Sequence[int] = WIDTHS
    _dimensions = 2

    def __init__(self, metal_kernel: Callable[..., Any] | None = None) -> None:
        gathers = self._dimensions == 3
        self._compiled = _compiled(gathers) if metal_kernel is None else _made(metal_kernel, gathers)

    def refusal(self, source: Source, dtype: mx.Dtype) -> str | None:
        if source.weight.ndim != self._dimensions:
            return "it is not a matrix" if self._dimensions == 2 else "it is not one of several experts"
        return cases.refusal(source, dtype)

    def case(self, source: Source, dtype: mx.Dtype, width: int) -> Case:
        return Case(str(MatrixShape.of(source, dtype)), width)

    def check_cases(self) -> Sequence[Case]:
        """Every number of bits in both types, other groups at 4 bits, and sizes that are no whole tiles."""
        halves = [(bits, 64, dtype) for bits in cases.BITS for dtype in cases.HALVES]
        groups = [(4, group, mx.float16) for group in cases.GROUPS if group != 64]
        shapes = [MatrixShape(4096, 4096, *each) for each in (*halves, *groups)]
        shapes.append(MatrixShape(1000, 2080, 4, 32, mx.float16))
        return [Case(str(shape), width) for shape in shapes for width in (4, 8, 16)]

    def geometries(self, case: Case) -> Sequence[SmallMGeometry]:
        return cases.geometries(MatrixShape.parse(case.shape), case.width)

    def launch(self, inputs: Rows, geometry: SmallMGeometry) -> mx.array:
        return self.multiply(inputs.x, inputs.source, geometry)

    def multiply(self, x: mx.array, source: Source, geometry: SmallMGeometry) -> mx.array:
        """[.., inputs] -> [.., outputs] in the type of x. Raises ValueError for more than 16 rows."""
        rows, outputs = x.size // x.shape[-1], source.outputs
        if rows > MOST_ROWS:
            raise ValueError(f"{rows} rows, and the kernel takes at most {MOST_ROWS}")
        threadgroups = -(-outputs // (8 * geometry.tiles))
        made = self._compiled(
            inputs=[x.reshape(rows, -1), source.weight, source.scales, source.biases],
            template=_template(x, source, geometry, row_tiles(rows)),
            grid=(geometry.threads * threadgroups, 1, 1),
            threadgroup=(geometry.threads, 1, 1),
            output_shapes=[(*x.shape[:-1], outputs)],
            output_dtypes=[x.dtype],
        )
        return made[0]


class MetalSmallMExperts(MetalSmallM):
    """The same over the experts of a layer, for rows sorted by their expert: an expert's weights are read
    once for every 8 of its rows, those of experts without rows never. `multiply` is of no use here."""

    name = "metal-small-m-experts"
    widths: Sequence[int] = EXPERT_WIDTHS
    _dimensions = 3

    def check_cases(self) -> Sequence[Case]:
        shapes = [MatrixShape(768, 2048, bits, 64, mx.bfloat16, experts=32) for bits in (4, 8)]
        return [Case(str(shape), width) for shape in shapes for width in EXPERT_WIDTHS]

    def geometries(self, case: Case) -> Sequence[SmallMGeometry]:
        return cases.geometries(MatrixShape.parse(case.shape), rows=8)

    def launch(self, inputs: Rows, geometry: SmallMGeometry) -> mx.array:
        assert inputs.experts is not None
        return self.gather(inputs.x[:, None], inputs.source, inputs.experts, geometry)[:, 0]

    def gather(self, x: mx.array, source: Source, experts: mx.array, geometry: SmallMGeometry) -> mx.array:
        """[rows, 1, inputs] -> [rows, 1, outputs], not evaluated; `experts` [rows] rises."""
        rows, outputs = x.shape[0], source.outputs
        threadgroups = -(-outputs // (8 * geometry.tiles))
        made = self._compiled(
            inputs=[x[:, 0], source.weight, source.scales, source.biases, experts.astype(mx.int32)],
            template=_template(x, source, geometry, 1),
            grid=(geometry.threads * threadgroups, rows, 1),
            threadgroup=(geometry.threads, 1, 1),
            output_shapes=[(rows, outputs)],
            output_dtypes=[x.dtype],
        )
        return made[0][:, None]


def _template(x: mx.array, source: Source, geometry: SmallMGeometry, tiles: int) -> list[tuple[str, Any]]:
    return [
        ("T", x.dtype),
        ("OPERAND", getattr(mx, geometry.operand)),
        ("BITS", source.bits),
        ("GROUP", source.group_size),
        ("RN", geometry.tiles),
        ("RM", tiles),
        ("KS", geometry.simdgroups),
    ]


def _made(metal_kernel: Callable[..., Any], gathers: bool) -> Any:
    return metal_kernel(
        name="small_m_experts" if gathers else "small_m",
        input_names=["x", "w", "scales", "biases", *(["experts"] if gathers else [])],
        output_names=["y"],
        header=f"#define EXPERTS {int(gathers)}\n",
        source=(files("mlx_dspark.kernels.metal_small_m") / "small_m.metal").read_text(),
    )


@cache
def _compiled(gathers: bool) -> Any:
    return _made(mx.fast.metal_kernel, gathers)


def kernel() -> MetalSmallM:
    return MetalSmallM()


def experts_kernel() -> MetalSmallMExperts:
    return MetalSmallMExperts()
