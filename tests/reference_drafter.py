"""Block drafters as plainly as they can be written: no cache, no rows, no fast kernels, one loop per formula.

The definitions are those of drafter-formats sections 0, 1 and 2: DeepSpec's DSpark and z-lab's DFlash.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_dspark.catalog.formats import DrafterCheckpoint, DrafterConfig
from mlx_dspark.nn.rope import inverse_frequencies

Choose = Callable[[int, mx.array], int]
"""From a draft's number and its logits `[draft_vocab]` to a draft id."""


@dataclass(frozen=True)
class Reference:
    """`hidden` `[block, hidden]`; `logits` `[max_draft, draft_vocab]`; `tokens` are target ids."""

    hidden: mx.array
    logits: mx.array
    tokens: list[int]
    confidence_logits: list[float]


def greedy(_: int, logits: mx.array) -> int:
    """The arg-max."""
    return int(mx.argmax(logits))


def reference_draft(
    checkpoint: DrafterCheckpoint,
    features: mx.array,
    anchor: int,
    *,
    embed: mx.array,
    head: mx.array,
    window: int = 0,
    choose: Choose = greedy,
) -> Reference:
    """Draft one block after the context `features` `[positions, taps * hidden]`.

    `embed` and `head` `[vocab, hidden]` are what the target lends; `window` as in `load_drafter`.
    """
    config, w = checkpoint.config, checkpoint.weights
    ids = mx.array([anchor] + [config.mask_token] * (config.block_size - 1))
    h = _embedding(checkpoint, embed)[ids]
    c = _norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], config.norm_eps)
    for layer in range(config.layers):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}
        h = _layer(config, own, layer, h, c, window)
    h = _norm(h, w["norm.weight"], config.norm_eps)
    table = w.get("lm_head.weight", w["embed_tokens.weight"] if config.tied else head)
    base = h[config.first_slot :] @ table.T * config.output_multiplier
    if config.softcap:
        base = config.softcap * mx.tanh(base / config.softcap)
    return _chain(checkpoint, h, base, anchor, choose)


def _embedding(checkpoint: DrafterCheckpoint, embed: mx.array) -> mx.array:
    config = checkpoint.config
    if not config.own_embedding:
        return embed * config.embedding_scale
    own = checkpoint.weights["embed_tokens.weight"]
    return own * math.sqrt(config.hidden) if config.backbone == "gemma4" else own


def _layer(
    config: DrafterConfig, w: dict[str, mx.array], index: int, h: mx.array, c: mx.array, window: int
) -> mx.array:
    eps, gemma4 = config.norm_eps, config.backbone == "gemma4"
    attended = _attention(config, w, index, _norm(h, w["input_layernorm.weight"], eps), c, window)
    after = w["post_attention_layernorm.weight"]
    h = h + (_norm(attended, after, eps) if gemma4 else attended)
    x = _norm(h, w["pre_feedforward_layernorm.weight"] if gemma4 else after, eps)
    gate = x @ w["mlp.gate_proj.weight"].T
    if gemma4:
        gate = 0.5 * gate * (1 + mx.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate * mx.sigmoid(gate)
    out = (gate * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    if gemma4:
        return (h + _norm(out, w["post_feedforward_layernorm.weight"], eps)) * w["layer_scalar"]
    return h + out


def _attention(
    config: DrafterConfig, w: dict[str, mx.array], index: int, x: mx.array, c: mx.array, window: int
) -> mx.array:
    context, block, width = c.shape[0], x.shape[0], config.head_dim

    def project(name: str, value: mx.array) -> mx.array:
        out = value @ w[f"self_attn.{name}.weight"].T + w.get(f"self_attn.{name}.bias", mx.array(0.0))
        return out.reshape(value.shape[0], -1, width)

    both = mx.concatenate([c, x])
    raw_keys = project("k_proj", both)
    values = raw_keys if config.values_from_keys else project("v_proj", both)
    queries = _norm(project("q_proj", x), w["self_attn.q_norm.weight"], config.norm_eps)
    keys = _norm(raw_keys, w["self_attn.k_norm.weight"], config.norm_eps)
    if config.backbone == "gemma4":
        values = _norm(values, mx.ones(width), config.norm_eps)
    q_at, k_at = mx.arange(context, context + block), mx.arange(context + block)
    queries, keys = _rotate(config, queries, q_at), _rotate(config, keys, k_at)
    group = config.heads // config.kv_heads
    keys, values = mx.repeat(keys, group, axis=1), mx.repeat(values, group, axis=1)
    scores = mx.einsum("qhd,khd->hqk", queries, keys)
    if config.backbone == "qwen3":
        scores = scores / math.sqrt(width)
    scores = mx.where(_visible(config, index, q_at[:, None], k_at[None], context, window), scores, -mx.inf)
    sinks = w.get("self_attn.attention_sink_bias")
    if sinks is not None:
        scores = mx.concatenate([scores, mx.broadcast_to(sinks[:, None, None], (config.heads, block, 1))], -1)
    shares = mx.softmax(scores, axis=-1)[..., : context + block]
    out = mx.einsum("hqk,khd->qhd", shares, values).reshape(block, -1)
    return out @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", mx.array(0.0))


def _visible(
    config: DrafterConfig, index: int, q: mx.array, k: mx.array, context: int, window: int
) -> mx.array:
    limit, causal = config.layer_windows[index], config.layer_causal[index]
    seen = (q >= 0) & (k >= 0)
    if limit is not None:
        seen = seen & (mx.abs(q - k) < limit)
    elif window and not causal:
        seen = seen & (k >= context - window)
    return seen & (k <= q) if causal else seen


def _rotate(config: DrafterConfig, x: mx.array, positions: mx.array) -> mx.array:
    options = config.rope_options
    inverse, magnitude = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_kind, options)
    angles = positions[:, None].astype(mx.float32) * mx.array(inverse)
    cos, sin = (f(angles)[:, None] * magnitude for f in (mx.cos, mx.sin))
    left, right = mx.split(x, 2, axis=-1)
    return mx.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return weight * x / mx.sqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)


def _chain(
    checkpoint: DrafterCheckpoint, h: mx.array, base: mx.array, anchor: int, choose: Choose
) -> Reference:
    config, w = checkpoint.config, checkpoint.weights
    previous, state = anchor, mx.zeros(config.markov_rank)
    tokens, logits, confidences = [], [], []
    for draft in range(config.max_draft):
        slot, row = h[config.first_slot + draft], base[draft]
        e = w["markov_head.markov_w1.weight"][previous] if config.markov_rank else mx.zeros(0)
        if config.markov == "vanilla":
            row = row + w["markov_head.markov_w2.weight"] @ e
        if config.markov == "gated":
            gate = w["markov_head.gate_proj.weight"] @ mx.concatenate([slot, e])
            gate = mx.sigmoid(gate + w["markov_head.gate_proj.bias"])
            row = row + w["markov_head.markov_w2.weight"] @ (gate * e)
        if config.markov == "rnn":
            joint = w["markov_head.joint_proj.weight"] @ mx.concatenate([state, e, slot])
            g, candidate, output = mx.split(joint + w["markov_head.joint_proj.bias"], 3)
            state = mx.sigmoid(g) * state + (1 - mx.sigmoid(g)) * mx.tanh(candidate)
            row = row + w["markov_head.markov_w2.weight"] @ mx.tanh(output)
        if config.confidence:
            sees = mx.concatenate([slot, e]) if config.confidence_with_markov else slot
            logit = w["confidence_head.proj.weight"] @ sees + w["confidence_head.proj.bias"]
            confidences.append(float(logit))
        chosen = choose(draft, row)
        previous = chosen if checkpoint.d2t is None else chosen + int(checkpoint.d2t[chosen])
        tokens.append(previous)
        logits.append(row)
    return Reference(h, mx.stack(logits), tokens, confidences)
