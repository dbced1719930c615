"""The rotary embedding that a GGUF file's metadata describes, as the `rope_scaling` of a config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mlx_dspark.catalog.gguf.facts import Facts

FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_USUAL_YARN = {
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "attn_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}


def rope_scaling(facts: Facts, head_dim: int, base: float) -> dict[str, Any] | None:
    """None for plain rope. Raises UnsupportedModel naming a scaling that mlx-lm would compute differently."""
    factors = facts.file.tensors.get(FACTORS)
    scaling = _from_metadata(facts)
    if factors is None:
        return scaling
    found = np.array(factors.data, np.float32)
    if np.all(found == 1):
        return scaling
    llama3 = {"rope_type": "llama3", "factor": float(found.max()), **_LLAMA3}
    expected = _llama3_factors(llama3, head_dim, base)
    if scaling is None and found.shape == expected.shape and np.allclose(found, expected, rtol=1e-4):
        return llama3
    raise facts.file.unsupported(f"rope factors ({FACTORS}) that are not those of Llama 3", "plain rope")


def _from_metadata(facts: Facts) -> dict[str, Any] | None:
    legacy = facts.number("rope.scale_linear", 1.0)
    kind = facts.text("rope.scaling.type", "none" if legacy == 1 else "linear")
    factor = facts.number("rope.scaling.factor", legacy)
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(facts, factor)
    raise facts.file.unsupported(f"a scaled rope of type {kind!r}", "plain, linear, yarn or Llama 3 rope")


def _yarn(facts: Facts, factor: float) -> dict[str, Any]:
    for key, plain in _USUAL_YARN.items():
        if facts.number(f"rope.scaling.{key}", plain, above=-1.0) != plain:
            raise facts.file.unsupported(f"a yarn rope with its own {key}", "yarn rope of the usual form")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": facts.whole("rope.scaling.original_context_length"),
        "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _llama3_factors(scaling: dict[str, Any], head_dim: int, base: float) -> np.ndarray:
    """What every frequency is divided by: `[head_dim / 2]`."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (
        2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    )
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling["factor"] + smooth)
