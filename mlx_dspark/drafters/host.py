"""A drafter's layers with their small steps outside MLX, where the CPU back end holds the matrices itself.

A block is a handful of rows, so norms, rotations and reshapes cost more to hand to MLX one by one than to do.
The arithmetic is that of `nn/block.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_dspark.kernels.base import Floats
from mlx_dspark.kernels.cpu_small.modules import HostRMSNorm, HostRoPE
from mlx_dspark.kernels.cpu_swiglu.module import HeldSwiglu
from mlx_dspark.kernels.modules import HeldLinear, as_array, as_rows
from mlx_dspark.nn.block import BlockLayer, ContextAttention, Surroundings
from mlx_dspark.nn.context import ContextLayer


class HostNorm:
    """An RMS norm of numpy rows: `[..., dims]` to the same."""

    def __init__(self, norm: HostRMSNorm) -> None:
        self._weight = np.array(norm.weight)
        self._eps = np.float32(norm.eps)

    def __call__(self, rows: Floats) -> Floats:
        mean = np.einsum("...d,...d->...", rows, rows)[..., None] / np.float32(rows.shape[-1])
        return rows * (np.float32(1) / np.sqrt(mean + self._eps)) * self._weight


class HostAttention(ContextAttention):
    """The same attention over held matrices, norms and projections in numpy."""

    def __init__(self, attention: ContextAttention, rope: HostRoPE) -> None:
        super().__init__(attention.shape, attention.rope, attention.mask, 0)
        self.span, self.attention, self.host_rope = attention.span, attention.attention, rope
        for name, child in attention.children().items():
            setattr(self, name, child)
        if self.shape.sinks:
            self.attention_sink_bias = attention.attention_sink_bias
        self._norms = {name: HostNorm(attention[name]) for name in ("q_norm", "k_norm")}

    def attend_rows(self, flat: Floats, rows: Sequence[ContextLayer], position: int | mx.array) -> Floats:
        """`[rows * block, hidden]` to the same, slot 0 of each row at `position`."""
        count = len(rows)
        queries = self.host_rope(mx.array(self._normed("q", flat, count)), position)
        keys, values = (mx.array(part) for part in self._keys_values(flat, count))
        keys = self.host_rope(keys, position)
        block, parts, sinks = queries.shape[2], [], self.get("attention_sink_bias")
        for r, row in enumerate(rows):
            mask = self.mask.of(row.visible(self.span), block)
            seen = row.with_block(keys[r : r + 1], values[r : r + 1], self.span)
            parts.append(self.attention(queries[r : r + 1], *seen, self.scale, mask, sinks))
        attended = np.concatenate([np.array(part, copy=False) for part in parts])
        return self._held("o").multiply(np.ascontiguousarray(attended.swapaxes(1, 2)).reshape(len(flat), -1))

    def keys_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = self._keys_values(as_rows(x), len(x))
        return mx.array(keys), mx.array(values)

    def _keys_values(self, flat: Floats, rows: int) -> tuple[Floats, Floats]:
        return self._normed("k", flat, rows), self._split(self._held("v").multiply(flat), rows).swapaxes(1, 2)

    def _normed(self, kind: str, flat: Floats, rows: int) -> Floats:
        """Queries or keys, normed but not rotated: `[rows, heads, width, head_dim]`."""
        projected = self._split(self._held(kind).multiply(flat), rows)
        return self._norms[f"{kind}_norm"](projected).swapaxes(1, 2)

    def _held(self, kind: str) -> HeldLinear:
        return self[f"{kind}_proj"]

    def _split(self, projected: Floats, rows: int) -> Floats:
        return projected.reshape(rows, len(projected) // rows, -1, self.shape.head_dim)


class HostLayer(BlockLayer):
    """A BlockLayer whose block leaves MLX but for the attention and the MLP."""

    self_attn: HostAttention

    def __init__(self, layer: BlockLayer, rope: HostRoPE) -> None:
        attention = HostAttention(layer.self_attn, rope)
        super().__init__(attention, 1)
        for name, child in layer.children().items():
            setattr(self, name, child)
        self.self_attn = attention
        self._input_norm = HostNorm(layer["input_layernorm"])
        self._output_norm = HostNorm(layer["post_attention_layernorm"])

    def __call__(
        self, h: mx.array, rows: Sequence[ContextLayer] | Surroundings, position: int | mx.array
    ) -> mx.array:
        assert not callable(rows), "held weights serve running rows"
        flat = as_rows(h)
        flat = flat + self.self_attn.attend_rows(self._input_norm(flat), rows, position)
        return as_array(flat + as_rows(self.mlp(mx.array(self._output_norm(flat)))), h)


def host_layer(layer: BlockLayer, rope: HostRoPE) -> BlockLayer:
    """`layer` outside MLX where it is one that this module can stand for, else `layer` itself.

    `rope` rotates as the layer's own does.
    """
    attention = layer.self_attn
    linears = [attention.get(f"{name}_proj") for name in "qkvo"]
    norms = [attention.get("q_norm"), attention.get("k_norm")]
    norms += [layer.get("input_layernorm"), layer.get("post_attention_layernorm")]
    fits = (
        type(layer) is BlockLayer
        and not attention.shape.value_norm
        and not attention.shape.gated
        and isinstance(layer.mlp, HeldSwiglu)
        and all(isinstance(linear, HeldLinear) for linear in linears)
        and all(isinstance(norm, HostRMSNorm) for norm in norms)
    )
    return HostLayer(layer, rope) if fits else layer
