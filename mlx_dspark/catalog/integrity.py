"""Is this file whole, and is it the one we mean?

Safetensors layout: 8 bytes of header length, a JSON header, then data that fills the file to its last byte
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from mlx_dspark.foundation.errors import BadCheckpoint

_HEADER_LIMIT_BYTES = 100_000_000
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
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise BadCheckpoint(
                    f"{path} is a Git LFS pointer and not the weights.", "Run `git lfs pull` there."
                )
            if size < 8 or length > min(size - 8, _HEADER_LIMIT_BYTES):
                raise BadCheckpoint(f"{path} is cut short or not a safetensors file.", _FETCH_AGAIN)
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read: {error.strerror}.", "Check the file and its rights."
        ) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BadCheckpoint(f"{path} has a damaged safetensors header.", _FETCH_AGAIN) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        state = "cut short" if size < expected else "longer than its header says"
        raise BadCheckpoint(f"{path} is {state}: {size} bytes in place of {expected}.", _FETCH_AGAIN)
