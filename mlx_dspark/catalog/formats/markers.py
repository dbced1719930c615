"""The keys that tell a packaging from those whose other keys it shares."""

from __future__ import annotations

from mlx_dspark.catalog.formats.fields import Fields

NVIDIA_KEYS = (
    "dflash_query_causal",
    "attention_sink_bias",
    "dspark_bonus_anchor",
    "dspark_fixup_head_type",
    "dspark_markov_rank",
)
"""On top, or in `dflash_config`."""

NVIDIA_SECTION_KEYS = ("causal", "use_swa", "swa_window_size")
"""In `dflash_config`."""


GATED = "enable_qwen35_gated_q_proj"
INTERLEAVED = "rope_is_neox_style"
LOG_SNR = "log_snr_conditioning"
NATIVE = "qwen3_5"


def speculators(config: Fields) -> bool:
    """vLLM's speculators."""
    return "speculators_model_type" in config or bool(config.section("speculators_config").values)


def specforge(config: Fields) -> bool:
    """SpecForge's DSpark projector."""
    return config.section("dflash_config").values.get("projector_type") == "dspark"


def nvidia(config: Fields) -> bool:
    """A DSpark head of the lineage of Nemotron's; speculators have sinks too."""
    if speculators(config):
        return False
    section = config.section("dflash_config")
    named = any("DSpark" in name for name in config.texts("architectures"))
    keys = any(key in place for key in NVIDIA_KEYS for place in (config, section))
    return named and (keys or any(key in section for key in NVIDIA_SECTION_KEYS))


def elsewhere(config: Fields) -> bool:
    """Whether one of these tells that the keys of DeepSpec or z-lab, which may be there too, do not rule."""
    return speculators(config) or specforge(config) or nvidia(config)


def qwen35(config: Fields) -> bool:
    """A DSpark head in the target's own style: `model_type` exactly `qwen3_5`, or gated queries."""
    native = config.text("model_type", "") == NATIVE or config.flag(GATED, False)
    return native and _has_slots(config) and "dflash_config" not in config and not elsewhere(config)


def lfm2(config: Fields) -> bool:
    """A DSpark head whose taps are in `dflash_config` alone, without a projector."""
    section = config.section("dflash_config")
    named = any("DSpark" in name for name in config.texts("architectures"))
    nested = "target_layer_ids" in section and "projector_type" not in section
    own = "target_layer_ids" not in config and not elsewhere(config)
    return named and nested and own


def prism(config: Fields) -> bool:
    """A DSpark head whose slots are told apart by their noise."""
    return config.flag(LOG_SNR, False) and _has_slots(config) and not elsewhere(config)


def for_hybrids(config: Fields) -> bool:
    """Whether one of these three tells that DeepSpec's keys, which may be there too, do not rule alone."""
    return qwen35(config) or lfm2(config) or prism(config)


def known_keys(config: Fields) -> frozenset[str]:
    """Keys of math beyond DeepSpec's that the head's own packaging honours."""
    known = {GATED} if qwen35(config) else {INTERLEAVED} if lfm2(config) else set[str]()
    if nvidia(config):
        known |= {*NVIDIA_KEYS, *NVIDIA_SECTION_KEYS}
    if speculators(config):
        known.add("attention_sink_bias")
    return frozenset(known)


def _has_slots(config: Fields) -> bool:
    return "block_size" in config and "target_layer_ids" in config
