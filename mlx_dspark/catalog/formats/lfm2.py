"""DSpark heads for LFM2: DeepSpec's keys with the slots' own inside `dflash_config`, and a rotary embedding
that may pair neighbouring dimensions (drafter-formats section 8.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlx_dspark.catalog.formats import deepspec, markers
from mlx_dspark.catalog.formats.base import DrafterCheckpoint, without_prefix
from mlx_dspark.catalog.formats.fields import Fields

PACKAGING = "LFM2"
NESTED = (
    "target_layer_ids",
    "mask_token_id",
    "num_target_layers",
    "block_size",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    markers.INTERLEAVED,
)
"""Keys of DeepSpec that may be in `dflash_config`; what is on top comes first."""

claims = markers.lfm2


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor."""
    weights = without_prefix(weights)
    nested = config.section("dflash_config").values
    flat = {key: nested[key] for key in NESTED if key in nested} | config.values
    if "lfm2" in config.text("model_type", "lfm2"):
        flat["model_type"] = "qwen3"
    flat.pop("architectures", None)
    fields = Fields(flat, config.file)
    translated = deepspec.translate(fields, weights)
    if not fields.flag(markers.INTERLEAVED, True):
        translated = replace(translated, rope_kind="interleaved")
    return deepspec.checked(PACKAGING, fields, translated, weights, files)
