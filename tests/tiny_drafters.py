"""Tiny random drafter checkpoints in the published layouts, the same for the same seed.

    save_tiny_dspark(folder, hidden=64, vocab=384, target_layers=2)
    save_tiny_dspark(folder, backbone="gemma4", markov="rnn", own_head=False, draft_vocab=None)
    save_tiny_dflash(folder, sliding=(0,), sliding_window=8)

Every further keyword is a config.json key that overrides what the factory writes; None writes null.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

HEADS, KV_HEADS, HEAD_DIM, WIDE, RANK = 4, 2, 16, 128, 16
Shapes = dict[str, tuple[int, ...]]


def save_tiny_dspark(
    folder: Path,
    *,
    hidden: int = 64,
    vocab: int = 384,
    target_layers: int = 2,
    taps: Sequence[int] | None = None,
    layers: int = 2,
    block_size: int = 7,
    backbone: str = "qwen3",
    markov: str = "vanilla",
    confidence: bool = True,
    confidence_with_markov: bool = True,
    own_embedding: bool = True,
    own_head: bool = True,
    draft_vocab: int | None = None,
    values_from_keys: bool = True,
    bias: bool = False,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    **overrides: Any,
) -> Path:
    """A DeepSpec-native DSpark head; `markov` is none, vanilla, gated or rnn. Returns `folder`."""
    taps = _default_taps(target_layers) if taps is None else taps
    gemma4, rank = backbone == "gemma4", 0 if markov == "none" else RANK
    shares = gemma4 and values_from_keys
    config = _common_config(hidden, vocab, target_layers, layers) | {
        "architectures": ["Gemma4DSparkModel" if gemma4 else "Qwen3DSparkModel"],
        "model_type": "gemma4_text" if gemma4 else "qwen3",
        "attention_bias": bias,
        "block_size": block_size,
        "mask_token_id": vocab - 1,
        "target_layer_ids": list(taps),
        "markov_rank": rank,
        "markov_head_type": markov if rank else "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence_with_markov and rank > 0,
    }
    if gemma4:
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        config |= {
            "rope_parameters": {"full_attention": full},
            "attention_k_eq_v": values_from_keys,
            "num_global_key_value_heads": 1,
            "global_head_dim": HEAD_DIM,
        }
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
    kv_heads = 1 if shares else KV_HEADS
    shapes = _backbone_shapes(hidden, layers, len(taps), kv_heads, gemma4, shares, bias)
    shapes |= _head_shapes(config, own_embedding, own_head, draft_vocab or vocab)
    weights = _random(shapes, seed, dtype)
    if draft_vocab is not None and draft_vocab < vocab:
        weights |= _reduced_vocabulary(vocab, draft_vocab, seed)
    return _save(folder, config | overrides, weights)


def save_tiny_dflash(
    folder: Path,
    *,
    hidden: int = 64,
    vocab: int = 384,
    target_layers: int = 2,
    taps: Sequence[int] | None = None,
    layers: int = 2,
    block_size: int = 8,
    sliding: Sequence[int] = (),
    sliding_window: int = 8,
    bias: bool = False,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    **overrides: Any,
) -> Path:
    """A z-lab DFlash head; `sliding` lists the layers with a window. Returns `folder`."""
    taps = _default_taps(target_layers) if taps is None else taps
    kinds = ["sliding_attention" if layer in sliding else "full_attention" for layer in range(layers)]
    config = _common_config(hidden, vocab, target_layers, layers) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": bias,
        "block_size": block_size,
        "layer_types": kinds,
        "sliding_window": sliding_window if sliding else None,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": list(taps)},
    }
    shapes = _backbone_shapes(hidden, layers, len(taps), KV_HEADS, False, False, bias)
    return _save(folder, config | overrides, _random(shapes, seed, dtype))


def _default_taps(target_layers: int) -> tuple[int, ...]:
    return (-1, 0) if target_layers == 1 else (0, target_layers - 1)


def _common_config(hidden: int, vocab: int, target_layers: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "vocab_size": vocab,
        "intermediate_size": WIDE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_target_layers": target_layers,
        "tie_word_embeddings": False,
    }


def _backbone_shapes(
    hidden: int, layers: int, taps: int, kv_heads: int, gemma4: bool, shares: bool, bias: bool
) -> Shapes:
    queries, keys = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    linear = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    if shares:
        del linear["v"]
    layer: Shapes = {f"self_attn.{name}_proj.weight": shape for name, shape in linear.items()}
    if bias:
        layer |= {f"self_attn.{name}_proj.bias": (shape[0],) for name, shape in linear.items()}
    layer |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    layer |= {f"mlp.{name}_proj.weight": (WIDE, hidden) for name in ("gate", "up")}
    layer["mlp.down_proj.weight"] = (hidden, WIDE)
    norms = ["input", "post_attention"]
    if gemma4:
        norms += ["pre_feedforward", "post_feedforward"]
        layer["layer_scalar"] = (1,)
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in norms}
    shapes: Shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,)}
    shapes["norm.weight"] = (hidden,)
    for index in range(layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _head_shapes(config: dict[str, Any], own_embedding: bool, own_head: bool, draft_vocab: int) -> Shapes:
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    shapes: Shapes = {}
    if own_embedding:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if own_head:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (draft_vocab, rank)
    if rank and config["markov_head_type"] == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if rank and config["markov_head_type"] == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config["enable_confidence_head"]:
        width = hidden + (rank if config["confidence_head_with_markov"] else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def _random(shapes: Shapes, seed: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Norms near one, biases near zero, tables of unit rows, and matrices that keep a vector's size."""
    weights = {}
    for key, (name, shape) in zip(
        mx.random.split(mx.random.key(seed), len(shapes)), shapes.items(), strict=True
    ):
        noise = mx.random.normal(shape, key=key)
        if name.endswith(".bias"):
            weight = 0.1 * noise
        elif len(shape) == 1:
            weight = 1.0 + 0.1 * noise
        elif "markov_w1" in name or "embed_tokens" in name:
            weight = noise
        else:
            weight = noise * (1.5 / shape[-1] ** 0.5)
        weights[name] = weight.astype(dtype)
    return weights


def _reduced_vocabulary(vocab: int, draft_vocab: int, seed: int) -> dict[str, mx.array]:
    chosen = mx.sort(mx.random.permutation(vocab, key=mx.random.key(seed + 1))[:draft_vocab]).astype(mx.int64)
    held = (mx.arange(vocab)[:, None] == chosen[None]).any(axis=1)
    return {"d2t": chosen - mx.arange(draft_vocab, dtype=mx.int64), "t2d": held}


def _save(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder
