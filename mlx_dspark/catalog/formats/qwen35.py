"""DSpark heads in Qwen 3.5's own style: DeepSpec's keys with norms stored as offsets, gated queries and a
partial rotary embedding (drafter-formats section 8.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlx_dspark.catalog.formats import deepspec, markers
from mlx_dspark.catalog.formats.base import DrafterCheckpoint, without_prefix
from mlx_dspark.catalog.formats.fields import Fields

PACKAGING = "Qwen 3.5 native"
NORMS = ("_layernorm.weight", "_norm.weight")

claims = markers.qwen35


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor.

    Each mark counts by itself: `model_type` for the norms, the gate's flag for the queries.
    """
    weights = without_prefix(weights)
    translated = deepspec.translate(config, weights)
    gated = config.flag(markers.GATED, False)
    translated = replace(translated, gated=gated, **_rope(config, translated.head_dim))
    checkpoint = deepspec.checked(PACKAGING, config, translated, weights, files)
    if config.text("model_type", "") != markers.NATIVE:
        return checkpoint
    return replace(checkpoint, weights={name: _whole(name, w) for name, w in checkpoint.weights.items()})


def _whole(name: str, weight: mx.array) -> mx.array:
    """The weight of a norm, which is stored less one; in float32, since it may not fit the stored type."""
    is_norm = name == "norm.weight" or name.endswith(NORMS)
    return weight.astype(mx.float32) + 1.0 if is_norm else weight


def _rope(config: Fields, head_dim: int) -> dict[str, object]:
    """The part of a head that rotates: `partial_rotary_factor`, on top or in `rope_parameters`."""
    name, nested = "partial_rotary_factor", config.section("rope_parameters")
    place = config if name in config else nested
    place.require([name])
    share = place.number(name, 1.0, high=1.0)
    dims = int(head_dim * share)
    if dims < 2 or dims % 2:
        place.bad(name, f"is {share:g}, which rotates {dims} of {head_dim} dimensions, not an even number")
    if dims == head_dim:
        return {}
    return {"rope_kind": "partial", "rope_options": {name: share}}
