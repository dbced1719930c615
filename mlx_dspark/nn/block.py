"""The backbone of block drafters: layers whose block rows attend to the target's features and to each other.

The anchor and mask slots of a block go through the layers; the context does not. Every context position is
fused once from the target's tapped features, and each layer takes its keys and values from that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.kernels.attention import Attention, stock_attention
from mlx_dspark.nn.context import ContextLayer, ContextRow
from mlx_dspark.nn.rope import Rope


@dataclass(frozen=True)
class BlockMask:
    """What a slot sees: with a window, nothing so many positions away or more; if `causal`, no later slot."""

    causal: bool = False
    window: int | None = None

    def span(self, drafting_window: int) -> int | None:
        """Context positions worth handing to attention. `drafting_window` (0: none) is for plain masks."""
        if self.window is not None:
            return self.window - 1
        return None if self.causal or not drafting_window else drafting_window

    def of(self, context: int, block: int) -> mx.array | Literal["causal"] | None:
        """The mask over `context` positions followed by the block, as attention takes it."""
        if self.window is None or context + block <= self.window:
            return "causal" if self.causal else None
        slots, keys = mx.arange(block)[:, None], mx.arange(-context, block)[None]
        near = slots - keys < self.window
        return near & (keys <= slots) if self.causal else near & (keys - slots < self.window)


@dataclass(frozen=True)
class AttentionShape:
    """Dimensions of a ContextAttention. `scaled` divides the scores by sqrt(head_dim).

    `value_norm` normalises values without a weight; `values_from_keys` takes them from the key projection.
    `sinks`: each head has a learned logit that takes weight and gives no value.
    `gated`: the query projection also gives each head a gate, whose sigmoid is on what the head gives.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    bias: bool = False
    scaled: bool = True
    value_norm: bool = False
    values_from_keys: bool = False
    sinks: bool = False
    gated: bool = False


class ContextAttention(nn.Module):
    """Attention of a block over its row's context and the block itself."""

    def __init__(self, shape: AttentionShape, rope: Rope, mask: BlockMask, drafting_window: int) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries * (2 if shape.gated else 1), bias=shape.bias)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=shape.bias)
        if not shape.values_from_keys:
            self.v_proj = nn.Linear(shape.hidden, keys, bias=shape.bias)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=shape.bias)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_eps)
        if shape.sinks:
            self.attention_sink_bias = mx.zeros((shape.heads,))
        self.shape = shape
        self.scale = shape.head_dim**-0.5 if shape.scaled else 1.0
        self.rope = rope
        self.mask = mask
        self.span = mask.span(drafting_window)
        self.attention: Attention = stock_attention

    def absorb(
        self, fused: mx.array, counts: Sequence[int], position: Sequence[int], rows: Sequence[ContextLayer]
    ) -> None:
        """Append to each row its share of `fused` `[sum of counts, hidden]`."""
        keys, values = self.keys_values(fused[None])
        end = 0
        for count, at, row in zip(counts, position, rows, strict=True):
            begin, end = end, end + count
            row.append(self.rope(keys[:, :, begin:end], at), values[:, :, begin:end])

    def __call__(
        self, x: mx.array, rows: Sequence[ContextLayer] | Surroundings, position: int | mx.array
    ) -> mx.array:
        """`[rows, block, hidden]` to the same; slot 0 of each row sits at `position`."""
        queries, gate = self._queries(x)
        queries = self.rope(queries, position)
        keys, values = self.keys_values(x)
        keys = self.rope(keys, position)
        if callable(rows):
            joined = rows(self, queries, keys, values)
        else:
            attended = [
                self._attend(queries[r : r + 1], keys[r : r + 1], values[r : r + 1], row)
                for r, row in enumerate(rows)
            ]
            joined = attended[0] if len(attended) == 1 else mx.concatenate(attended)
        joined = joined.swapaxes(1, 2).flatten(2)
        return self.o_proj(joined if gate is None else joined * mx.sigmoid(gate))

    def _queries(self, x: mx.array) -> tuple[mx.array, mx.array | None]:
        """Queries `[rows, heads, width, head_dim]`, normed but not rotated, and gates `[rows, width, heads *
        head_dim]`, None without."""
        projected, gate = self.q_proj(x), None
        if self.shape.gated:
            projected, gate = mx.split(projected.reshape(*x.shape[:2], self.shape.heads, -1), 2, axis=-1)
            gate = gate.flatten(2)
        return self.q_norm(self._heads(projected)), gate

    def _attend(self, queries: mx.array, keys: mx.array, values: mx.array, row: ContextLayer) -> mx.array:
        mask = self.mask.of(row.visible(self.span), queries.shape[2])
        keys, values = row.with_block(keys, values, self.span)
        return self.attention(queries, keys, values, self.scale, mask, self.get("attention_sink_bias"))

    def keys_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Keys, normed but not rotated, and values: `[rows, kv_heads, width, head_dim]`."""
        raw = self._heads(self.k_proj(x))
        values = raw if self.shape.values_from_keys else self._heads(self.v_proj(x))
        if self.shape.value_norm:
            values = mx.fast.rms_norm(values, None, self.shape.norm_eps)
        return self.k_norm(raw), values

    def _heads(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self.shape.head_dim).swapaxes(1, 2)


Surroundings = Callable[[ContextAttention, mx.array, mx.array, mx.array], mx.array]
"""Attends a block's rotated queries, keys and values `[rows, heads, block, head_dim]` to the block and what
is around it, in place of the contexts of running rows."""


class GatedMLP(nn.Module):
    """`down(activation(gate x) * up x)`."""

    def __init__(self, hidden: int, wide: int, activation: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class BlockLayer(nn.Module):
    """A pre-norm layer in Qwen3's style."""

    def __init__(self, attention: ContextAttention, wide: int) -> None:
        super().__init__()
        hidden, eps = attention.shape.hidden, attention.shape.norm_eps
        self.self_attn = attention
        self.mlp = GatedMLP(hidden, wide, nn.silu)
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)

    def __call__(
        self, h: mx.array, rows: Sequence[ContextLayer] | Surroundings, position: int | mx.array
    ) -> mx.array:
        h = h + self.self_attn(self.input_layernorm(h), rows, position)
        return h + self.mlp(self.post_attention_layernorm(h))


class BlockBackbone(nn.Module):
    """Fusion of the tapped features, the layers, and the final norm. Parameters are named as in files."""

    def __init__(self, layers: Sequence[BlockLayer], taps: int) -> None:
        super().__init__()
        shape = layers[0].self_attn.shape
        self.fc = nn.Linear(taps * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.layers = list(layers)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)

    @property
    def causal(self) -> bool:
        """Whether a slot depends on no later slot, so that a block may be cut short."""
        return all(layer.self_attn.mask.causal for layer in self.layers)

    def new_row(self) -> ContextRow:
        """An empty context."""
        return ContextRow([layer.self_attn.mask.window for layer in self.layers])

    def absorb(self, rows: Sequence[ContextRow]) -> None:
        """Move the observed features of these rows into their contexts."""
        rows = [row for row in rows if row.features]
        if not rows:
            return
        waiting = [features for row in rows for features in row.features]
        fused = self.hidden_norm(self.fc(waiting[0] if len(waiting) == 1 else mx.concatenate(waiting)))
        counts, position = [row.depth - row.absorbed for row in rows], [row.absorbed for row in rows]
        for index, layer in enumerate(self.layers):
            layer.self_attn.absorb(fused, counts, position, [row.layers[index] for row in rows])
        for row in rows:
            row.features, row.absorbed = [], row.depth

    def __call__(self, h: mx.array, rows: Sequence[ContextRow]) -> mx.array:
        """Block embeddings `[rows, block, hidden]` to normed hidden states of the same shape."""
        position = rows[0].absorbed if len(rows) == 1 else mx.array([row.absorbed for row in rows])
        for index, layer in enumerate(self.layers):
            h = layer(h, [row.layers[index] for row in rows], position)
        return self.norm(h)
