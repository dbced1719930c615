"""Tiny random DFlash 2 checkpoints in the published layout, the same for the same seed.

    save_tiny_dflash2(folder, sliding=(0, 1), sliding_window=8, is_causal=False)

Every further keyword is one of `save_tiny_dflash`, or a config.json key.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.tiny_drafters import save_tiny_dflash


def save_tiny_dflash2(
    folder: Path,
    *,
    rank: int = 12,
    top_k: int = 4,
    taps_of_convolution: int = 2,
    group: int = 4,
    section: dict[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> Path:
    """A head with selector and convolutions; `section` overrides keys of `dflash_config`.

    Returns `folder`.
    """
    named: dict[str, Any] = {"architectures": ["DFlash2DraftModel"]}
    save_tiny_dflash(folder, seed=seed, **named | options)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(config["dflash_config"], dict):
        config["dflash_config"] |= {
            "selector_rank": rank,
            "selector_top_k": top_k,
            "conv_kernel_size": taps_of_convolution,
            "conv_group_size": group,
        } | (section or {})
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.eval(weights)
    weights |= _second_half(weights, config["vocab_size"], rank, taps_of_convolution, group, seed)
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _second_half(
    first: dict[str, mx.array], vocab: int, rank: int, taps: int, group: int, seed: int
) -> dict[str, mx.array]:
    """Convolutions that matter about as much as what they convolve, and a selector that decides."""
    hidden = first["norm.weight"].shape[0]
    layers = sum(name.endswith("input_layernorm.weight") for name in first)
    keys = iter(mx.random.split(mx.random.key(seed + 77), 4 * layers + 3))
    weights = {}

    def normal(scale: float, *shape: int) -> mx.array:
        return (scale * mx.random.normal(shape, key=next(keys))).astype(first["norm.weight"].dtype)

    for layer in range(layers):
        for name in ("attention_conv", "mlp_conv"):
            prefix = f"layers.{layer}.{name}."
            weights[f"{prefix}base_kernel"] = normal(0.7, 2, taps, hidden)
            coefficients = 2 * taps * (hidden // group)
            weights[f"{prefix}kernel_projection.weight"] = normal(0.5 / hidden**0.5, coefficients, hidden)
    prefix = "candidate_selector."
    weights[f"{prefix}predecessor_codebook"] = normal(1.0, vocab, rank)
    weights[f"{prefix}successor_codebook"] = normal(1.0, vocab, rank)
    weights[f"{prefix}hidden_projection.weight"] = normal(1.0 / hidden**0.5, rank, hidden)
    return weights
