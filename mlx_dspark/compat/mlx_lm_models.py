"""Seam: mlx-lm finds a model class through the private `mlx_lm.utils._get_classes`.

Versions: mlx-lm 0.32. Reason: its loader opens all weights before it learns that it does not know the model
type, and says so with a ValueError among others. Delete when mlx-lm has a public lookup by config.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.utils import _get_classes


def knows_model_type(config: dict[str, Any]) -> bool:
    """Whether mlx-lm has a model class for `config["model_type"]`; its helper modules are none."""
    try:
        _get_classes(config)
    except (ValueError, AttributeError):
        return False
    return True
