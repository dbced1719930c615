"""What several processes remember together: a JSON file, read as it stands and renewed whole under a lock."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

WAIT_FOREVER = -1.0


def renew(file: Path, content: Callable[[], object], *, patience: float = WAIT_FOREVER) -> str:
    """Put what `content` gives in the file's place; it is called under the lock, and may read the file.

    `patience` is how many seconds to wait for the lock. Returns why the file could not be written, or an
    empty string.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=patience):
            fresh = file.with_suffix(f".{os.getpid()}.new")
            fresh.write_text(json.dumps(content(), indent=1), encoding="utf-8")
            fresh.replace(file)
    except (OSError, NotImplementedError) as error:  # file systems without locks raise the second
        return f"{file} cannot be written: {getattr(error, 'strerror', None) or error}"
    return ""


def set_aside(file: Path) -> None:
    """Rename a damaged file to `aside_of`, where that can be done."""
    with suppress(OSError):
        file.replace(aside_of(file))


def aside_of(file: Path) -> Path:
    """`*.damaged`: where a damaged file goes."""
    return file.with_suffix(f"{file.suffix}.damaged")
