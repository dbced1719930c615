"""The keys that tell heads for hybrid targets from the DeepSpec heads whose other keys they share."""

from __future__ import annotations

from mlx_dspark.catalog.formats import markers
from mlx_dspark.catalog.formats.fields import Fields

GATED = "enable_qwen35_gated_q_proj"
INTERLEAVED = "rope_is_neox_style"
LOG_SNR = "log_snr_conditioning"
NATIVE = "qwen3_5"


def qwen35(config: Fields) -> bool:
    """A DSpark head in the target's own style: `model_type` exactly `qwen3_5`, or gated queries."""
    native = config.text("model_type", "") == NATIVE or config.flag(GATED, False)
    return native and _has_slots(config) and "dflash_config" not in config and not markers.elsewhere(config)


def lfm2(config: Fields) -> bool:
    """A DSpark head whose taps are in `dflash_config` alone, without a projector."""
    section = config.section("dflash_config")
    named = any("DSpark" in name for name in config.texts("architectures"))
    nested = "target_layer_ids" in section and "projector_type" not in section
    own = "target_layer_ids" not in config and not markers.elsewhere(config)
    return named and nested and own


def prism(config: Fields) -> bool:
    """A DSpark head whose slots are told apart by their noise."""
    return config.flag(LOG_SNR, False) and _has_slots(config) and not markers.elsewhere(config)


def elsewhere(config: Fields) -> bool:
    """Whether one of these tells that DeepSpec's keys, which may be there too, do not rule alone."""
    return qwen35(config) or lfm2(config) or prism(config)


def known_keys(config: Fields) -> frozenset[str]:
    """Those of these keys that the head's own packaging honours."""
    return frozenset({GATED} if qwen35(config) else {INTERLEAVED} if lfm2(config) else ())


def _has_slots(config: Fields) -> bool:
    return "block_size" in config and "target_layer_ids" in config
