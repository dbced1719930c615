"""Block drafters of other packagings in numpy float32, read from their own files and not through MLX.

Everything is derived from drafter-formats: C1 to C13, and sections 4, 5 and 8.1 for what the keys mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Weights = Mapping[str, Floats]
Choose = Callable[[int, Floats], int]


@dataclass(frozen=True)
class Facts:
    """A head in numbers. `windows` and `causal` are per layer; `yarn` are the keys of its rope; `ids` are the
    target ids of a reduced draft vocabulary."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    eps: float
    theta: float
    block: int
    first: int
    mask: int
    taps: tuple[int, ...]
    windows: Sequence[int | None]
    causal: Sequence[bool]
    yarn: Mapping[str, float] = field(default_factory=dict)
    ids: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Drafted:
    """`hidden` `[block, hidden]` after the norm, logits `[drafts, draft_vocab]`, `tokens` in target ids."""

    hidden: Floats
    base: Floats
    logits: Floats
    tokens: list[int]
    confidence: list[float]


def speculators_facts(config: dict[str, Any], weights: Weights) -> Facts:
    """Section 4: a nested backbone, taps counted from 1, slots told by the number of drafts."""
    inner = config["transformer_layer_config"]
    slides = inner.get("use_sliding_window", False)
    windows = _windows(inner, inner["sliding_window"]) if slides else [None] * inner["num_hidden_layers"]
    drafts = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    return Facts(
        **_backbone(inner),
        block=config["block_size"],
        first=config["block_size"] - drafts,
        mask=config["mask_token_id"],
        taps=tuple(each - 1 for each in config["aux_hidden_state_layer_ids"]),
        windows=windows,
        causal=[w is not None and not config["sliding_window_non_causal"] for w in windows],
        ids=np.arange(len(weights["d2t"])) + weights["d2t"].astype(np.int64) if "d2t" in weights else None,
    )


def specforge_facts(config: dict[str, Any], weights: Weights) -> Facts:
    """Section 5: the drafting keys in `dflash_config`, every slot drafts, a rope of its own."""
    section, rope = config["dflash_config"], config["rope_parameters"]
    windows = _windows(config, config.get("sliding_window"))
    return Facts(
        **_backbone(config),
        block=config["block_size"],
        first=0,
        mask=section["mask_token_id"],
        taps=tuple(section["target_layer_ids"]),
        windows=windows,
        causal=[window is not None for window in windows],
        yarn=rope if rope["rope_type"] == "yarn" else {},
    )


def nemotron_facts(config: dict[str, Any], weights: Weights) -> Facts:
    """Section 8.1: causal windows in every layer, and a bonus anchor."""
    section = config["dflash_config"]
    return Facts(
        **_backbone(config),
        block=config["block_size"],
        first=int(config["dspark_bonus_anchor"]),
        mask=config["mask_token_id"],
        taps=tuple(config["target_layer_ids"]),
        windows=[section["swa_window_size"]] * config["num_hidden_layers"],
        causal=[True] * config["num_hidden_layers"],
    )


def _backbone(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "width": config["head_dim"],
        "eps": config["rms_norm_eps"],
        "theta": config["rope_parameters"]["rope_theta"],
    }


def _windows(config: dict[str, Any], width: int | None) -> list[int | None]:
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    return [width if kind == "sliding_attention" else None for kind in kinds]


def draft(
    facts: Facts,
    weights: Weights,
    features: Floats,
    anchor: int,
    embed: Floats,
    head: Floats,
    choose: Choose = lambda _, logits: int(np.argmax(logits)),
) -> Drafted:
    """One block after the context `features`; `embed` and `head` `[vocab, hidden]` are the target's."""
    ids = [anchor] + [facts.mask] * (facts.block - 1)
    h = weights.get("embed_tokens.weight", embed)[ids]
    c = _norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], facts.eps)
    for index in range(facts.layers):
        start = f"layers.{index}."
        own = {name[len(start) :]: w for name, w in weights.items() if name.startswith(start)}
        x = _norm(h, own["input_layernorm.weight"], facts.eps)
        h = h + _attend(facts, own, x, c, facts.windows[index], facts.causal[index])
        x = _norm(h, own["post_attention_layernorm.weight"], facts.eps)
        gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    z = _norm(h, weights["norm.weight"], facts.eps)
    base = z[facts.first :] @ weights.get("lm_head.weight", head).T
    return _read(facts, weights, z, base, anchor, choose)


def _norm(x: Floats, weight: Floats, eps: float) -> Floats:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def _attend(facts: Facts, w: Weights, x: Floats, c: Floats, window: int | None, causal: bool) -> Floats:
    """One query and one head at a time."""
    rows, context = len(x), len(c)
    both = np.concatenate([c, x])
    q = _norm(_heads(facts, x @ w["self_attn.q_proj.weight"].T), w["self_attn.q_norm.weight"], facts.eps)
    k = _norm(_heads(facts, both @ w["self_attn.k_proj.weight"].T), w["self_attn.k_norm.weight"], facts.eps)
    v = _heads(facts, both @ w["self_attn.v_proj.weight"].T)
    q = _rotate(facts, q, np.arange(context, context + rows))
    k = _rotate(facts, k, np.arange(context + rows))
    sinks = w.get("self_attn.attention_sink_bias")
    out = np.zeros((rows, facts.heads, facts.width), np.float32)
    for row in range(rows):
        at = context + row
        keys = [j for j in range(len(both)) if _seen(at, j, context, window, causal)]
        for head in range(facts.heads):
            shared = head // (facts.heads // facts.kv_heads)
            scores = k[keys, shared] @ q[row, head] / np.float32(math.sqrt(facts.width))
            top = scores.max() if sinks is None else max(scores.max(), sinks[head])
            shares = np.exp(scores - top)
            total = shares.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
            out[row, head] = (shares / total) @ v[keys, shared]
    return out.reshape(rows, -1) @ w["self_attn.o_proj.weight"].T


def _seen(at: int, key: int, context: int, window: int | None, causal: bool) -> bool:
    if causal and key > at:
        return False
    if window is None:
        return True
    return abs(at - key) < window if key >= context else at - key < window


def _heads(facts: Facts, x: Floats) -> Floats:
    return x.reshape(len(x), -1, facts.width)


def frequencies(width: int, theta: float, yarn: Mapping[str, float]) -> tuple[NDArray[np.float64], float]:
    """Angles per position of the pairs, and the attention factor (section 5.3)."""
    pairs = np.arange(width // 2)
    plain = theta ** (-2.0 * pairs / width)
    if not yarn:
        return plain, 1.0
    factor, length = yarn["factor"], yarn["original_max_position_embeddings"]

    def dim(turns: float) -> float:
        return width * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(dim(yarn.get("beta_fast", 32))), 0)
    high = min(math.ceil(dim(yarn.get("beta_slow", 1))), width - 1)
    ramp = np.clip((pairs - low) / (high - low), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1


def _rotate(facts: Facts, x: Floats, positions: NDArray[np.int64]) -> Floats:
    inverse, factor = frequencies(facts.width, facts.theta, facts.yarn)
    angles = positions[:, None] * inverse
    cos, sin = (f(angles).astype(np.float32)[:, None] * np.float32(factor) for f in (np.cos, np.sin))
    half = facts.width // 2
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _read(facts: Facts, w: Weights, z: Floats, base: Floats, anchor: int, choose: Choose) -> Drafted:
    table, project = w.get("markov_head.markov_w1.weight"), w.get("markov_head.markov_w2.weight")
    previous, tokens, logits, confidence = anchor, [], [], []
    for draft_number in range(facts.block - facts.first):
        row = base[draft_number]
        embedded = np.zeros(0, np.float32)
        if table is not None and project is not None:
            embedded = table[previous]
            row = row + project @ embedded
        if "confidence_head.proj.weight" in w:
            weight, slot = w["confidence_head.proj.weight"][0], z[facts.first + draft_number]
            seen = np.concatenate([slot, embedded])[: len(weight)]
            confidence.append(float(weight @ seen + w["confidence_head.proj.bias"][0]))
        chosen = choose(draft_number, row)
        previous = chosen if facts.ids is None else int(facts.ids[chosen])
        tokens.append(previous)
        logits.append(row)
    return Drafted(z, base, np.array(logits), tokens, confidence)
