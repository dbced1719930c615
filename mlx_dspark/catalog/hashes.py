"""Hashes of whole files, remembered for as long as the files stand unchanged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from time import time
from typing import Any

from mlx_dspark.catalog.integrity import content_hash, sha256_of
from mlx_dspark.foundation.json_file import renew

FILE = "hashes.json"
SETTLED = 2.0
"""Seconds since its last change after which a file is remembered: a later change within the tick of a coarse
clock would leave no mark."""
KEPT = 400
"""Most files remembered; the oldest go first."""
_PATIENCE = 2.0


class RememberedHashes:
    """The sha256 of files, kept in `cache_dir` under their path with what changes when they do: size, inode
    and the times of the last change of content and of metadata. What cannot be kept is computed."""

    def __init__(self, cache_dir: Path, *, now: Callable[[], float] = time) -> None:
        self._file = cache_dir / FILE
        self._now = now

    def sha256(self, path: Path) -> str:
        """The hexadecimal sha256 of a whole file. May raise OSError."""
        name, mark = os.path.realpath(path), _mark(path)
        known = _read(self._file).get(name)
        if isinstance(known, dict) and known.get("mark") == mark and isinstance(known.get("sha256"), str):
            return known["sha256"]
        found = sha256_of(path)
        settled = self._now() - path.stat().st_mtime > SETTLED
        if settled and _mark(path) == mark:
            self._remember(name, {"mark": mark, "sha256": found})
        return found

    def of_content(self, paths: Iterable[Path]) -> str:
        """As `integrity.content_hash`. May raise OSError."""
        return content_hash(paths, self.sha256)

    def _remember(self, name: str, entry: dict[str, Any]) -> None:
        def content() -> dict[str, Any]:
            others = {other: value for other, value in _read(self._file).items() if other != name}
            return dict([*others.items(), (name, entry)][-KEPT:])

        renew(self._file, content, patience=_PATIENCE)


def _mark(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
