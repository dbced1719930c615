"""The kernel over a layer's experts: rows come sorted, an expert's weights are read once for 8 of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_small_m import cases
from mlx_dspark.kernels.cuda_small_m.geometry import Geometry, ways
from mlx_dspark.kernels.cuda_small_m.kernel import CudaSmallM, gathered
from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.rows import Rows
from mlx_dspark.kernels.framework.shapes import MatrixShape


class CudaSmallMExperts(CudaSmallM):
    """`gather` is what it is used for; `multiply` has no meaning here."""

    name = "cuda-small-m-experts"
    widths: Sequence[int] = (64, 96, 128)

    def refusal(self, source: Source, dtype: mx.Dtype) -> str | None:
        return cases.refusal(source, dtype, experts=True)

    def check_cases(self) -> Sequence[Case]:
        shapes = [MatrixShape(264, 352, bits, 32, mx.bfloat16, experts=12) for bits in cases.BITS]
        return [Case(str(shape), 64) for shape in shapes]

    def gather(self, x: mx.array, source: Source, experts: mx.array, geometry: Any) -> mx.array:
        """[rows, 1, inputs] -> [rows, 1, outputs]; `experts` [rows] rises."""
        return gathered(x[:, 0], source, experts, geometry, self._factory)[:, None]

    def geometries(self, case: Case) -> Sequence[Geometry]:
        return [each for each in ways(MatrixShape.parse(case.shape), 8) if not each.hold]

    def launch(self, inputs: Rows, geometry: Any) -> mx.array:
        assert inputs.experts is not None
        return self.gather(inputs.x[:, None], inputs.source, inputs.experts, geometry)[:, 0]


def kernel() -> CudaSmallMExperts:
    return CudaSmallMExperts()
