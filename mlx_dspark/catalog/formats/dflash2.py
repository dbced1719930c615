"""DFlash 2 heads: z-lab's layout with convolutions and a candidate selector (drafter-formats section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlx_dspark.catalog.formats import shared, zlab
from mlx_dspark.catalog.formats.base import (
    Convolution,
    DrafterCheckpoint,
    DrafterConfig,
    Selector,
    Shape,
    backbone_tensors,
    check_tensors,
    without_prefix,
)
from mlx_dspark.catalog.formats.fields import Fields

PACKAGING = "DFlash 2"
SECTION_KEYS = ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
"""Keys that stand in `dflash_config` and nowhere else; without them the head would draft as another one."""


def claims(config: Fields) -> bool:
    """Whether config.json is of this packaging."""
    return zlab.has_selector(config)


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor."""
    translated, weights = translate(config), without_prefix(weights)
    check_tensors(weights, expected_tensors(translated), config.file.parent)
    return DrafterCheckpoint(PACKAGING, translated, weights, files)


def translate(config: Fields) -> DrafterConfig:
    """One head in numbers. Raises BadCheckpoint or UnsupportedModel naming the key."""
    section = config.section("dflash_config")
    section.require(SECTION_KEYS)
    if "target_layer_ids" not in config:
        section.require(["target_layer_ids"])
    first = zlab.translate(config)
    group = section.whole("conv_group_size")
    if first.hidden % group:
        section.bad("conv_group_size", f"is {group}, which does not divide hidden_size ({first.hidden})")
    rank = section.whole("selector_rank")
    candidates = section.whole("selector_top_k", high=first.vocab)
    taps = section.whole("conv_kernel_size", high=shared.LONGEST_BLOCK)
    return replace(
        first,
        family="dflash2",
        selector=Selector(rank, candidates),
        convolution=Convolution(taps, group),
    )


def expected_tensors(config: DrafterConfig) -> dict[str, Shape]:
    """Names and shapes of a whole head; the codebooks have no `.weight` to their names."""
    assert config.selector is not None
    assert config.convolution is not None
    hidden, rank, taps = config.hidden, config.selector.rank, config.convolution.taps
    codebook = (config.vocab, rank)
    expected: dict[str, Shape] = backbone_tensors(config) | {
        "candidate_selector.predecessor_codebook": codebook,
        "candidate_selector.successor_codebook": codebook,
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }
    coefficients = 2 * taps * (hidden // config.convolution.group)
    for layer in range(config.layers):
        for name in ("attention_conv", "mlp_conv"):
            expected[f"layers.{layer}.{name}.base_kernel"] = (2, taps, hidden)
            expected[f"layers.{layer}.{name}.kernel_projection.weight"] = (coefficients, hidden)
    return expected
