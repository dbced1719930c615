"""What the system refuses while a checkpoint is read, as an error that names the path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_dspark.foundation.errors import BadCheckpoint


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, an OSError becomes BadCheckpoint naming the file at fault, or else `path`."""
    try:
        yield
    except OSError as error:
        raise BadCheckpoint(
            f"{error.filename or path} cannot be read: {error.strerror or error}.",
            "Check the path and its rights.",
        ) from error
