"""One adapter per drafter packaging; all of them yield a `DrafterCheckpoint`."""

from mlx_dspark.catalog.formats.base import DrafterCheckpoint, DrafterConfig
from mlx_dspark.catalog.formats.read import read_drafter

__all__ = ["DrafterCheckpoint", "DrafterConfig", "read_drafter"]
