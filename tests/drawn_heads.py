"""Drafters drawn at random in each published layout, and what they draft, in float64 numpy.

Layouts and math are drafter-formats'; nothing here comes from the package. `draw(packaging, seed, folder)`
writes a head and gives it in numbers, which `Drawn.draft` computes with. A seed draws widths, depths, heads,
slots, taps, masks, ropes, tables, vocabularies, number types, the split into files and what is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

F = NDArray[np.float64]
FULL, SLIDING = "full_attention", "sliding_attention"
Rotation = tuple[int, int, float]
"""Two dimensions that turn together, and the angle for each position."""


@dataclass
class Drawn:
    """A head in numbers. `masks[i]` is (causal, window) of layer `i`; its rope turns by `rotations`."""

    H: int
    V: int
    wide: int
    layers: int
    heads: int
    kv: int
    hd: int
    eps: float
    B: int
    s0: int
    mask: int
    taps: list[int]
    masks: list[tuple[bool, int | None]]
    rotations: list[Rotation]
    magnitude: float = 1.0
    bias: bool = False
    sinks: bool = False
    gated: bool = False
    gemma: bool = False
    shares: bool = False
    offset: float = 0.0
    markov: str = "none"
    rank: int = 0
    confidence: bool = False
    conf_markov: bool = False
    softcap: float | None = None
    multiplier: float = 1.0
    scale: float = 1.0
    own_embed: bool = True
    own_head: bool = True
    tied: bool = False
    Vd: int = 0
    ids: list[int] | None = None
    noise: bool = False
    selector: tuple[int, int] | None = None
    conv: tuple[int, int] | None = None
    kind: mx.Dtype = mx.float32
    W: dict[str, F] = field(default_factory=dict)

    def draft(self, features: F, anchor: int, embed: F, head: F) -> dict[str, Any]:
        """One block after the context `features`; `embed` and `head` are the target's."""
        W, table = self.W, self.W.get("embed_tokens.weight", embed)
        h = table[[anchor] + [self.mask] * (self.B - 1)] * self.scale
        if self.gemma:
            h = h * math.sqrt(self.H)
        if self.noise:
            h = h + np.stack([self._noise(1000.0 if slot == 0 else 0.0) for slot in range(self.B)])
        c = self._norm(features @ W["fc.weight"].T, "hidden_norm.weight")
        for layer in range(self.layers):
            h = self._layer(layer, h, c)
        z = self._norm(h, "norm.weight")
        out = W.get("lm_head.weight", table if self.tied else head)
        base = z[self.s0 :] @ out.T * self.multiplier
        base = self.softcap * np.tanh(base / self.softcap) if self.softcap else base
        found = self._chain(z, base, anchor) if self.selector is None else self._path(z, base, anchor)
        return {"block_hidden": z, "base_logits": base} | found

    def _noise(self, t: float) -> F:
        turns = [t * 10000 ** (-i / 64) for i in range(64)]
        feat = np.array([*map(math.sin, turns), *map(math.cos, turns)])
        x = self.W["log_snr_embed.fc1.weight"] @ feat + self.W["log_snr_embed.fc1.bias"]
        return self.W["log_snr_embed.fc2.weight"] @ _silu(x) + self.W["log_snr_embed.fc2.bias"]

    def _norm(self, x: F, name: str | None) -> F:
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return y if name is None else y * (self.W[name] + self.offset)

    def _layer(self, layer: int, h: F, c: F) -> F:
        at = f"layers.{layer}."
        mlp = self._gelu_mlp if self.gemma else self._silu_mlp
        x = self._norm(h, at + "input_layernorm.weight")
        turn = self._conv(at + "attention_conv.", x)
        attended = turn(1, self._attend(at + "self_attn.", turn(0, x), c, *self.masks[layer]))
        if self.gemma:
            h = h + self._norm(attended, at + "post_attention_layernorm.weight")
            y = mlp(at, self._norm(h, at + "pre_feedforward_layernorm.weight"))
            y = self._norm(y, at + "post_feedforward_layernorm.weight")
            return (h + y) * self.W[at + "layer_scalar"]
        h = h + attended
        y = self._norm(h, at + "post_attention_layernorm.weight")
        turn = self._conv(at + "mlp_conv.", y)
        return h + turn(1, mlp(at, turn(0, y)))

    def _conv(self, at: str, x: F) -> Callable[[int, F], F]:
        if self.conv is None:
            return lambda _, y: y
        taps, group = self.conv
        dynamic = (x @ self.W[at + "kernel_projection.weight"].T).reshape(len(x), 2, taps, -1)
        base = self.W[at + "base_kernel"]

        def convolved(side: int, y: F) -> F:
            out = np.zeros_like(y)
            for row, tap in np.ndindex(len(y), taps):
                if tap <= row:
                    out[row] += (base[side, tap] + np.repeat(dynamic[row, side, tap], group)) * y[row - tap]
            return out

        return convolved

    def _silu_mlp(self, at: str, x: F) -> F:
        gate, up = x @ self.W[at + "mlp.gate_proj.weight"].T, x @ self.W[at + "mlp.up_proj.weight"].T
        return (_silu(gate) * up) @ self.W[at + "mlp.down_proj.weight"].T

    def _gelu_mlp(self, at: str, x: F) -> F:
        gate, up = x @ self.W[at + "mlp.gate_proj.weight"].T, x @ self.W[at + "mlp.up_proj.weight"].T
        gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        return (gate * up) @ self.W[at + "mlp.down_proj.weight"].T

    def _attend(self, at: str, x: F, c: F, causal: bool, window: int | None) -> F:
        def project(name: str, y: F) -> F:
            return y @ self.W[f"{at}{name}_proj.weight"].T + self.W.get(f"{at}{name}_proj.bias", np.zeros(()))

        P, both = len(c), np.concatenate([c, x])
        q = project("q", x).reshape(len(x), self.heads, -1)
        q, gate = (q[..., : self.hd], q[..., self.hd :]) if self.gated else (q, None)
        k = project("k", both).reshape(len(both), self.kv, self.hd)
        v = k if self.shares else project("v", both).reshape(k.shape)
        v = self._norm(v, None) if self.gemma else v
        q, k = self._norm(q, at + "q_norm.weight"), self._norm(k, at + "k_norm.weight")
        q, k = self._turn(q, P), self._turn(k, 0)
        out = np.zeros((len(x), self.heads, self.hd))
        for row, head in np.ndindex(len(x), self.heads):
            group = head * self.kv // self.heads
            seen = [j for j in range(len(both)) if _sees(P + row, j, P, causal, window)]
            scores = k[seen, group] @ q[row, head] * (1.0 if self.gemma else self.hd**-0.5)
            weights = np.exp(scores - scores.max())
            total = weights.sum()
            if self.sinks:
                total += math.exp(self.W[at + "attention_sink_bias"][head] - scores.max())
            out[row, head] = weights / total @ v[seen, group]
        if gate is not None:
            out = out / (1 + np.exp(-gate))
        return project("o", out.reshape(len(x), -1))

    def _turn(self, x: F, first: int) -> F:
        out, at = x * self.magnitude, np.arange(first, first + len(x))[:, None]
        turned = out.copy()
        for a, b, speed in self.rotations:
            cos, sin = np.cos(at * speed), np.sin(at * speed)
            turned[..., a] = out[..., a] * cos - out[..., b] * sin
            turned[..., b] = out[..., b] * cos + out[..., a] * sin
        return turned

    def _chain(self, z: F, base: F, anchor: int) -> dict[str, Any]:
        W, before, state = self.W, anchor, np.zeros(self.rank)
        logits, tokens, confidence = [], [], []
        for i, row in enumerate(base):
            slot, e = z[self.s0 + i], W["markov_head.markov_w1.weight"][before] if self.rank else np.zeros(0)
            if self.markov == "vanilla":
                row = row + W["markov_head.markov_w2.weight"] @ e
            elif self.markov == "gated":
                g = W["markov_head.gate_proj.weight"] @ np.concatenate([slot, e])
                g = _sigmoid(g + W["markov_head.gate_proj.bias"])
                row = row + W["markov_head.markov_w2.weight"] @ (g * e)
            elif self.markov == "rnn":
                joint = W["markov_head.joint_proj.weight"] @ np.concatenate([state, e, slot])
                g, new, out = np.split(joint + W["markov_head.joint_proj.bias"], 3)
                state = _sigmoid(g) * state + (1 - _sigmoid(g)) * np.tanh(new)
                row = row + W["markov_head.markov_w2.weight"] @ np.tanh(out)
            if self.confidence:
                seen = np.concatenate([slot, e]) if self.conf_markov else slot
                proj = W["confidence_head.proj.weight"][0] @ seen + W["confidence_head.proj.bias"][0]
                confidence.append(float(proj))
            before = int(np.argmax(row))
            before = before if self.ids is None else self.ids[before]
            logits.append(row)
            tokens.append(before)
        found = {"draft_logits": np.stack(logits), "draft_tokens": tokens}
        return found | ({"confidence_logits": np.array(confidence)} if confidence else {})

    def _path(self, z: F, base: F, anchor: int) -> dict[str, Any]:
        assert self.selector is not None
        W, before, tokens = self.W, anchor, []
        for i, row in enumerate(base):
            best = np.argsort(-row, kind="stable")[: self.selector[1]]
            p = W["candidate_selector.hidden_projection.weight"] @ z[self.s0 + i]
            after = W["candidate_selector.successor_codebook"][best]
            scores = row[best] + after @ (W["candidate_selector.predecessor_codebook"][before] * p)
            before = int(best[np.argmax(scores)])
            tokens.append(before)
        return {"draft_tokens": tokens}


def _sees(q: int, k: int, context: int, causal: bool, window: int | None) -> bool:
    near = window is None or abs(q - k) < window
    return near and (not causal or k < context or k <= q)


def _sigmoid(x: F) -> F:
    return 1 / (1 + np.exp(-x))


def _silu(x: F) -> F:
    return x * _sigmoid(x)


# drawing -------------------------------------------------------------------------------------------------


class Dice:
    """Draws that a seed decides."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *options: Any) -> Any:
        return options[self.rng.integers(len(options))]

    def between(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def maybe(self) -> bool:
        return bool(self.rng.integers(2))


def draw(packaging: str, seed: int, folder: Path) -> Drawn:
    """Write a head of this packaging into `folder`."""
    dice = Dice(seed * 1000 + sorted(PACKAGINGS).index(packaging))
    heads, kv = dice.one((4, 2), (4, 1), (4, 4), (6, 2), (2, 1))
    hd, H, B = dice.one(8, 16, 16, 32), dice.one(32, 48, 64), dice.between(2, 16)
    d = Drawn(
        H=H,
        V=dice.between(200, 330),
        wide=dice.one(40, 96, 128),
        layers=dice.between(1, 4),
        heads=heads,
        kv=kv,
        hd=hd,
        eps=dice.one(1e-6, 1e-5),
        B=B,
        s0=0,
        mask=dice.between(0, 199),
        taps=sorted(map(int, dice.rng.choice(np.arange(-1, 9), dice.between(1, 5), replace=False))),
        masks=[],
        rotations=[],
        bias=dice.maybe(),
    )
    d.masks = [(False, None)] * d.layers
    d.Vd = d.V
    config = PACKAGINGS[packaging](d, dice)
    _fill(d, dice)
    _write(folder, config, d, dice)
    return d


def _halves(dims: int, theta: float, speeds: list[float] | None = None) -> list[Rotation]:
    speeds = speeds or [theta ** (-2 * i / dims) for i in range(dims // 2)]
    return [(i, i + dims // 2, speed) for i, speed in enumerate(speeds)]


def _backbone(d: Drawn, dice: Dice, theta: float) -> dict[str, Any]:
    flat = {"rope_theta": theta}
    rope = dice.one(flat, {"rope_parameters": flat | {"rope_type": "default"}}, {"rope_parameters": flat})
    d.rotations = _halves(d.hd, theta)
    usual = {"head_dim": d.hd * d.heads == d.H, "rms_norm_eps": d.eps == 1e-6, "attention_bias": not d.bias}
    left_out = dict.fromkeys(name for name, is_usual in usual.items() if is_usual and dice.maybe())
    if theta == 1e6 and dice.maybe():
        rope = {}
    return {
        "hidden_size": d.H,
        "vocab_size": d.V,
        "intermediate_size": d.wide,
        "num_hidden_layers": d.layers,
        "num_attention_heads": d.heads,
        "num_key_value_heads": d.kv,
        "head_dim": d.hd,
        "rms_norm_eps": d.eps,
        "attention_bias": d.bias,
        "hidden_act": "silu",
        **rope,
        **left_out,
    }


def _theta(dice: Dice) -> float:
    return dice.one(1e4, 5e5, 1e6, 1e7)


def _markov(
    d: Drawn, dice: Dice, kinds: tuple[str, ...] = ("none", "vanilla", "gated", "rnn")
) -> dict[str, Any]:
    d.markov = dice.one(*kinds)
    d.rank = 0 if d.markov == "none" else dice.one(4, 12, 16)
    d.confidence = dice.maybe()
    d.conf_markov = d.confidence and bool(d.rank) and dice.maybe()
    return {
        "markov_rank": d.rank,
        "markov_head_type": d.markov if d.rank else "vanilla",
        "enable_confidence_head": d.confidence,
        "confidence_head_with_markov": d.conf_markov,
    }


def _tables(d: Drawn, dice: Dice) -> dict[str, Any]:
    d.own_embed, d.own_head = dice.one((True, True), (True, False), (False, True), (False, False))
    d.tied = d.own_embed and not d.own_head and dice.maybe()
    return {"tie_word_embeddings": True} if d.tied else dice.one({}, {"tie_word_embeddings": False})


def _slots(d: Drawn, dice: Dice) -> dict[str, Any]:
    """A silent anchor is told, one that drafts may be."""
    d.s0 = dice.between(0, 1)
    told = dice.one({"sample_from_anchor": d.s0 == 0}, {"logits_start": d.s0})
    return told if d.s0 else dice.one({}, told)


def _window(d: Drawn, dice: Dice, causal: bool) -> tuple[list[str], int]:
    kinds = [dice.one(FULL, SLIDING) for _ in range(d.layers)]
    width = dice.between(3, 30)
    d.masks = [(causal, width) if kind == SLIDING else (False, None) for kind in kinds]
    return kinds, width


def _yarn(d: Drawn, dice: Dice, theta: float) -> dict[str, Any]:
    factor, length = dice.one(2.0, 8.0, 32.0), dice.one(64, 512, 8192)
    fast, slow = dice.one((32.0, 1.0), (16.0, 2.0))
    told: dict[str, Any] = {"factor": factor, "original_max_position_embeddings": length}
    told |= {"beta_fast": fast, "beta_slow": slow} if (fast, slow) != (32.0, 1.0) or dice.maybe() else {}

    def dim(n: float) -> float:
        return d.hd * math.log(length / (2 * math.pi * n)) / (2 * math.log(theta))

    low, high = max(math.floor(dim(fast)), 0), min(math.ceil(dim(slow)), d.hd - 1)
    speeds = []
    for i in range(d.hd // 2):
        plain = theta ** (-2 * i / d.hd)
        ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
        speeds.append(plain * (1 - ramp) + plain / factor * ramp)
    d.rotations, d.magnitude = _halves(d.hd, theta, speeds), 0.1 * math.log(factor) + 1
    return told


def _deepspec(d: Drawn, dice: Dice) -> dict[str, Any]:
    config = _backbone(d, dice, _theta(dice)) | _markov(d, dice) | _tables(d, dice) | _slots(d, dice)
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": d.B,
        "mask_token_id": d.mask,
        "target_layer_ids": d.taps,
        "num_target_layers": 10,
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
        "rope_scaling": dice.one(None, {"rope_type": "yarn", "factor": 4.0, "mrope_section": [1, 2, 1]}),
    }
    d.softcap = dice.one(None, 12.0, 30.0)
    return config | {"final_logit_softcapping": d.softcap}


def _gemma4(d: Drawn, dice: Dice) -> dict[str, Any]:
    config = _backbone(d, dice, 1e4) | _markov(d, dice) | _tables(d, dice)
    d.gemma, d.shares, d.softcap = True, dice.maybe(), dice.one(30.0, 12.0, None)
    own = config.pop("hidden_act") and dice.one({"num_global_key_value_heads": 1}, {})
    share, theta = dice.one(0.25, 0.5, 1.0), _theta(dice)
    if d.shares:
        d.kv = 1
    turning = int(share * d.hd / 2)
    d.rotations = [(i, i + d.hd // 2, theta ** (-2 * i / d.hd)) for i in range(turning)]
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}
    config.pop("rope_theta", None)
    return config | {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": dice.one("gemma4_text", "gemma4"),
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "global_head_dim": d.hd,
        "num_key_value_heads": 2 if d.shares else d.kv,
        "attention_k_eq_v": d.shares,
        "final_logit_softcapping": d.softcap,
        "rope_parameters": dice.one(
            {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: full, "rope_theta": None}, full
        ),
        "block_size": d.B,
        "mask_token_id": d.mask,
        "target_layer_ids": d.taps,
        "sliding_window": 16,
        "enable_moe_block": False,
        **own,
    }


def _dflash(d: Drawn, dice: Dice) -> dict[str, Any]:
    theta = _theta(dice)
    config = _backbone(d, dice, theta)
    kinds, width = _window(d, dice, causal=True)
    causal = dice.one(None, True, False)
    if causal is not None:
        d.masks = [(causal, window) for _, window in d.masks]
    d.s0, d.own_embed, d.own_head = 1, False, False
    d.softcap, d.multiplier = dice.one(None, 12.0), dice.one(1.0, 0.5)
    d.scale = dice.one(1.0, 1.0, 0.7)
    extra = {"final_logit_softcapping": d.softcap, "output_multiplier": d.multiplier}
    extra |= {"input_embedding_scale": d.scale} if d.scale != 1 else {}
    nested = {"mask_token_id": d.mask, "target_layer_ids": d.taps}
    inside = dice.maybe()
    if dice.maybe():
        config.pop("rope_theta", None)
        told = {"rope_type": "yarn"} | _yarn(d, dice, theta)
        config |= dice.one(
            {"rope_parameters": told | {"rope_theta": theta}},
            {"rope_parameters": None, "rope_theta": theta, "rope_scaling": told},
        )
    return config | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_target_layers": 10,
        "layer_types": kinds,
        "sliding_window": width,
        "is_causal": causal,
        "block_size": None if inside else d.B,
        "dflash_config": nested | ({"block_size": d.B} if inside else {}) | (extra if dice.maybe() else {}),
        **extra,
    }


def _dflash2(d: Drawn, dice: Dice) -> dict[str, Any]:
    config = _dflash(d, dice)
    d.selector, d.conv = (dice.one(4, 8), dice.one(2, 8, 16)), (dice.one(2, 3), dice.one(2, 4, 8))
    own = {"selector_rank": d.selector[0], "selector_top_k": d.selector[1]}
    own |= {"conv_kernel_size": d.conv[0], "conv_group_size": d.conv[1]}
    return config | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": config["dflash_config"] | own,
    }


def _speculators(d: Drawn, dice: Dice) -> dict[str, Any]:
    theta = _theta(dice)
    inner = _backbone(d, dice, theta) | {"model_type": "qwen3"}
    if dice.maybe() or theta == 1e6:
        inner.pop("rope_theta", None)
        plain = {"rope_type": "default", "rope_theta": theta}
        inner["rope_parameters"] = dice.one(plain, {FULL: plain, SLIDING: plain})
    algorithm = dice.one("dspark", "dspark", "dflash")
    heads = _markov(d, dice) if algorithm == "dspark" else {}
    d.own_embed, d.own_head, d.sinks = dice.maybe(), dice.maybe(), dice.one(False, False, True)
    slides, ahead = dice.maybe(), dice.maybe()
    kinds, width = _window(d, dice, causal=not ahead)
    inner |= {"layer_types": kinds, "sliding_window": width, "use_sliding_window": slides}
    if not slides:
        d.masks = [(False, None)] * d.layers
    told: dict[str, Any] = {"algorithm": algorithm}
    d.s0 = dice.between(0, 1)
    if algorithm == "dspark" and dice.maybe():
        told["proposal_methods"] = [{"proposal_type": "greedy", "speculative_tokens": d.B - d.s0}]
        slots = dice.one({}, {"sample_from_anchor": d.s0 == 0})
    else:
        slots = {"sample_from_anchor": d.s0 == 0}
    if dice.maybe():
        d.own_head, d.Vd = True, dice.between(50, 150)
        d.ids = sorted(map(int, dice.rng.choice(d.V, d.Vd, replace=False)))
    return (
        heads
        | slots
        | {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": algorithm,
            "speculators_config": told,
            "transformer_layer_config": inner,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in d.taps],
            "block_size": d.B,
            "mask_token_id": d.mask,
            "draft_vocab_size": dice.one(None, d.Vd),
            "sliding_window_non_causal": ahead,
            "attention_sink_bias": True if d.sinks else None,
        }
    )


def _specforge(d: Drawn, dice: Dice) -> dict[str, Any]:
    theta = _theta(dice)
    config = _backbone(d, dice, theta)
    kinds, width = _window(d, dice, causal=True)
    heads = _markov(d, dice)
    d.own_embed = d.own_head = False
    if dice.maybe():
        config.pop("rope_theta", None)
        told = {"rope_type": "yarn"} | _yarn(d, dice, theta)
        config["rope_parameters"] = told | {"rope_theta": theta}
    section = {"projector_type": "dspark", "target_layer_ids": d.taps, "mask_token_id": d.mask} | heads
    section["attention_mode"] = "mha" if d.kv == d.heads else "gqa"
    return config | {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "num_target_layers": 10,
        "layer_types": kinds,
        "sliding_window": width,
        "block_size": d.B,
        "dflash_config": section,
    }


def _nemotron(d: Drawn, dice: Dice) -> dict[str, Any]:
    config = _backbone(d, dice, 1e4) | _markov(d, dice, ("vanilla",))
    config.pop("enable_confidence_head" if not d.confidence else "hidden_act")
    config["dspark_markov_rank" if dice.maybe() else "markov_rank"] = config.pop("markov_rank")
    config.pop("markov_head_type")
    width, d.sinks, d.s0 = dice.between(3, 30), dice.maybe(), dice.between(0, 1)
    d.own_embed, d.own_head = True, False
    d.masks = [(True, width)] * d.layers
    aux = {"eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in d.taps]}
    return config | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "layer_types": [SLIDING] * d.layers,
        "dflash_config": {"use_swa": True, "swa_window_size": width, "causal": True},
        "dflash_query_causal": dice.one(True, None),
        "attention_sink_bias": True if d.sinks else None,
        "dspark_fixup_head_type": "markov",
        "dspark_bonus_anchor": d.s0 == 1,
        "sample_from_anchor": d.s0 == 0,
        "block_size": d.B,
        "mask_token_id": d.mask,
        **dice.one(aux, {"target_layer_ids": d.taps}, aux | {"target_layer_ids": d.taps}),
    }


def _qwen35(d: Drawn, dice: Dice) -> dict[str, Any]:
    theta = _theta(dice)
    config = _backbone(d, dice, theta) | _markov(d, dice) | _tables(d, dice)
    native, share = dice.maybe(), dice.one(0.25, 0.5, 1.0)
    d.offset, d.gated = (1.0, dice.maybe()) if native else (0.0, True)
    dims = int(d.hd * share)
    d.rotations = [(i, i + dims // 2, theta ** (-2 * i / dims)) for i in range(dims // 2)]
    return config | {
        "architectures": ["Qwen35DSparkModel" if native else "Qwen3DSparkModel"],
        "model_type": "qwen3_5" if native else "qwen3",
        "enable_qwen35_gated_q_proj": d.gated,
        "partial_rotary_factor": share,
        "confidence_temperatures": [1.0] * d.B,
        "block_size": d.B,
        "mask_token_id": d.mask,
        "target_layer_ids": d.taps,
    }


def _lfm2(d: Drawn, dice: Dice) -> dict[str, Any]:
    theta = _theta(dice)
    config = _backbone(d, dice, theta) | _markov(d, dice)
    d.own_embed = d.own_head = False
    near = dice.maybe()
    if near:
        d.rotations = [(2 * i, 2 * i + 1, theta ** (-2 * i / d.hd)) for i in range(d.hd // 2)]
    return config | {
        "architectures": ["Lfm2DSparkDraftModel"],
        "model_type": dice.one("lfm2", "qwen3"),
        "rope_is_neox_style": False if near else dice.one(True, None),
        "block_size": d.B,
        "dflash_config": {
            "target_layer_ids": d.taps,
            "mask_token_id": d.mask,
            "num_target_layers": 10,
        },
    }


def _prism(d: Drawn, dice: Dice) -> dict[str, Any]:
    config = _deepspec(d, dice)
    d.noise = True
    return config | {"log_snr_conditioning": True, "min_log_snr": -9.0, "max_log_snr": dice.one(9.0, 3)}


PACKAGINGS: dict[str, Callable[[Drawn, Dice], dict[str, Any]]] = {
    "deepspec": _deepspec,
    "gemma4": _gemma4,
    "dflash": _dflash,
    "dflash2": _dflash2,
    "speculators": _speculators,
    "specforge": _specforge,
    "nemotron": _nemotron,
    "qwen35": _qwen35,
    "lfm2": _lfm2,
    "prism": _prism,
}


# weights -------------------------------------------------------------------------------------------------


def _shapes(d: Drawn) -> dict[str, tuple[int, ...]]:
    q, kv = d.heads * d.hd, d.kv * d.hd
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (d.H, len(d.taps) * d.H)}
    norms = {"hidden_norm.weight": d.H, "norm.weight": d.H}
    for layer in range(d.layers):
        at = f"layers.{layer}."
        sides = {"q": (q * (1 + d.gated), d.H), "k": (kv, d.H), "v": (kv, d.H), "o": (d.H, q)}
        if d.shares:
            del sides["v"]
        for name, shape in sides.items():
            shapes[f"{at}self_attn.{name}_proj.weight"] = shape
            if d.bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = shape[:1]
        shapes |= {f"{at}mlp.{name}_proj.weight": (d.wide, d.H) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (d.H, d.wide)
        norms |= {f"{at}self_attn.{name}_norm.weight": d.hd for name in "qk"}
        norms |= {f"{at}{name}_layernorm.weight": d.H for name in ("input", "post_attention")}
        if d.gemma:
            norms |= {f"{at}{name}_feedforward_layernorm.weight": d.H for name in ("pre", "post")}
            norms[f"{at}layer_scalar"] = 1
        if d.sinks:
            shapes[f"{at}self_attn.attention_sink_bias"] = (d.heads,)
        if d.conv is not None:
            taps, group = d.conv
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{at}{name}.base_kernel"] = (2, taps, d.H)
                shapes[f"{at}{name}.kernel_projection.weight"] = (2 * taps * (d.H // group), d.H)
    return shapes | {name: (size,) for name, size in norms.items()} | _head_shapes(d)


def _head_shapes(d: Drawn) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if d.own_embed:
        shapes["embed_tokens.weight"] = (d.V, d.H)
    if d.own_head:
        shapes["lm_head.weight"] = (d.Vd, d.H)
    if d.rank:
        shapes["markov_head.markov_w1.weight"] = (d.V, d.rank)
        shapes["markov_head.markov_w2.weight"] = (d.Vd, d.rank)
    if d.markov == "gated":
        shapes["markov_head.gate_proj.weight"] = (d.rank, d.H + d.rank)
        shapes["markov_head.gate_proj.bias"] = (d.rank,)
    if d.markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * d.rank, 2 * d.rank + d.H)
        shapes["markov_head.joint_proj.bias"] = (3 * d.rank,)
    if d.confidence:
        shapes["confidence_head.proj.weight"] = (1, d.H + d.rank * d.conf_markov)
        shapes["confidence_head.proj.bias"] = (1,)
    if d.noise:
        shapes |= {"log_snr_embed.fc1.weight": (d.H, 128), "log_snr_embed.fc2.weight": (d.H, d.H)}
        shapes |= {f"log_snr_embed.{name}.bias": (d.H,) for name in ("fc1", "fc2")}
    if d.selector is not None:
        rank = d.selector[0]
        shapes |= {
            f"candidate_selector.{name}_codebook": (d.V, rank) for name in ("predecessor", "successor")
        }
        shapes["candidate_selector.hidden_projection.weight"] = (rank, d.H)
    return shapes


def _fill(d: Drawn, dice: Dice) -> None:
    kind = dice.one(mx.float32, mx.bfloat16, mx.float16)
    for name, shape in _shapes(d).items():
        scale = (
            1.0 if "embed_tokens" in name or "codebook" in name or "markov_w" in name else shape[-1] ** -0.5
        )
        value = dice.rng.normal(size=shape) * scale
        if "norm.weight" in name or "scalar" in name:
            value = 1 - d.offset + 0.2 * dice.rng.normal(size=shape)
        stored = mx.array(value.astype(np.float32)).astype(kind)
        d.W[name] = np.array(stored.astype(mx.float32)).astype(np.float64)
    d.kind = kind


def _write(folder: Path, config: dict[str, Any], d: Drawn, dice: Dice) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: mx.array(value.astype(np.float32)).astype(d.kind) for name, value in d.W.items()}
    if d.ids is not None:
        weights["d2t"] = mx.array(np.array(d.ids) - np.arange(d.Vd), dtype=mx.int64)
        if dice.maybe():
            weights["t2d"] = mx.array(np.isin(np.arange(d.V), d.ids).tolist())
    if dice.maybe():
        weights = {f"model.{name}": weight for name, weight in weights.items()}
    names = sorted(weights)
    shards = dice.between(1, 3)
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return
    placed: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in names[shard::shards]})
        placed |= dict.fromkeys(names[shard::shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
