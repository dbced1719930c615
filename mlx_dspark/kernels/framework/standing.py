"""Kernels that are checked where they are used, once a process, by their own code. Here they are told of, and
those that can be are tried like others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.cuda_attention.attend import DIMS, attend, right_here
from mlx_dspark.kernels.framework.after import queries_of
from mlx_dspark.kernels.framework.cpu_ways import exact_attention
from mlx_dspark.kernels.framework.kernel import AttentionShape, Case, Geometry
from mlx_dspark.kernels.framework.shapes import ulp

_OF_DRAFTERS = (
    "cuda-chain, cuda-block: checked when a drafter is bound, and used where they are right for it",
)


class _Attended(NamedTuple):
    queries: mx.array
    keys: mx.array
    values: mx.array


class CudaAttention:
    """The attention of a few queries in halves, causal."""

    name, back_end, version = "cuda-attention", "cuda", 2

    def check_cases(self) -> Sequence[Case]:
        kinds = [(32, 8, dim, dtype) for dim in DIMS for dtype in (mx.float16, mx.bfloat16)]
        shapes = [AttentionShape(*kind, length) for kind in kinds for length in (100, 1500, 8192)]
        return [Case(str(shape), width) for shape in shapes for width in (2, 8, 16)]

    def draw(self, case: Case, seed: int) -> _Attended:
        shape = AttentionShape.parse(case.shape)
        sizes = ((shape.heads, case.width), (shape.kv_heads, shape.length), (shape.kv_heads, shape.length))
        keys = mx.random.split(mx.random.key(seed), 3)
        made = [
            mx.random.normal((1, *size, shape.head_dim), key=key).astype(shape.dtype)
            for size, key in zip(sizes, keys, strict=True)
        ]
        mx.eval(made)
        return _Attended(*made)

    def geometries(self, case: Case) -> Sequence[Geometry]:
        del case
        return [("planned",)]

    def launch(self, inputs: _Attended, geometry: Geometry) -> mx.array:
        del geometry
        return attend(*inputs, inputs.queries.shape[-1] ** -0.5, "causal", None)

    def stock(self, inputs: _Attended) -> mx.array:
        scale = inputs.queries.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(*inputs, scale=scale, mask="causal")

    def after(self, inputs: _Attended, out: mx.array) -> _Attended:
        return inputs._replace(queries=queries_of(out))

    def reference(self, inputs: _Attended) -> NDArray[np.float32]:
        return exact_attention(*(np.array(each.astype(mx.float32)) for each in inputs))

    def tolerance(self, case: Case) -> float:
        return 2 * ulp(AttentionShape.parse(case.shape).dtype)


def attention() -> CudaAttention:
    return CudaAttention()


def remarks_on(attended: Sequence[AttentionShape]) -> list[str]:
    """What there is to say of them for a model with these attentions."""
    told = []
    for kind in dict.fromkeys((shape.dtype, shape.head_dim) for shape in attended):
        dtype, dim = kind
        if dtype not in (mx.float16, mx.bfloat16) or dim not in DIMS:
            told.append(f"cuda-attention: off, it does not take heads of {dim} in {dtype}")
        else:
            state = "live" if right_here(dtype, dim) else "off, it does not compile or is not right here"
            told.append(f"cuda-attention: {state}, for heads of {dim} in {dtype}")
    return [*told, *_OF_DRAFTERS]
