"""z-lab DFlash heads: a Qwen3 config with a `dflash_config` section (drafter-formats section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from mlx_dspark.catalog.formats import markers, rope, shared
from mlx_dspark.catalog.formats.base import (
    DrafterCheckpoint,
    DrafterConfig,
    backbone_tensors,
    check_tensors,
    without_prefix,
)
from mlx_dspark.catalog.formats.fields import Fields

PACKAGING = "z-lab DFlash"
ARCHITECTURE, SECOND = "DFlashDraftModel", "DFlash2DraftModel"
EITHER_PLACE = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)
"""Keys that are read from `dflash_config` first, then from the top level."""


def claims(config: Fields) -> bool:
    """Whether config.json is of this packaging."""
    if markers.elsewhere(config) or markers.lfm2(config) or has_selector(config):
        return False
    return ARCHITECTURE in config.texts("architectures") or "dflash_config" in config


def has_selector(config: Fields) -> bool:
    """Whether the head is of DFlash 2, which is this packaging with more to it."""
    architectures = config.texts("architectures")
    return SECOND in architectures or "selector_rank" in config.section("dflash_config")


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor."""
    translated, weights = translate(config), without_prefix(weights)
    check_tensors(weights, backbone_tensors(translated), config.file.parent)
    return DrafterCheckpoint(PACKAGING, translated, weights, files)


def translate(config: Fields) -> DrafterConfig:
    """One head in numbers. Raises BadCheckpoint or UnsupportedModel naming the key."""
    return _translate(_hoisted(config))


def _hoisted(config: Fields) -> Fields:
    nested = config.section("dflash_config").values
    return Fields(config.values | {key: nested[key] for key in EITHER_PLACE if key in nested}, config.file)


def _translate(config: Fields) -> DrafterConfig:
    config.require((*shared.BACKBONE_KEYS, "num_key_value_heads", "block_size", "mask_token_id"))
    shared.activation(config, "hidden_act", "silu")
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    vocab = config.whole("vocab_size")
    layers = config.whole("num_hidden_layers", high=shared.MOST_LAYERS)
    kinds = shared.layer_types(config, layers)
    rotary = rope.declared(config, kinds)
    target_layers = shared.target_layers(config)
    return DrafterConfig(
        family="dflash",
        backbone="qwen3",
        hidden=hidden,
        vocab=vocab,
        draft_vocab=vocab,
        intermediate=config.whole("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=shared.kv_heads(config, "num_key_value_heads", heads),
        head_dim=shared.head_width(config, "head_dim", max(1, hidden // heads)),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        attention_bias=config.flag("attention_bias", False),
        rope_theta=rotary.theta,
        rope_kind=rotary.kind,
        rope_options=rotary.options,
        block_size=config.whole("block_size", low=2, high=shared.LONGEST_BLOCK),
        first_slot=1,
        mask_token=config.whole("mask_token_id", low=0, high=vocab - 1),
        taps=taps(config, layers, target_layers),
        layer_causal=_causal(config, kinds),
        layer_windows=shared.windows(config, kinds),
        target_layers=target_layers,
        softcap=shared.softcap(config),
        embedding_scale=config.number("input_embedding_scale", 1.0, low=1e-6, high=1e6),
        output_multiplier=config.number("output_multiplier", 1.0, low=1e-6, high=1e6),
    )


def _causal(config: Fields, kinds: tuple[str, ...]) -> tuple[bool, ...]:
    """`is_causal` rules every layer; where it is absent, sliding layers are causal and full ones are not."""
    if "is_causal" in config:
        return (config.flag("is_causal", False),) * len(kinds)
    return tuple(kind == shared.SLIDING for kind in kinds)


def taps(config: Fields, layers: int, target_layers: int | None) -> tuple[int, ...]:
    """Old heads list no taps: theirs are spread evenly from layer 1 to three before the end."""
    if "target_layer_ids" in config:
        return shared.taps(config, "target_layer_ids", target_layers)
    if target_layers is None:
        config.require(["target_layer_ids"])
    assert target_layers is not None
    if layers == 1:
        return (target_layers // 2,)
    spread = [round(1 + index * (target_layers - 4) / (layers - 1)) for index in range(layers)]
    return shared.taps(Fields({"target_layer_ids": spread}, config.file), "target_layer_ids", target_layers)
