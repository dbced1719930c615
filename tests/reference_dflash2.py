"""DFlash 2 in numpy, float32, from its files and its definition (drafter-formats sections 2 and 3).

Nothing of the package is used: config.json and model.safetensors are read as they stand, the context is given
whole every time, and the selector's lattice is written out for every predecessor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Choose = Callable[[int, Array], int]
"""From a draft's number and its scores `[vocab]`, -inf at no candidate, to a token."""


@dataclass(frozen=True)
class SecondReference:
    """`hidden` `[block, hidden]`; `logits` `[drafts, vocab]`, -inf at what is no candidate; `tokens`."""

    hidden: Array
    logits: Array
    tokens: list[int]


def best(_: int, scores: Array) -> int:
    """The arg-max, the lowest id on ties."""
    return int(np.argmax(scores))


def reference_dflash2(
    folder: Path, features: Array, anchor: int, *, embed: Array, head: Array, choose: Choose = best
) -> SecondReference:
    """Draft one block after the context `features` `[positions, taps * hidden]`, which may be empty.

    `embed` and `head` `[vocab, hidden]` are the target's tables.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    w = {name: np.array(weight.astype(mx.float32)) for name, weight in loaded.items()}
    draft = config["dflash_config"]
    size = draft.get("block_size", config.get("block_size"))
    ids = [anchor] + [draft["mask_token_id"]] * (size - 1)
    h = embed[ids] * _either(config, "input_embedding_scale", 1.0)
    c = _norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): x for name, x in w.items() if name.startswith(prefix)}
        h = _layer(config, own, layer, h, c)
    z = _norm(h, w["norm.weight"], config)
    return _select(config, w, z, _unary(config, z, head), anchor, choose)


def _either(config: Mapping[str, Any], key: str, default: float | None) -> Any:
    found = config["dflash_config"].get(key, config.get(key))
    return default if found is None else found


def _norm(x: Array, weight: Array, config: Mapping[str, Any]) -> Array:
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(config["rms_norm_eps"]))


def _layer(config: Mapping[str, Any], w: dict[str, Array], index: int, h: Array, c: Array) -> Array:
    x = _norm(h, w["input_layernorm.weight"], config)
    attended = _attention(config, w, index, _convolve(config, w, "attention_conv", 0, x, x), c)
    h = h + _convolve(config, w, "attention_conv", 1, x, attended)
    y = _norm(h, w["post_attention_layernorm.weight"], config)
    inside = _convolve(config, w, "mlp_conv", 0, y, y)
    gate = inside @ w["mlp.gate_proj.weight"].T
    wide = (gate / (1 + np.exp(-gate)) * (inside @ w["mlp.up_proj.weight"].T)).astype(np.float32)
    return h + _convolve(config, w, "mlp_conv", 1, y, wide @ w["mlp.down_proj.weight"].T)


def _convolve(
    config: Mapping[str, Any], w: dict[str, Array], name: str, side: int, x: Array, y: Array
) -> Array:
    """`x` is the sublayer's input, which gives the coefficients; `y` is what they weigh."""
    taps, group = config["dflash_config"]["conv_kernel_size"], config["dflash_config"]["conv_group_size"]
    base, project = w[f"{name}.base_kernel"], w[f"{name}.kernel_projection.weight"]
    out = np.zeros_like(y)
    for slot in range(len(y)):
        dynamic = (project @ x[slot]).reshape(2, taps, y.shape[1] // group)
        for back in range(min(taps, slot + 1)):
            for channel in range(y.shape[1]):
                coefficient = base[side, back, channel] + dynamic[side, back, channel // group]
                out[slot, channel] += coefficient * y[slot - back, channel]
    return out


def _attention(config: Mapping[str, Any], w: dict[str, Array], index: int, x: Array, c: Array) -> Array:
    heads, kv_heads, width = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    context, block = len(c), len(x)
    both = np.concatenate([c, x])
    queries = _heads(x @ w["self_attn.q_proj.weight"].T, width)
    keys = _heads(both @ w["self_attn.k_proj.weight"].T, width)
    values = _heads(both @ w["self_attn.v_proj.weight"].T, width)
    theta = config["rope_parameters"]["rope_theta"]
    queries = _rotated(_norm(queries, w["self_attn.q_norm.weight"], config), context, theta)
    keys = _rotated(_norm(keys, w["self_attn.k_norm.weight"], config), 0, theta)
    out = np.zeros((block, heads * width), dtype=np.float32)
    for slot in range(block):
        seen = [k for k in range(context + block) if _sees(config, index, context + slot, k)]
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = keys[seen, shared] @ queries[slot, head] / math.sqrt(width)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[slot, head * width : (head + 1) * width] = weights @ values[seen, shared]
    return out @ w["self_attn.o_proj.weight"].T


def _sees(config: Mapping[str, Any], layer: int, query: int, key: int) -> bool:
    """Masks CAUSAL_W and BIDIR_W, and the two without a window."""
    sliding = config["layer_types"][layer] == "sliding_attention"
    causal = config.get("is_causal", sliding)
    if sliding and abs(query - key) >= config["sliding_window"]:
        return False
    return key <= query or not causal


def _heads(x: Array, width: int) -> Array:
    return x.reshape(len(x), -1, width)


def _rotated(x: Array, first: int, theta: float) -> Array:
    width = x.shape[-1]
    inverse = theta ** (-np.arange(0, width, 2) / width)
    angles = (np.arange(first, first + len(x))[:, None] * inverse)[:, None]
    left, right = np.split(x, 2, axis=-1)
    turned = [left * np.cos(angles) - right * np.sin(angles), right * np.cos(angles) + left * np.sin(angles)]
    return np.concatenate(turned, axis=-1).astype(np.float32)


def _unary(config: Mapping[str, Any], z: Array, head: Array) -> Array:
    """The target's own logits of slots 1 onwards."""
    u = z[1:] @ head.T * np.float32(_either(config, "output_multiplier", 1.0))
    cap = _either(config, "final_logit_softcapping", None)
    return u if cap is None else cap * np.tanh(u / cap)


def _select(
    config: Mapping[str, Any], w: dict[str, Array], z: Array, u: Array, anchor: int, choose: Choose
) -> SecondReference:
    count, vocab = config["dflash_config"]["selector_top_k"], u.shape[1]
    before, after, project = (
        w[f"candidate_selector.{name}"]
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )
    logits, tokens = np.full(u.shape, -np.inf, dtype=np.float32), []
    previous, previous_ids = 0, [anchor]
    for draft, row in enumerate(u):
        ids = sorted(range(vocab), key=lambda token: (-row[token], token))[:count]
        lattice = np.zeros((len(previous_ids), count), dtype=np.float32)
        for p, left in enumerate(previous_ids):
            for j, right in enumerate(ids):
                lattice[p, j] = row[right] + (before[left] * (project @ z[1 + draft]) * after[right]).sum()
        logits[draft, ids] = lattice[previous]
        tokens.append(choose(draft, logits[draft]))
        previous, previous_ids = ids.index(tokens[-1]), ids
    return SecondReference(z, logits, tokens)
