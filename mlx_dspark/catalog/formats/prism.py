"""PrismML's DSpark heads: DeepSpec's keys with a constant on each slot's embedding, made from how noisy the
slot is (drafter-formats section 7). Their GGUF files are converted to this (`catalog.gguf.drafter`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlx_dspark.catalog.formats import deepspec, markers
from mlx_dspark.catalog.formats.base import DrafterCheckpoint, without_prefix
from mlx_dspark.catalog.formats.fields import Fields
from mlx_dspark.foundation.numbers import brief, is_finite

PACKAGING = "PrismML"
LOWEST, HIGHEST = "min_log_snr", "max_log_snr"

claims = markers.prism


def read(config: Fields, weights: Mapping[str, mx.array], files: tuple[Path, ...]) -> DrafterCheckpoint:
    """Translate one head. Raises BadCheckpoint or UnsupportedModel naming the key or tensor."""
    weights = without_prefix(weights)
    translated = replace(deepspec.translate(config, weights), noise_levels=True)
    _check_levels(config)
    return deepspec.checked(PACKAGING, config, translated, weights, files)


def _check_levels(config: Fields) -> None:
    """The anchor is at the highest level and all masks at the lowest, so only their order counts."""
    config.require((LOWEST, HIGHEST))
    low, high = config.values[LOWEST], config.values[HIGHEST]
    for name, value in ((LOWEST, low), (HIGHEST, high)):
        if not is_finite(value):
            config.bad(name, f"is {brief(value)}, not a finite number")
    if low >= high:
        config.bad(LOWEST, f"is {brief(low)}, not below {HIGHEST} ({brief(high)})")
