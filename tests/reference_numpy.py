"""DSpark heads in float32 numpy, written from drafter-formats: sections 0, 1.4, 1.5, 7.5, 8.1, 8.3 and 8.5.

It reads config.json and the tensors as they are published, not as our adapters translate them, and shares no
code with the package. One block after a context, whole and without a cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

F = NDArray[np.float32]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Block:
    """`hidden` `[block, hidden]`, the rest by draft."""

    hidden: F
    base_logits: F
    logits: F
    tokens: list[int]
    confidence_logits: F | None


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, F]]:
    """config.json, and the tensors in float32, those in NVFP4 decoded."""
    config = json.loads((folder / "config.json").read_text())
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    raw = {name: np.array(w if w.dtype == mx.uint8 else w.astype(mx.float32)) for name, w in loaded.items()}
    for name in [name.removesuffix("_scale") for name in raw if name.endswith(".weight_scale")]:
        raw[name] = nvfp4(raw[name], raw.pop(f"{name}_scale"), float(raw.pop(f"{name}_scale_2").ravel()[0]))
    return config, raw


def nvfp4(codes: NDArray[np.uint8], scales: NDArray[np.uint8], scale_2: float) -> F:
    """Element by element."""
    out = np.zeros((codes.shape[0], codes.shape[1] * 2), np.float32)
    for row, column in np.ndindex(*out.shape):
        byte = int(codes[row, column // 2])
        nibble = byte >> 4 if column % 2 else byte & 15
        value = E2M1[nibble & 7] * (-1 if nibble & 8 else 1)
        out[row, column] = np.float32(value * e4m3(int(scales[row, column // 16]))) * np.float32(scale_2)
    return out


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


class Head:
    """One published head. `lent` are the target's embedding and head, for what it does not own."""

    def __init__(self, folder: Path, lent: tuple[F, F]) -> None:
        config, self.w = read_folder(folder)
        self.config = config | config.get("dflash_config", {})
        self.gemma4 = "gemma4" in config["model_type"]
        self.native = config["model_type"] == "qwen3_5"
        self.gated = bool(config.get("enable_qwen35_gated_q_proj"))
        self.eps = config["rms_norm_eps"]
        self.heads, self.width = config["num_attention_heads"], config["head_dim"]
        if self.gemma4:
            self.width = config["global_head_dim"]
        self.embed = self.w.get("embed_tokens.weight", lent[0])
        self.head = self.w.get("lm_head.weight", lent[1])

    def draft(self, features: F, anchor: int) -> Block:
        c = self.config
        ids = [anchor] + [c["mask_token_id"]] * (c["block_size"] - 1)
        h = self.embed[ids]
        if self.gemma4:
            h = h * np.float32(np.sqrt(c["hidden_size"]))
        if c.get("log_snr_conditioning"):
            h = h + self._noise(len(ids))
        context = self._norm(features @ self.w["fc.weight"].T, "hidden_norm")
        for layer in range(c["num_hidden_layers"]):
            h = self._layer(f"layers.{layer}.", h, context)
        return self._read(self._norm(h, "norm"), anchor)

    def _noise(self, slots: int) -> F:
        low, high = self.config["min_log_snr"], self.config["max_log_snr"]
        rows = []
        for slot in range(slots):
            t = ((high if slot == 0 else low) - low) / (high - low) * 1000
            angles = np.array([t * 10000 ** (-i / 64) for i in range(64)])
            feat = np.concatenate([np.sin(angles), np.cos(angles)]).astype(np.float32)
            x = self.w["log_snr_embed.fc1.weight"] @ feat + self.w["log_snr_embed.fc1.bias"]
            x = x / (1 + np.exp(-x))
            rows.append(self.w["log_snr_embed.fc2.weight"] @ x + self.w["log_snr_embed.fc2.bias"])
        return np.stack(rows)

    def _norm(self, x: F, name: str | None) -> F:
        y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.eps))
        if name is None:
            return y
        return y * (self.w[f"{name}.weight"] + np.float32(self.native))

    def _layer(self, at: str, h: F, context: F) -> F:
        attended = self._attention(at + "self_attn.", self._norm(h, at + "input_layernorm"), context)
        if not self.gemma4:
            h = h + attended
            return h + self._mlp(at, self._norm(h, at + "post_attention_layernorm"))
        h = h + self._norm(attended, at + "post_attention_layernorm")
        wide = self._mlp(at, self._norm(h, at + "pre_feedforward_layernorm"))
        return (h + self._norm(wide, at + "post_feedforward_layernorm")) * self.w[at + "layer_scalar"]

    def _mlp(self, at: str, x: F) -> F:
        gate, up = (x @ self.w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        if self.gemma4:
            active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            active = gate / (1 + np.exp(-gate))
        return ((active * up) @ self.w[at + "mlp.down_proj.weight"].T).astype(np.float32)

    def _attention(self, at: str, x: F, context: F) -> F:
        both, start = np.concatenate([context, x]), len(context)
        q = (x @ self.w[at + "q_proj.weight"].T).reshape(len(x), self.heads, -1)
        gate = None
        if self.gated:
            q, gate = q[..., : self.width], q[..., self.width :]
        raw = (both @ self.w[at + "k_proj.weight"].T).reshape(len(both), -1, self.width)
        v = raw
        if not (self.gemma4 and self.config.get("attention_k_eq_v", True)):
            v = (both @ self.w[at + "v_proj.weight"].T).reshape(raw.shape)
        if self.gemma4:
            v = self._norm(v, None)
        q, k = self._norm(q, at + "q_norm"), self._norm(raw, at + "k_norm")
        q = np.stack([self._rotated(row, start + i) for i, row in enumerate(q)])
        k = np.stack([self._rotated(row, i) for i, row in enumerate(k)])
        out = np.zeros_like(q)
        for head in range(self.heads):
            shared = head // (self.heads // k.shape[1])
            scores = q[:, head] @ k[:, shared].T * (1.0 if self.gemma4 else self.width**-0.5)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ v[:, shared]
        if gate is not None:
            out = out / (1 + np.exp(-gate))
        return (out.reshape(len(x), -1) @ self.w[at + "o_proj.weight"].T).astype(np.float32)

    def _rotated(self, heads: F, position: int) -> F:
        """`[heads, width]` at one position."""
        ropes = self.config.get("rope_parameters") or {}
        out, pairs = heads.astype(np.float64), []
        if self.gemma4:
            full = ropes["full_attention"]
            turning = int(full["partial_rotary_factor"] * self.width) // 2
            pairs = [
                (i, i + self.width // 2, full["rope_theta"] ** (-2 * i / self.width)) for i in range(turning)
            ]
        else:
            theta, dims = ropes["rope_theta"], self.width
            if self.native or self.gated:
                dims = int(self.width * self.config["partial_rotary_factor"])
            near = self.config.get("rope_is_neox_style") is False
            for i in range(dims // 2):
                pair = (2 * i, 2 * i + 1) if near else (i, i + dims // 2)
                pairs.append((*pair, theta ** (-2 * i / dims)))
        for left, right, frequency in pairs:
            cos, sin = np.cos(position * frequency), np.sin(position * frequency)
            a, b = out[:, left].copy(), out[:, right].copy()
            out[:, left], out[:, right] = a * cos - b * sin, b * cos + a * sin
        return out.astype(np.float32)

    def _read(self, z: F, anchor: int) -> Block:
        cap = self.config.get("final_logit_softcapping", 30.0 if self.gemma4 else None)
        base = z @ self.head.T
        base = cap * np.tanh(base / cap) if cap else base
        w1, w2 = (self.w.get(f"markov_head.markov_w{n}.weight") for n in (1, 2))
        previous, logits, tokens, confidences = anchor, [], [], []
        for slot, row in enumerate(base):
            part = np.zeros(0, np.float32)
            if w1 is not None and w2 is not None:
                part = w1[previous]
                row = row + w2 @ part
            logits.append(row)
            if "confidence_head.proj.weight" in self.w:
                joined = np.concatenate([z[slot], part])
                proj = self.w["confidence_head.proj.weight"][0] @ joined
                confidences.append(proj + self.w["confidence_head.proj.bias"][0])
            previous = int(np.argmax(row))
            tokens.append(previous)
        confidence = np.array(confidences, np.float32) if confidences else None
        return Block(z, base.astype(np.float32), np.stack(logits), tokens, confidence)
