"""Is this file whole, and is it the one we mean?"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlx_dspark.catalog.safetensors import read_header

_READERS = 4
_SAMPLES, _SAMPLE = 64, 1 << 14
_FETCH_AGAIN = "Fetch or copy the file again."


def sha256_of(path: Path) -> str:
    """The hexadecimal sha256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_hash(paths: Iterable[Path], hash_of: Callable[[Path], str] = sha256_of) -> str:
    """The hexadecimal sha256 that names what some files hold together.

    Every byte counts; names, folders and the order of the paths do not. One file has the hash of `sha256_of`.
    Several are read side by side. `hash_of` gives that of one.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        parts = sorted(readers.map(hash_of, paths))
    return parts[0] if len(parts) == 1 else hashlib.sha256(" ".join(parts).encode()).hexdigest()


def content_fingerprint(paths: Iterable[Path]) -> str:
    """A hexadecimal sha256 that tells models apart without reading them whole.

    What counts is each file's size and samples from all over it; names, folders and the order of the paths do
    not. A file up to the samples' size together counts whole.
    """
    parts = sorted(map(_sampled, paths))
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE:
            digest.update(file.read())
        else:
            for index in range(_SAMPLES):
                file.seek(index * (size - _SAMPLE) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def check_safetensors(path: Path) -> None:
    """Raises BadCheckpoint when a safetensors file is missing, cut short, padded or has a damaged header."""
    read_header(path, next_step=_FETCH_AGAIN)
