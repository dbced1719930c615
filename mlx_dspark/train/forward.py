"""The drafter's forward on whole sequences: many blocks at once, each as it would be drafted on its own.

The layers, heads and tables are those that draft (`drafters/dspark`); only what a block attends to differs.
A sequence's context is fused once, and a mask shows each block the positions before its anchor and its own
slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_dspark.drafters.dspark.drafter import DSparkDrafter
from mlx_dspark.drafters.dspark.heads import RecurrentMarkovHead
from mlx_dspark.nn.block import BlockLayer, BlockMask, ContextAttention, Surroundings


def block_states(
    drafter: DSparkDrafter,
    features: mx.array,
    tokens: mx.array,
    anchors: mx.array,
    *,
    recompute: bool = False,
) -> mx.array:
    """Normed hidden states of all blocks, `[rows * anchors, block, hidden]`.

    `features` `[rows, width, taps * hidden]` and `tokens` `[rows, width]` are of whole sequences; `anchors`
    `[rows, n]` the positions in them that blocks start at. With `recompute` a layer's inner values are not
    kept for the backward pass.
    """
    model, config = drafter.model, drafter.config
    fused = model.hidden_norm(model.fc(features.astype(drafter.dtype)))
    h = drafter.embed_ids(_block_ids(tokens, anchors, config.block_size, config.mask_token))
    h = h.astype(drafter.dtype)
    positions = anchors.reshape(-1)
    kinds = {layer.self_attn.mask for layer in model.layers}
    masks = {kind: visible(kind, anchors, tokens.shape[1], config.block_size) for kind in kinds}
    for layer in model.layers:

        def run(h: mx.array, fused: mx.array, layer: BlockLayer = layer) -> mx.array:
            return layer(h, _surroundings(fused, masks[layer.self_attn.mask]), positions)

        h = (recomputed([layer], run) if recompute else run)(h, fused)
    return model.norm(h)


def head_logits(
    drafter: DSparkDrafter, states: mx.array, previous: mx.array
) -> tuple[mx.array, mx.array | None]:
    """Logits `[blocks, width, draft_vocab]` and confidence logits `[blocks, width]` of the predicting slots.

    `states` `[blocks, width, hidden]`; `previous` `[blocks, width]` the true token before each prediction,
    the anchor first: what the Markov head would see if every draft so far had been right.
    """
    base = drafter.base_logits(states)
    if drafter.config.markov == "none":
        return base, drafter.confidence_logits(states)
    head = drafter.model.markov_head
    embedded = head.markov_w1(previous)
    if isinstance(head, RecurrentMarkovHead):
        state, biases = None, []
        for slot in range(states.shape[1]):
            bias, state = head.step(embedded[:, slot], states[:, slot], state)
            biases.append(bias)
        bias = mx.stack(biases, axis=1)
    else:
        bias, _ = head.step(embedded, states, None)
    return base + bias, drafter.confidence_logits(states, embedded)


def visible(mask: BlockMask, anchors: mx.array, width: int, block: int) -> mx.array:
    """Which keys each slot sees: bool `[rows, 1, n * block, width + n * block]`.

    Keys are the `width` context positions of the sequence followed by the slots of all its `n` blocks.
    """
    rows, count = anchors.shape
    slot = mx.arange(block)
    at = (anchors[:, :, None] + slot).reshape(rows, -1, 1)
    before = mx.repeat(anchors, block, axis=1)[:, :, None]
    key = mx.arange(width)[None, None]
    context = key < before
    own = mx.ones((block, block), dtype=mx.bool_)
    if mask.window is not None:
        context = context & (at - key < mask.window)
        own = (slot[:, None] - slot < mask.window) & (slot - slot[:, None] < mask.window)
    if mask.causal:
        own = own & (slot <= slot[:, None])
    same = mx.eye(count, dtype=mx.bool_)[:, None, :, None]
    blocks = (same & own[None, :, None, :]).reshape(1, count * block, count * block)
    blocks = mx.broadcast_to(blocks, (rows, count * block, count * block))
    return mx.concatenate([context, blocks], axis=2)[:, None]


def picked(values: mx.array, positions: mx.array) -> mx.array:
    """`values` `[rows, width, ...]` at `positions` `[rows, n]`: `[rows, n, ...]`.

    One flat index, as an embedding is looked up with: CUDA compiles each kind of gather at its first use.
    """
    rows, width = values.shape[:2]
    flat = positions + width * mx.arange(rows, dtype=positions.dtype)[:, None]
    return mx.take(values.reshape(rows * width, *values.shape[2:]), flat, axis=0)


def recomputed(modules: Sequence[nn.Module], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with its inner values thrown away and computed again in the backward pass.

    `modules` are those whose parameters it uses. Gradients flow to these and to the arguments, floating-point
    arrays all of them; what else `run` closes over counts as constant.
    """

    def inner(parameters: Sequence[dict[str, Any]], *arguments: mx.array) -> Any:
        _give(modules, parameters)
        return run(*arguments)

    def call(*arguments: mx.array) -> Any:
        parameters = [module.trainable_parameters() for module in modules]
        result = mx.checkpoint(inner)(parameters, *arguments)
        _give(modules, parameters)
        return result

    return call


def _give(modules: Sequence[nn.Module], parameters: Sequence[dict[str, Any]]) -> None:
    for module, held in zip(modules, parameters, strict=True):
        module.update(held)


def _block_ids(tokens: mx.array, anchors: mx.array, block: int, mask_token: int) -> mx.array:
    """`[anchor, mask, mask, ...]` for every block: `[rows * n, block]`."""
    first = picked(tokens, anchors).reshape(-1, 1)
    masks = mx.full((first.shape[0], block - 1), mask_token, dtype=first.dtype)
    return mx.concatenate([first, masks], axis=1)


def _surroundings(fused: mx.array, mask: mx.array) -> Surroundings:
    """Attention of a sequence's blocks, side by side, to its fused context `[rows, width, hidden]`."""

    def attend(attention: ContextAttention, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        rows, blocks = fused.shape[0], queries.shape[0]
        context_keys, context_values = attention.keys_values(fused)
        context_keys = attention.rope(context_keys, 0)
        attended = mx.fast.scaled_dot_product_attention(
            _beside(queries, rows),
            mx.concatenate([context_keys, _beside(keys, rows)], axis=2),
            mx.concatenate([context_values, _beside(values, rows)], axis=2),
            scale=attention.scale,
            mask=mask,
        )
        apart = attended.reshape(rows, attended.shape[1], blocks // rows, -1, attended.shape[3])
        return apart.swapaxes(1, 2).flatten(0, 1)

    return attend


def _beside(x: mx.array, rows: int) -> mx.array:
    """`[rows * n, heads, block, dims]` to `[rows, heads, n * block, dims]`."""
    return x.reshape(rows, -1, *x.shape[1:]).swapaxes(1, 2).flatten(2, 3)
