"""The kernel as the probe sees it: the attentions it takes, and what it is raced and checked on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.framework.after import queries_of
from mlx_dspark.kernels.framework.kernel import AttentionShape, Case
from mlx_dspark.kernels.metal_attention import kernel, reference
from mlx_dspark.kernels.metal_attention.kernel import DIMS, GROUPS, Factory, Geometry

_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}
_SHAPE = re.compile(r"h(\d+)-kv(\d+)-d(\d+)-s(\d+)-(\w+?)(-sinks)?")

SPARE = 256
"""Positions of a cache beyond the keys that are seen."""


class Inputs(NamedTuple):
    """One call. Queries are transposed and keys and values cut from a larger cache, as a model's are."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: Any
    sinks: mx.array | None


@dataclass(frozen=True)
class MetalAttention:
    """An `AttentionKernel`. `factory` stands in for `mx.fast.metal_kernel`."""

    factory: Factory | None = None

    name: str = "metal-attention"
    version: int = 1
    back_end: str = "metal"
    widths: Sequence[int] = (2, 4, 8, 16)
    lengths: Sequence[int] = (512, 2048, 8192, 32768)

    def refusal(self, shape: AttentionShape) -> str | None:
        if shape.dtype not in _DTYPES.values():
            return f"takes float16 and bfloat16, not {shape.dtype}"
        if shape.head_dim not in DIMS:
            return f"takes heads of {', '.join(map(str, DIMS))}, not {shape.head_dim}"
        if shape.heads % shape.kv_heads or shape.heads // shape.kv_heads not in GROUPS:
            most, asked = GROUPS[-1], f"{shape.heads} for {shape.kv_heads}"
            return f"takes up to {most} query heads for each key head, not {asked}"
        return None

    def case(self, shape: AttentionShape, width: int) -> Case:
        return Case(str(shape), width)

    def check_cases(self) -> Sequence[Case]:
        """Every head size, and what differs: types, sinks, groups of heads, and lengths that are split."""
        shapes = [
            AttentionShape(9, 3, 64, mx.float16, 1000),
            AttentionShape(64, 8, 64, mx.bfloat16, 700, sinks=True),
            AttentionShape(8, 8, 80, mx.float16, 513),
            AttentionShape(32, 8, 96, mx.bfloat16, 2048),
            AttentionShape(32, 8, 128, mx.float16, 65),
            AttentionShape(32, 8, 128, mx.bfloat16, 8192),
            AttentionShape(16, 1, 192, mx.float16, 1500),
            AttentionShape(24, 4, 256, mx.bfloat16, 4097, sinks=True),
        ]
        return [self.case(shape, width) for shape in shapes for width in (2, 5, 8, 16)]

    def draw(self, case: Case, seed: int) -> Inputs:
        """Under a causal mask where the seed is even, else under booleans: another variant of the source."""
        shape = attention_shape(case.shape)
        held, dim = (1, shape.kv_heads, shape.length + SPARE, shape.head_dim), shape.head_dim
        sizes = ((1, case.width, shape.heads, dim), held, held, (shape.heads,))
        *parts, last = mx.random.split(mx.random.key(seed), len(sizes) + 1)
        drawn = zip(sizes, parts, strict=True)
        queries, keys, values, sinks = (mx.random.normal(each, shape.dtype, key=key) for each, key in drawn)
        mask = "causal" if case.width > 1 else None
        mx.eval(queries, keys, values, sinks)
        if seed % 2:
            shown = mx.random.bernoulli(0.9, (1, 1, case.width, shape.length), key=last)
            mask = shown & (mx.arange(shape.length) <= mx.arange(shape.length)[-case.width :, None])
            mx.eval(mask)
        return Inputs(
            queries=queries.swapaxes(1, 2),
            keys=keys[:, :, : shape.length],
            values=values[:, :, : shape.length],
            scale=dim**-0.5,
            mask=mask,
            sinks=sinks if shape.sinks else None,
        )

    def geometries(self, case: Case) -> Sequence[Geometry]:
        shape = attention_shape(case.shape)
        return kernel.geometries(shape.heads, shape.kv_heads, shape.head_dim, case.width)

    def launch(self, inputs: Inputs, geometry: Geometry) -> mx.array:
        return kernel.attend(*inputs, geometry=geometry, factory=self.factory)

    def stock(self, inputs: Inputs) -> mx.array:
        q, k, v, scale, mask, sinks = inputs
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    def after(self, inputs: Inputs, out: mx.array) -> Inputs:
        return inputs._replace(queries=queries_of(out))

    def reference(self, inputs: Inputs) -> NDArray[np.float32]:
        return reference.attend(*inputs)

    def tolerance(self, case: Case) -> float:
        """One unit in the last place of the largest output: 10 bits follow its first in float16, 7 in
        bfloat16. Rounding costs half of one; the sums are float32."""
        return 2.0**-10 if attention_shape(case.shape).dtype == mx.float16 else 2.0**-7

    def takes(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: Any, sinks: mx.array | None
    ) -> bool:
        return kernel.takes(queries, keys, values, mask, sinks)

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        geometry: Geometry,
    ) -> mx.array:
        return kernel.attend(
            queries, keys, values, scale, mask, sinks, geometry=geometry, factory=self.factory
        )


def attention_shape(text: str) -> AttentionShape:
    """The shape that a case names. Raises ValueError for another text."""
    found = _SHAPE.fullmatch(text)
    if found is None or found[5] not in _DTYPES:
        raise ValueError(f'shape: {text!r} is no attention; give one such as "h32-kv8-d128-s8192-float16"')
    heads, kv_heads, dim, length = map(int, found.groups()[:4])
    return AttentionShape(heads, kv_heads, dim, _DTYPES[found[5]], length, found[6] is not None)
