"""The kernel over a layer's experts: rows come sorted, an expert's weights are read once for 8 of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_small_m import cases
from mlx_dspark.kernels.cuda_small_m.geometry import Geometry, ways
from mlx_dspark.kernels.cuda_small_m.kernel import CudaSmallM, gathered
from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product


class Sorted(NamedTuple):
    """`x` [rows, inputs], matrices [experts, outputs, inputs], and `experts` [rows], which of them each row
    is for, rising."""

    x: mx.array
    source: Source
    experts: mx.array


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

    def draw(self, case: Case, seed: int) -> Sorted:  # type: ignore[override]
        shape = MatrixShape.parse(case.shape)
        experts = mx.random.randint(0, shape.experts, (case.width,), key=mx.random.key(seed))
        return Sorted(shape.draw_rows(case.width, seed), shape.draw(seed), mx.sort(experts))

    def geometries(self, case: Case) -> Sequence[Geometry]:
        return [each for each in ways(MatrixShape.parse(case.shape), 8) if not each.hold]

    def launch(self, inputs: Sorted, geometry: Any) -> mx.array:  # type: ignore[override]
        return self.gather(inputs.x[:, None], inputs.source, inputs.experts, geometry)[:, 0]

    def stock(self, inputs: Sorted) -> mx.array:  # type: ignore[override]
        x, source, experts = inputs
        assert source.scales is not None
        return mx.gather_qmm(
            x[:, None],
            source.weight,
            source.scales,
            source.biases,
            rhs_indices=experts,
            transpose=True,
            group_size=source.group_size,
            bits=source.bits,
            sorted_indices=True,
        )[:, 0]

    def reference(self, inputs: Sorted) -> NDArray[np.float32]:  # type: ignore[override]
        x, source, experts = inputs
        assert source.scales is not None
        assert source.biases is not None
        parts = []
        for expert, rows in zip(*np.unique(np.array(experts), return_counts=True), strict=True):
            i, first = int(expert), sum(len(part) for part in parts)
            one = replace(source, weight=source.weight[i], scales=source.scales[i], biases=source.biases[i])
            parts.append(exact_product(x[first : first + int(rows)], one))
        return np.concatenate(parts)


def kernel() -> CudaSmallMExperts:
    return CudaSmallMExperts()
