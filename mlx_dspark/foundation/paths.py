"""Where this program keeps its files. The one place that reads the environment for it."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_DIR_VARIABLE = "MLX_DSPARK_CACHE_DIR"


def default_cache_dir() -> Path:
    """The folder of models and measurements: `$MLX_DSPARK_CACHE_DIR`, else `~/.cache/mlx_dspark`."""
    named = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "mlx_dspark"
