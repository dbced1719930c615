"""The table at the head of a safetensors file, with damage found before any of the data is read.

Layout: 8 bytes of header length, a JSON header, then the tensors end to end up to the file's last byte
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.numbers import is_whole

_LONGEST_HEADER_BYTES = 100_000_000
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U32": 4, "U8": 1, "I8": 1, "BOOL": 1}
"""Bytes per element; the size of a tensor of another type is taken as it is."""


@dataclass(frozen=True)
class StoredTensor:
    """One entry of the table; `begin` and `end` count bytes from where the data begins."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path, *, next_step: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. `next_step` ends the messages.

    Raises BadCheckpoint when the file is missing, cut short, padded, or has a damaged header: one that is not
    a JSON object of distinct tensors, or whose tensors overlap, leave gaps or are of the wrong size.
    """
    try:
        size = path.stat().st_size
        header, data_starts_at = _header(path, size, next_step)
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} is missing.", next_step) from error
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read: {error.strerror or error}.", "Check the file and its rights."
        ) from error
    try:
        tensors = _tensors(json.loads(header, object_pairs_hook=_distinct))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path} has a damaged safetensors header.", next_step) from error
    expected = data_starts_at + max((tensor.end for tensor in tensors.values()), default=0)
    if size != expected:
        state = "cut short" if size < expected else "longer than its header says"
        raise BadCheckpoint(f"{path} is {state}: {size} bytes in place of {expected}.", next_step)
    return tensors


def _header(path: Path, size: int, next_step: str) -> tuple[bytes, int]:
    """The JSON text, and where the data begins."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if start.startswith(b"version "):
            raise BadCheckpoint(
                f"{path} is a Git LFS pointer and not the weights.", "Run `git lfs pull` there."
            )
        if not 0 < length <= min(size - 8, _LONGEST_HEADER_BYTES):
            raise BadCheckpoint(f"{path} is cut short or not a safetensors file.", next_step)
        return file.read(length), 8 + length


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return table


def _tensors(header: dict[str, Any]) -> dict[str, StoredTensor]:
    """The entries of the header. Raises ValueError, TypeError, KeyError or AttributeError for any damage."""
    tensors = {name: _tensor(entry) for name, entry in header.items() if name != "__metadata__"}
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        width = _WIDTHS.get(tensor.dtype)
        wrong = width is not None and tensor.end - tensor.begin != width * math.prod(tensor.shape)
        if tensor.begin != end or tensor.end < end or wrong:
            raise ValueError("tensors overlap, leave gaps or are of the wrong size")
        end = tensor.end
    return tensors


def _tensor(entry: dict[str, Any]) -> StoredTensor:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, begin, end]
    if not isinstance(dtype, str) or not all(is_whole(number) and number >= 0 for number in numbers):
        raise ValueError("not the dtype, shape and data_offsets of a tensor")
    return StoredTensor(dtype, tuple(shape), begin, end)
