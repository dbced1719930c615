"""SpecForge's DSpark heads, as SGLang serves them: a Qwen3 config whose drafting keys are in `dflash_config`
(drafter-formats section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dspark.catalog.formats import deepspec, markers, rope, shared, zlab
from mlx_dspark.catalog.formats.base import DrafterCheckpoint, without_prefix
from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.foundation.errors import BadCheckpoint

PACKAGING = "SpecForge"
SECTION = "dflash_config"
EITHER_PLACE = (
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
    "attention_mode",
)
"""Keys that are read from `dflash_config` first, then from the top level."""

OLD_PREFIX = "logit_head."
DOMINO = ("prefix_gru", "embed_proj")

claims = markers.specforge


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor."""
    weights = _renamed(config, without_prefix(weights))
    flat = _flat(config, weights)
    translated = deepspec.translate(flat, weights)
    rotary = rope.declared(flat, shared.layer_types(flat, translated.layers))
    translated = replace(
        translated, rope_theta=rotary.theta, rope_kind=rotary.kind, rope_options=rotary.options
    )
    if translated.markov == "none" and zlab.ARCHITECTURE in config.texts("architectures"):
        config.bad(
            "projector_type", f"is dspark, and the head is a {zlab.ARCHITECTURE} without a Markov head"
        )
    _check_attention_mode(flat, translated.heads, translated.kv_heads)
    return deepspec.checked(PACKAGING, flat, translated, weights, files)


def _renamed(config: Fields, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Old exports keep the heads under `logit_head.`"""
    renamed = {name.removeprefix(OLD_PREFIX): weight for name, weight in weights.items()}
    if domino := [name for name in renamed if name.startswith(DOMINO)]:
        shared.unsupported(config, "projector_type", f"a Domino head ({domino[0]})")
    if len(renamed) < len(weights):
        twice = next(name for name in renamed if OLD_PREFIX + name in weights and name in weights)
        raise BadCheckpoint(
            f"{config.file.parent} holds both {twice} and {OLD_PREFIX}{twice}, which are the same tensor.",
            "Download the drafter again.",
            field=twice,
        )
    return renamed


def _flat(config: Fields, weights: Mapping[str, mx.array]) -> Fields:
    """The same head in DeepSpec's keys."""
    nested = config.section(SECTION).values
    flat: dict[str, Any] = config.values | {key: nested[key] for key in EITHER_PLACE if key in nested}
    fields = Fields(flat, config.file)
    fields.require((*shared.BACKBONE_KEYS, "block_size", "mask_token_id"))
    layers = fields.whole("num_hidden_layers", high=shared.MOST_LAYERS)
    flat["target_layer_ids"] = list(zlab.taps(fields, layers, shared.target_layers(fields)))
    flat |= _heads(fields, weights)
    return Fields(flat, config.file)


def _heads(fields: Fields, weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """Keys that are left out follow the tensors."""
    found: dict[str, Any] = {}
    table = weights.get("markov_head.markov_w1.weight")
    if "markov_rank" not in fields and table is not None and table.ndim == 2:
        found["markov_rank"] = table.shape[1]
    if "enable_confidence_head" not in fields and "confidence_head_alpha" in fields:
        found["enable_confidence_head"] = fields.number("confidence_head_alpha", 0.0, above=-1.0, low=0.0) > 0
    proj = weights.get("confidence_head.proj.weight")
    if "confidence_head_with_markov" not in fields:
        found["confidence_head_with_markov"] = (
            proj is not None and proj.ndim == 2 and proj.shape[1] > fields.whole("hidden_size")
        )
    return found


def _check_attention_mode(flat: Fields, heads: int, kv_heads: int) -> None:
    mode = flat.text("attention_mode", "gqa" if kv_heads < heads else "mha")
    if mode not in ("gqa", "mha"):
        shared.unsupported(flat, "attention_mode", f"attention_mode {mode!r}")
    if (mode == "gqa") != (kv_heads < heads):
        flat.bad("attention_mode", f"is {mode!r}, with {kv_heads} key-value heads for {heads}")
