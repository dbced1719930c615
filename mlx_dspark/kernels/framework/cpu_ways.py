"""The CPU back end's ways in the form of kernels: `mlx-dspark kernels --check` tries them like others.

A launch here computes at once, as these ways do in a model; what is chosen at load is chosen by the race of
`kernels/dispatch.py`. Needs llvmlite, but for the dense way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.base import HeldMatrix, Source, Way
from mlx_dspark.kernels.framework.after import numbers_of, queries_of
from mlx_dspark.kernels.framework.kernel import AttentionShape, Case, Geometry
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product
from mlx_dspark.kernels.modules import as_array, as_rows

WIDTHS = (1, 8, 32)
LENGTHS = (256, 1024)
_TOLERANCE = 1e-5


class _Held(NamedTuple):
    x: mx.array
    source: Source
    matrix: HeldMatrix


class CpuWeights:
    """A way of holding weights: x [rows, inputs] times the transposed matrix, in float32."""

    back_end = "cpu"
    widths: Sequence[int] = WIDTHS

    def __init__(self, way: Way) -> None:
        self._way = way
        self.name, self.version = f"cpu-weights-{way.name}", way.version

    def refusal(self, source: Source, dtype: mx.Dtype) -> str | None:
        del dtype
        return self._way.refusal(source)

    def case(self, source: Source, dtype: mx.Dtype, width: int) -> Case:
        return Case(str(MatrixShape.of(source, dtype)), width)

    def check_cases(self) -> Sequence[Case]:
        shapes = [
            MatrixShape(200, 256, bits, group, mx.float16) for bits in (4, 8) for group in (32, 64, 128)
        ]
        shapes += [MatrixShape(200, 256, 0, 0, dtype) for dtype in (mx.bfloat16, mx.float32)]
        taken = [shape for shape in shapes if self._way.refusal(shape.draw(0)) is None]
        return [Case(str(shape), width) for shape in taken for width in (1, 5, 16)]

    def draw(self, case: Case, seed: int) -> _Held:
        shape = MatrixShape.parse(case.shape)
        source = shape.draw(seed)
        if (refusal := self._way.refusal(source)) is not None:
            raise ValueError(refusal)
        return _Held(shape.draw_rows(case.width, seed).astype(mx.float32), source, self._way.hold(source))

    def geometries(self, case: Case) -> Sequence[Geometry]:
        del case
        return [("all cores",)]

    def launch(self, inputs: _Held, geometry: Geometry) -> mx.array:
        del geometry
        return as_array(inputs.matrix.multiply(as_rows(inputs.x)), inputs.x)

    def multiply(self, x: mx.array, source: Source, geometry: Geometry) -> mx.array:
        del geometry
        return as_array(self._way.hold(source).multiply(as_rows(x)), x)

    def stock(self, inputs: _Held) -> mx.array:
        source = inputs.source
        if not source.bits:
            return inputs.x @ source.weight.astype(mx.float32).T
        scales, biases = source.float32_scales()
        form: dict[str, Any] = {"group_size": source.group_size, "bits": source.bits}
        return mx.quantized_matmul(inputs.x, source.weight, scales, biases, transpose=True, **form)

    def after(self, inputs: _Held, out: mx.array) -> _Held:
        return inputs._replace(x=numbers_of(out, inputs.x.shape))

    def reference(self, inputs: _Held) -> NDArray[np.float32]:
        return exact_product(inputs.x, inputs.source)

    def tolerance(self, case: Case) -> float:
        del case
        return _TOLERANCE


class _Attended(NamedTuple):
    queries: mx.array
    keys: mx.array
    values: mx.array


class CpuAttention:
    """Causal attention of a few rows in float32."""

    name, back_end = "cpu-attention", "cpu"
    widths: Sequence[int] = (1, 8)
    lengths: Sequence[int] = LENGTHS

    def __init__(self) -> None:
        from mlx_dspark.kernels.cpu_attention.kernel import VERSION

        self.version = VERSION

    def check_cases(self) -> Sequence[Case]:
        kinds = [(4, 4, 64), (8, 2, 64), (9, 3, 128)]
        shapes = [AttentionShape(*kind, mx.float32, length) for kind in kinds for length in (40, 300)]
        return [self.case(shape, width) for shape in shapes for width in (1, 5)]

    def case(self, shape: AttentionShape, width: int) -> Case:
        return Case(str(shape), width)

    def draw(self, case: Case, seed: int) -> _Attended:
        shape = AttentionShape.parse(case.shape)
        heads = (
            (shape.heads, case.width),
            (shape.kv_heads, shape.length),
            (shape.kv_heads, shape.length),
        )
        keys = mx.random.split(mx.random.key(seed), 3)
        made = [
            mx.random.normal((1, *each, shape.head_dim), key=key)
            for each, key in zip(heads, keys, strict=True)
        ]
        mx.eval(made)
        return _Attended(*made)

    def geometries(self, case: Case) -> Sequence[Geometry]:
        del case
        return [("all cores",)]

    def launch(self, inputs: _Attended, geometry: Geometry) -> mx.array:
        del geometry
        from mlx_dspark.kernels.cpu_attention.attend import attend

        return attend(*inputs, inputs.queries.shape[-1] ** -0.5, causal=True)

    def stock(self, inputs: _Attended) -> mx.array:
        scale = inputs.queries.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(*inputs, scale=scale, mask="causal")

    def after(self, inputs: _Attended, out: mx.array) -> _Attended:
        return inputs._replace(queries=queries_of(out))

    def reference(self, inputs: _Attended) -> NDArray[np.float32]:
        return exact_attention(*(np.array(each) for each in inputs))

    def tolerance(self, case: Case) -> float:
        del case
        return _TOLERANCE


def exact_attention(
    queries: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Causal attention of the last positions, in float64: [batch, heads, width, head_dim]."""
    shared, width, length = queries.shape[1] // keys.shape[1], queries.shape[2], keys.shape[2]
    wide_keys, wide_values = (np.repeat(each.astype(np.float64), shared, axis=1) for each in (keys, values))
    scores = queries.astype(np.float64) @ wide_keys.swapaxes(-1, -2) * queries.shape[-1] ** -0.5
    seen = np.arange(length) <= np.arange(length - width, length)[:, None]
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = (shares / shares.sum(axis=-1, keepdims=True)) @ wide_values
    return out.astype(np.float32)


class _Gated(NamedTuple):
    gate: mx.array
    up: mx.array


class CpuSwiglu:
    """silu(gate) * up, element by element; its shape is the width of the feed-forward."""

    name, back_end, version = "cpu-swiglu", "cpu", 1

    def check_cases(self) -> Sequence[Case]:
        return [Case(str(inner), width) for inner in (512, 1536) for width in (1, 8)]

    def draw(self, case: Case, seed: int) -> _Gated:
        keys = mx.random.split(mx.random.key(seed), 2)
        made = [mx.random.normal((case.width, int(case.shape)), key=key) * 3 for key in keys]
        mx.eval(made)
        return _Gated(*made)

    def geometries(self, case: Case) -> Sequence[Geometry]:
        del case
        return [("one core",)]

    def launch(self, inputs: _Gated, geometry: Geometry) -> mx.array:
        del geometry
        from mlx_dspark.kernels.cpu_swiglu.kernel import swiglu

        gate, up = np.array(inputs.gate), np.ascontiguousarray(as_rows(inputs.up))
        swiglu()(gate.ctypes.data, up.ctypes.data, gate.size)
        return mx.array(gate)

    def stock(self, inputs: _Gated) -> mx.array:
        return nn.silu(inputs.gate) * inputs.up

    def after(self, inputs: _Gated, out: mx.array) -> _Gated:
        return inputs._replace(gate=out)

    def reference(self, inputs: _Gated) -> NDArray[np.float32]:
        gate, up = (np.array(each).astype(np.float64) for each in inputs)
        return (gate / (1 + np.exp(-gate)) * up).astype(np.float32)

    def tolerance(self, case: Case) -> float:
        del case
        return _TOLERANCE


def blocks() -> CpuWeights:
    from mlx_dspark.kernels.cpu_blocks.matrix import Blocks

    return CpuWeights(Blocks())


def dense() -> CpuWeights:
    from mlx_dspark.kernels.cpu_dense.matrix import Dense

    return CpuWeights(Dense())


def attention() -> CpuAttention:
    return CpuAttention()


def swiglu() -> CpuSwiglu:
    return CpuSwiglu()
