"""NVIDIA's DSpark heads for Nemotron: DeepSpec's keys with causal windows, attention sinks and an anchor slot
that may be silent (drafter-formats section 8.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dspark.catalog.formats import deepspec, markers, shared
from mlx_dspark.catalog.formats.base import DrafterCheckpoint, without_prefix
from mlx_dspark.catalog.formats.fields import Fields

PACKAGING = "Nemotron"
AUX_TAPS = "eagle_aux_hidden_state_layer_ids"
CAUSAL_KEYS = ("dflash_query_causal", "causal")

claims = markers.nvidia


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor."""
    weights = without_prefix(weights)
    flat = _flat(config)
    translated = deepspec.translate(flat, weights)
    causal = _causal(flat)
    if causal is not None:
        translated = replace(translated, layer_causal=(causal,) * translated.layers)
    translated = replace(translated, sinks=shared.sinks(flat, weights))
    return deepspec.checked(PACKAGING, flat, translated, weights, files)


def _flat(config: Fields) -> Fields:
    """The same head in DeepSpec's keys. What is on top comes before what is in `dflash_config`."""
    fields = Fields(config.section("dflash_config").values | config.values, config.file)
    flat: dict[str, Any] = dict(fields.values)
    if "target_layer_ids" not in fields and AUX_TAPS in fields:
        flat["target_layer_ids"] = [each - 1 for each in fields.wholes(AUX_TAPS)]
    if "markov_rank" not in fields and "dspark_markov_rank" in fields:
        flat["markov_rank"] = fields.values["dspark_markov_rank"]
    if fields.text("dspark_fixup_head_type", "markov") != "markov":
        kind = fields.values["dspark_fixup_head_type"]
        shared.unsupported(config, "dspark_fixup_head_type", f"dspark_fixup_head_type {kind!r}")
    _first_slot(fields, flat)
    _window(fields, flat)
    return Fields(flat, config.file)


def _first_slot(fields: Fields, flat: dict[str, Any]) -> None:
    """A bonus anchor is a slot that drafts nothing."""
    if "dspark_bonus_anchor" not in fields:
        return
    drafts = not fields.flag("dspark_bonus_anchor", False)
    if fields.flag("sample_from_anchor", drafts) != drafts:
        fields.bad("sample_from_anchor", f"is {not drafts}, and dspark_bonus_anchor is the same")
    flat["sample_from_anchor"] = drafts


def _window(fields: Fields, flat: dict[str, Any]) -> None:
    """The window is `sliding_window`, or `swa_window_size` where `use_swa` is true. Every layer has it unless
    `layer_types` tells."""
    slides = fields.flag("use_swa", "sliding_window" in fields)
    if "sliding_window" not in fields and slides:
        flat["sliding_window"] = fields.whole("swa_window_size")
    if "layer_types" not in fields and slides:
        layers = fields.whole("num_hidden_layers", high=shared.MOST_LAYERS)
        flat["layer_types"] = [shared.SLIDING] * layers


def _causal(flat: Fields) -> bool | None:
    """What is said of every layer, if anything is."""
    said = {flat.flag(key, False) for key in CAUSAL_KEYS if key in flat}
    if len(said) > 1:
        flat.bad("dflash_query_causal", "and causal in dflash_config say different things")
    return next(iter(said), None)
