"""Seam: mlx-lm finds a model class through the private `mlx_lm.utils._get_classes`.

Versions: mlx-lm 0.32. Reason: its loader opens all weights before it learns that it does not know the model
type, and says so with a ValueError among others; and it builds no model without weights. Delete when mlx-lm
has a public lookup by config.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.utils import _get_classes

_FOREIGN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


LAYER_KEYS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
MOST_LAYERS = 1024
"""A model is built layer by layer before a weight is looked at: a number beyond all models never ends."""


def knows_model_type(config: dict[str, Any]) -> bool:
    """Whether mlx-lm has a model class for `config["model_type"]`; its helper modules are none."""
    try:
        _get_classes(config)
    except (ValueError, AttributeError):
        return False
    return True


def empty_model(config: dict[str, Any]) -> nn.Module | None:
    """The model of a config without its weights, which take no memory; None where it cannot be built so."""
    if "model_file" in config or _is_endless(config):
        return None
    try:
        model_class, arguments = _get_classes(config)
        return model_class(arguments.from_dict(config))
    except _FOREIGN:
        return None


def _is_endless(config: dict[str, Any]) -> bool:
    sections = (config, config.get("text_config"))
    counts = [section.get(key) for section in sections if isinstance(section, dict) for key in LAYER_KEYS]
    return any(isinstance(count, int | float) and count > MOST_LAYERS for count in counts)
