"""Keys of drafters where the packaging at hand does not read them: they must say what was read elsewhere.

A mask, a slot or a scale that is written and ignored costs no error and most of the accepted drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_dspark.catalog.formats import dflash2, shared, speculators, zlab
from mlx_dspark.catalog.formats.base import DrafterConfig
from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.numbers import brief

SECTION = "dflash_config"


def _kinds(config: DrafterConfig) -> list[str]:
    return [shared.FULL if width is None else shared.SLIDING for width in config.layer_windows]


def _looks_ahead(config: DrafterConfig, value: Any) -> bool:
    masks = zip(config.layer_causal, config.layer_windows, strict=True)
    return value is False or not any(causal and width is not None for causal, width in masks)


def _causal(config: DrafterConfig, value: Any) -> bool:
    return all(causal is value for causal in config.layer_causal)


MEANINGS: Mapping[str, Callable[[DrafterConfig, Any], bool]] = {
    "is_causal": _causal,
    "causal": _causal,
    "dflash_query_causal": _causal,
    "attention_sink_bias": lambda config, value: config.sinks is value,
    "dspark_bonus_anchor": lambda config, value: (config.first_slot == 1) is value,
    "dspark_fixup_head_type": lambda config, value: value == "markov",
    "sliding_window_non_causal": _looks_ahead,
    "log_snr_conditioning": lambda config, value: config.noise_levels is value,
    "sample_from_anchor": lambda config, value: (config.first_slot == 0) is value,
    "logits_start": lambda config, value: config.first_slot == value,
    "block_size": lambda config, value: config.block_size == value,
    "mask_token_id": lambda config, value: config.mask_token == value,
    "target_layer_ids": lambda config, value: list(config.taps) == value,
    "num_target_layers": lambda config, value: config.target_layers in (None, value),
    "layer_types": lambda config, value: _kinds(config) == value,
    "sliding_window": lambda config, value: all(width in (None, value) for width in config.layer_windows),
    "rope_theta": lambda config, value: config.rope_theta == value,
    "rms_norm_eps": lambda config, value: config.norm_eps == value,
    "final_logit_softcapping": lambda config, value: config.softcap == value,
    "input_embedding_scale": lambda config, value: config.embedding_scale == value,
    "output_multiplier": lambda config, value: config.output_multiplier == value,
}
"""By key whether a value says what was read."""

ON_TOP = ("is_causal", "sliding_window_non_causal", "log_snr_conditioning", "dspark_bonus_anchor")
"""Checked on top in every packaging."""

ON_TOP_TOO: Mapping[str, tuple[str, ...]] = {
    zlab.PACKAGING: ("sample_from_anchor", "logits_start"),
    dflash2.PACKAGING: ("sample_from_anchor", "logits_start"),
    speculators.PACKAGING: (
        "target_layer_ids",
        "layer_types",
        "sliding_window",
        "rope_theta",
        "rms_norm_eps",
        "input_embedding_scale",
    ),
}
"""By packaging what it does not read on top."""

IN_BACKBONE = (
    *ON_TOP,
    "sample_from_anchor",
    "logits_start",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
)
"""What speculators do not read in the nested config. The multiplier there is the target's own."""


def check(config: Fields, packaging: str, found: DrafterConfig) -> None:
    """Raises BadCheckpoint naming a key of another packaging, or in another place, that says otherwise."""
    default = () if packaging in ON_TOP_TOO else ("input_embedding_scale",)
    places = (
        ("", config, (*ON_TOP, *ON_TOP_TOO.get(packaging, default))),
        (SECTION, config.section(SECTION), tuple(MEANINGS)),
        (speculators.BACKBONE, config.section(speculators.BACKBONE), IN_BACKBONE),
    )
    for section, fields, keys in places:
        for key in keys:
            if key in fields and not MEANINGS[key](found, fields.values[key]):
                _refuse(config, section, key, fields.values[key], packaging)


def _refuse(config: Fields, section: str, key: str, value: Any, packaging: str) -> None:
    place = f"{key} in {section}" if section else key
    raise BadCheckpoint(
        f"{place} of {config.file} is {brief(value)}, which a head of {packaging} does not read there,"
        " and its other keys say otherwise.",
        "Remove it, or write it where this packaging has it.",
        field=key,
    )
