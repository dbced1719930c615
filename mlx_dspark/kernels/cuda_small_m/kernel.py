"""The kernel as a product: y[.., N] = x[.., K] W[N, K]^T of up to 16 rows, W packed in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple
from zlib import crc32

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_small_m import cases, reference
from mlx_dspark.kernels.cuda_small_m.cases import Shape
from mlx_dspark.kernels.cuda_small_m.geometry import Geometry, ways
from mlx_dspark.kernels.framework.kernel import Case

Factory = Callable[..., Any]

_NAMES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}
_ULP = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


class Inputs(NamedTuple):
    """`x` [rows, inputs] and a packed matrix [outputs, inputs]."""

    x: mx.array
    weight: mx.array
    scales: mx.array
    biases: mx.array
    group: int
    bits: int


def product(inputs: Inputs, geometry: Geometry, factory: Factory | None = None) -> mx.array:
    """[.., inputs] -> [.., outputs] in the type of x, not evaluated, for up to 16 rows in all.

    Each weight is read once whatever the rows, and a row's result has the same bits in any company, as long
    as `geometry.warps` is the same. Rows of x and of the weights must begin at multiples of 16 bytes.
    """
    x, weight, scales, biases, group, bits = inputs
    outputs = weight.shape[0]
    *leading, last = x.shape
    compiled, grid, threads = _launch(
        factory, x.dtype, bits, group, (x.size // last + 7) // 8, outputs, last, geometry
    )
    return compiled(
        inputs=[x, weight, scales, biases],
        grid=grid,
        threadgroup=threads,
        output_shapes=[(*leading, outputs)],
        output_dtypes=[x.dtype],
    )[0]


@cache
def _launch(
    factory: Factory | None,
    dtype: mx.Dtype,
    bits: int,
    group: int,
    columns: int,
    outputs: int,
    inputs: int,
    geometry: Geometry,
) -> tuple[Any, tuple[int, int, int], tuple[int, int, int]]:
    shared = geometry.shared_bytes(bits, inputs, columns)
    compiled = _kernel(factory, dtype, bits, group, columns, shared, geometry)
    return compiled, (geometry.blocks(outputs) * geometry.threads, 1, 1), (geometry.threads, 1, 1)


@cache
def _kernel(
    factory: Factory | None,
    dtype: mx.Dtype,
    bits: int,
    group: int,
    columns: int,
    shared: int,
    geometry: Geometry,
) -> Any:
    constants = {
        "BITS": bits,
        "GROUP": group,
        "NT": columns,
        "RT": geometry.tiles,
        "WARPS": geometry.warps,
        "STAGES": geometry.stages,
        "HOLD": int(geometry.hold),
    }
    text = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    text = f"namespace small_m {{\nusing T = {_NAMES[dtype]};\n{text}}}\n"
    body = source_text("product.cu")
    header = source_text("lanes.cuh") + source_text("parts.cuh") + text
    # MLX keeps what it compiled by name, on disk too, with its shared memory: the name tells them apart.
    name = f"small_m_{geometry.resident}_{shared}_{crc32((header + body).encode()):08x}"
    return (factory or mx.fast.cuda_kernel)(
        name=name,
        input_names=["x", "weights", "scales", "biases"],
        output_names=["y"],
        header=header + _bounds(name, _NAMES[dtype], geometry),
        source=body,
        shared_memory=shared,
    )


def _bounds(name: str, kind: str, geometry: Geometry) -> str:
    """Declares the function that MLX is about to define, so that its registers suit the launch."""
    return f"""namespace mlx::core::cu {{
__global__ void __launch_bounds__({geometry.threads}, {geometry.resident}) custom_kernel_{name}(
    const {kind}* x, const __grid_constant__ Shape x_shape, const __grid_constant__ int x_ndim,
    const uint32_t* weights, const __grid_constant__ Shape weights_shape, const {kind}* scales,
    const {kind}* biases, {kind}* y);
}}
"""


@cache
def source_text(name: str) -> str:
    return (files("mlx_dspark.kernels.cuda_small_m") / name).read_text()


class CudaSmallM:
    """The kernel as the framework asks for it: `case` names a matrix and a number of rows."""

    name = "cuda-small-m"
    version = 1
    back_end = "cuda"
    widths: Sequence[int] = (1, 2, 4, 8, 12, 16)
    """Numbers of rows that it is measured at."""

    def __init__(self, factory: Factory | None = None) -> None:
        self._factory = factory

    def refusal(self, source: Source, dtype: mx.Dtype) -> str | None:
        return cases.refusal(source, dtype)

    def case(self, source: Source, dtype: mx.Dtype, width: int) -> Case:
        return Case(str(Shape.of(source, dtype)), width)

    def multiply(self, x: mx.array, source: Source, geometry: Any) -> mx.array:
        assert source.scales is not None
        assert source.biases is not None
        inputs = Inputs(x, source.weight, source.scales, source.biases, source.group_size, source.bits)
        return product(inputs, geometry, self._factory)

    def draw(self, case: Case, seed: int) -> Inputs:
        shape = Shape.read(case.shape)
        keys = mx.random.split(mx.random.key(seed), 2)
        x = mx.random.normal((case.width, shape.inputs), key=keys[0]).astype(shape.dtype)
        dense = mx.random.normal((shape.outputs, shape.inputs), key=keys[1]) * shape.inputs**-0.5
        packed = mx.quantize(dense.astype(shape.dtype), group_size=shape.group, bits=shape.bits)
        made = Inputs(x, *packed, shape.group, shape.bits)
        mx.eval(made[:4])
        return made

    def geometries(self, case: Case) -> Sequence[Geometry]:
        return ways(Shape.read(case.shape), case.width)

    def launch(self, inputs: Inputs, geometry: Any) -> mx.array:
        return product(inputs, geometry, self._factory)

    def stock(self, inputs: Inputs) -> mx.array:
        x, weight, scales, biases, group, bits = inputs
        return mx.quantized_matmul(x, weight, scales, biases, transpose=True, group_size=group, bits=bits)

    def reference(self, inputs: Inputs) -> NDArray[np.float32]:
        return reference.product(*inputs)

    def tolerance(self, case: Case) -> float:
        return _ULP[Shape.read(case.shape).dtype]


def kernel() -> CudaSmallM:
    return CudaSmallM()
