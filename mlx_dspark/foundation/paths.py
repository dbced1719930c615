"""Where this program keeps its files. The one place that reads the environment for it."""

from __future__ import annotations

import os
from pathlib import Path

from mlx_dspark.foundation.errors import UsageError

CACHE_DIR_VARIABLE = "MLX_DSPARK_CACHE_DIR"
MODEL_DIRS_VARIABLE = "MLX_DSPARK_MODEL_DIRS"


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


def model_dirs() -> list[Path]:
    """The user's folders of models: `$MLX_DSPARK_MODEL_DIRS`, separated as in PATH; they need not exist."""
    named = os.environ.get(MODEL_DIRS_VARIABLE, "").split(os.pathsep)
    return [Path(os.path.expanduser(each)).absolute() for each in named if each.strip()]


def user_home() -> Path | None:
    """The user's home folder, or None where it cannot be found."""
    try:
        return Path.home()
    except RuntimeError:
        return None
