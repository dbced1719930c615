"""Where this program keeps its files. The one place that reads the environment for it."""

from __future__ import annotations

import os
from pathlib import Path

from mlx_dspark.foundation.errors import UsageError

CACHE_DIR_VARIABLE = "MLX_DSPARK_CACHE_DIR"


def default_cache_dir() -> Path:
    """The folder of the default model and of measurements.

    `$MLX_DSPARK_CACHE_DIR`, else `~/.cache/mlx_dspark`. Models of the hub are in the hub's own cache.
    """
    named = os.environ.get(CACHE_DIR_VARIABLE)
    try:
        return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "mlx_dspark"
    except RuntimeError as error:
        raise UsageError(
            f"{CACHE_DIR_VARIABLE} is {named!r}, whose home folder cannot be found."
            if named
            else "The home folder, which holds the cache, cannot be found.",
            f"Set {CACHE_DIR_VARIABLE} to a folder.",
            field=CACHE_DIR_VARIABLE,
        ) from error
