"""The kernel as a product: y[.., N] = x[.., K] W[N, K]^T of a few rows, W packed in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_common.build import HALVES, Block, Factory, File, Text, built, constants
from mlx_dspark.kernels.cuda_small_m import cases
from mlx_dspark.kernels.cuda_small_m.geometry import Geometry, ways
from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.rows import Rows, RowsKernel
from mlx_dspark.kernels.framework.shapes import MatrixShape


def product(x: mx.array, source: Source, geometry: Geometry, factory: Factory | None = None) -> mx.array:
    """[.., inputs] -> [.., outputs] in the type of x, not evaluated, for up to 16 rows in all.

    Each weight is read once whatever the rows, and a row's result has the same bits in any company, as long
    as `geometry.order` is the same. Rows of x and of the weights must begin at multiples of 16 bytes.
    """
    return products(x, (source,), geometry, factory)[0]


def products(
    x: mx.array, sources: Sequence[Source], geometry: Geometry, factory: Factory | None = None
) -> list[mx.array]:
    """`product` of each of up to MOST_TOGETHER matrices by one launch, which are held in the same number
    of bits and the same groups."""
    *leading, inputs = x.shape
    first, outputs = sources[0], tuple(source.outputs for source in sources)
    form = (first.bits, first.group_size, (x.size // inputs + 7) // 8, False, len(sources))
    compiled, grid, threads = _launch(factory, x.dtype, form, outputs, inputs, geometry)
    held = ((source.weight, source.scales, source.biases) for source in sources)
    return compiled(
        inputs=[x, *chain.from_iterable(held)],
        grid=grid,
        threadgroup=threads,
        output_shapes=[(*leading, each) for each in outputs],
        output_dtypes=[x.dtype] * len(outputs),
    )


def gathered(
    x: mx.array, source: Source, experts: mx.array, geometry: Geometry, factory: Factory | None = None
) -> mx.array:
    """[rows, inputs] -> [rows, outputs], row i by matrix `experts[i]` of [experts, outputs, inputs], not
    evaluated. `experts` [rows] rises: a matrix is read once for every 8 of its rows."""
    rows, inputs = x.shape
    form = (source.bits, source.group_size, 1, True, 1)
    compiled, grid, threads = _launch(factory, x.dtype, form, (source.outputs,), inputs, geometry)
    return compiled(
        inputs=[x, source.weight, source.scales, source.biases, experts.astype(mx.uint32)],
        grid=(grid[0], rows, 1),
        threadgroup=threads,
        output_shapes=[(rows, source.outputs)],
        output_dtypes=[x.dtype],
    )[0]


MOST_TOGETHER = 3

Form = tuple[int, int, int, bool, int]
"""Bits, group, columns (of 8 rows of x), whether rows choose among experts, how many matrices there are."""


@cache
def _launch(
    factory: Factory | None,
    dtype: mx.Dtype,
    form: Form,
    outputs: tuple[int, ...],
    inputs: int,
    geometry: Geometry,
) -> tuple[Any, tuple[int, int, int], tuple[int, int, int]]:
    shape = MatrixShape(sum(outputs), inputs, form[0], form[1], dtype)
    shared = geometry.shared_bytes(shape, form[2])
    compiled = _kernel(factory, dtype, form, shared, geometry)
    return compiled, (geometry.blocks(*outputs) * geometry.threads, 1, 1), (geometry.threads, 1, 1)


@cache
def _kernel(factory: Factory | None, dtype: mx.Dtype, form: Form, shared: int, geometry: Geometry) -> Any:
    bits, group, columns, gather, parts = form
    kind = HALVES[dtype]
    text = constants(
        BITS=bits,
        GROUP=group,
        NT=columns,
        RT=geometry.tiles,
        WARPS=geometry.warps,
        STAGES=geometry.stages,
        SPAN=geometry.span,
        HOLD=int(geometry.hold),
    )
    text = f"namespace small_m {{\nusing T = {kind};\n{text}}}\n"
    text = f"#define GATHER {int(gather)}\n#define PARTS {parts}\n{text}"
    ends = ["", *(f"_{number}" for number in range(1, parts))]
    types = {"weights": "uint32_t", "scales": kind, "biases": kind}
    inputs = {"x": kind} | {held + end: types[held] for end in ends for held in types}
    source = Text(
        [File("cuda_small_m", "parts.cuh"), text],
        File("cuda_small_m", "product.cu"),
        {**inputs, "experts": "uint32_t"} if gather else inputs,
        {f"y{end}": kind for end in ends},
    )
    return built("small_m", source, Block(geometry.threads, geometry.resident, shared), factory)


class CudaSmallM(RowsKernel):
    """The kernel as the framework asks for it."""

    name = "cuda-small-m"
    version = 3
    back_end = "cuda"
    widths: Sequence[int] = (1, 2, 4, 8, 12, cases.MOST_ROWS)

    def __init__(self, factory: Factory | None = None) -> None:
        self._factory = factory

    def refusal(self, source: Source, dtype: mx.Dtype) -> str | None:
        return cases.refusal(source, dtype, experts=False)

    def case(self, source: Source, dtype: mx.Dtype, width: int) -> Case:
        return Case(str(MatrixShape.of(source, dtype)), width)

    def check_cases(self) -> Sequence[Case]:
        forms = [
            (bits, group, dtype) for bits in cases.BITS for group in cases.GROUPS for dtype in cases.HALVES
        ]
        shapes = [MatrixShape(1040, 17 * group, bits, group, dtype) for bits, group, dtype in forms]
        return [Case(str(shape), width) for shape in shapes for width in (5, cases.MOST_ROWS)]

    def multiply(self, x: mx.array, source: Source, geometry: Any) -> mx.array:
        return product(x, source, geometry, self._factory)

    most_together = MOST_TOGETHER

    def multiply_together(self, x: mx.array, sources: Sequence[Source], geometry: Any) -> list[mx.array]:
        return products(x, sources, geometry, self._factory)

    def geometries(self, case: Case) -> Sequence[Geometry]:
        return ways(MatrixShape.parse(case.shape), case.width)

    def launch(self, inputs: Rows, geometry: Any) -> mx.array:
        return product(inputs.x, inputs.source, geometry, self._factory)


def kernel() -> CudaSmallM:
    return CudaSmallM()
