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


def speculators(config: Fields) -> bool:
    """vLLM's speculators."""
    return "speculators_model_type" in config or bool(config.section("speculators_config").values)


def specforge(config: Fields) -> bool:
    """SpecForge's DSpark projector."""
    return config.section("dflash_config").values.get("projector_type") == "dspark"


def nvidia(config: Fields) -> bool:
    """A DSpark head of the lineage of Nemotron's."""
    section = config.section("dflash_config")
    named = any("DSpark" in name for name in config.texts("architectures"))
    keys = any(key in place for key in NVIDIA_KEYS for place in (config, section))
    return named and (keys or any(key in section for key in NVIDIA_SECTION_KEYS))


def elsewhere(config: Fields) -> bool:
    """Whether one of these tells that the keys of DeepSpec or z-lab, which may be there too, do not rule."""
    return speculators(config) or specforge(config) or nvidia(config)
