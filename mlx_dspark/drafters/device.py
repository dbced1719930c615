"""A block drafter's forward outside MLX's operations, on devices where launching these takes longest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_block.forward import (
    TAIL,
    BlockForward,
    Context,
    Dimensions,
    near,
    weights_of,
)
from mlx_dspark.nn.block import BlockBackbone, BlockLayer, ContextAttention
from mlx_dspark.nn.context import ContextRow
from mlx_dspark.nn.rope import inverse_frequencies


@dataclass(frozen=True)
class _Layer:
    layer: BlockLayer

    @property
    def matrices(self) -> Sequence[Source | None]:
        attention, mlp = self.layer.self_attn, self.layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        return [Source.of(each) for each in [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]]

    @property
    def norms(self) -> Sequence[mx.array]:
        layer, attention = self.layer, self.layer.self_attn
        before = [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
        return [*before, attention.q_norm.weight, attention.k_norm.weight]


class DeviceForward:
    """The forward of one row's block through `model`, with what its context has not absorbed yet."""

    def __init__(self, model: BlockBackbone, forward: BlockForward) -> None:
        self._forward = forward
        self._span = model.layers[0].self_attn.span

    @classmethod
    def of(cls, model: BlockBackbone) -> DeviceForward | None:
        """None where the kernel does not compute what the model's layers do."""
        dimensions = _dimensions(model)
        if dimensions is None or dimensions.refusal():
            return None
        rope = model.layers[0].self_attn.rope
        frequencies, _ = inverse_frequencies(dimensions.head_dim, rope.theta, "default", {})
        norms = [model.hidden_norm.weight, model.norm.weight]
        weights = weights_of(Source.of(model.fc), [_Layer(each) for each in model.layers], norms, frequencies)
        return None if weights is None else cls(model, BlockForward(dimensions, weights))

    def takes(self, rows: Sequence[ContextRow]) -> bool:
        """Whether this is one row, and little of it, all of it visible, waits to be absorbed."""
        most = TAIL if self._span is None else min(TAIL, self._span)
        return len(rows) == 1 and rows[0].depth - rows[0].absorbed <= most

    def __call__(self, embedded: mx.array, row: ContextRow) -> mx.array:
        """Block embeddings `[1, slots, hidden]` to normed hidden states; the row stays as it is."""
        if len(row.features) > 1:
            row.features = [mx.concatenate(row.features)]
        visible = row.depth if self._span is None else min(self._span, row.depth)
        begin = min(row.depth - visible, row.absorbed)
        empty = self._forward.empty() if not row.absorbed else None
        return self._forward(
            embedded,
            Context(
                keys=[_held(layer.keys, empty) for layer in row.layers],
                values=[_held(layer.values, empty) for layer in row.layers],
                begin=begin,
                seen=row.absorbed - begin,
                features=row.features[0] if row.features else None,
                position=row.depth,
            ),
        )

    def right_here(self, model: BlockBackbone, slots: int) -> bool:
        """Whether the kernel compiles on this device and agrees with the model's own operations there.

        Never raises: where it does not, these are used.
        """
        try:
            return all(self._agrees(model, slots, waiting) for waiting in (0, 5))
        except (RuntimeError, ValueError):
            return False

    def _agrees(self, model: BlockBackbone, slots: int, waiting: int) -> bool:
        shape, dtype = self._forward.dimensions, self._forward.weights.dtype
        keys = mx.random.split(mx.random.key(slots), 2)
        features = mx.random.normal((40 + waiting, shape.features), key=keys[0]).astype(dtype)
        embedded = mx.random.normal((1, slots, shape.hidden), key=keys[1]).astype(dtype)
        row = model.new_row()
        row.observe(features[:40])
        model.absorb([row])
        if waiting:
            row.observe(features[40:])
        got = self(embedded, row)
        model.absorb([row])
        return near(got, model(embedded, [row]))


def _held(buffer: mx.array | None, empty: mx.array | None) -> mx.array:
    if buffer is not None:
        return buffer
    assert empty is not None
    return empty


def _dimensions(model: BlockBackbone) -> Dimensions | None:
    """What the layers have in common; None where they, or any of them, compute something else."""
    attentions = [layer.self_attn for layer in model.layers]
    first = attentions[0]
    shape = first.shape
    plain = all(type(layer) is BlockLayer and _plain(layer.self_attn) for layer in model.layers)
    alike = all(each.shape == shape and each.mask == first.mask for each in attentions)
    activations = {layer.mlp.activation for layer in model.layers}
    if not (plain and alike and activations == {nn.silu}):
        return None
    fusion, gate = Source.of(model.fc), Source.of(model.layers[0].mlp.gate_proj)
    if fusion is None or gate is None or "bias" in model.fc:
        return None
    return Dimensions(
        layers=len(model.layers),
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        wide=gate.outputs,
        features=fusion.inputs,
        eps=shape.norm_eps,
        scale=first.scale,
        causal=first.mask.causal,
    )


def _plain(attention: ContextAttention) -> bool:
    shape, rope = attention.shape, attention.rope
    unusual = (shape.bias, shape.value_norm, shape.values_from_keys, shape.sinks, shape.gated)
    turned = rope.plain and rope.dims == shape.head_dim
    near = attention.mask.window is not None
    return type(attention) is ContextAttention and turned and not near and not any(unusual)
