"""Is this file whole, and is it the one we mean?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from mlx_dspark.catalog.safetensors import read_header

_SAMPLE_BYTES = 4096
_SAMPLES = 64
_FETCH_AGAIN = "Fetch or copy the file again."


def sha256_of(path: Path) -> str:
    """The hexadecimal sha256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(paths: Iterable[Path]) -> str:
    """A content hash that is cheap for large files: names, sizes and evenly spaced samples, in name order.

    Two fine-tunes of one model differ in nearly every weight, so in the samples; small files are read whole.
    """
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(file.read())
                continue
            for index in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def check_safetensors(path: Path) -> None:
    """Raises BadCheckpoint when a safetensors file is missing, cut short, padded or has a damaged header."""
    read_header(path, next_step=_FETCH_AGAIN)
