"""Seam: `gguf.GGUFReader` walks metadata arrays one element at a time.

Versions: gguf 0.17 to 0.19. Reason: a vocabulary of 49,000 tokens with its merges takes it seconds, on every
start of the program; whole arrays take a small part of that. Besides, a file cut short surfaces there as a
failed reshape. `contents()`, `tensors` and the other checks stay upstream's. Delete when
`GGUFReader._get_field_parts` reads arrays as a whole and its `_build_tensors` compares sizes.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField

_ARRAY_HEADER = struct.Struct("<IQ")
_STRING_LENGTH = struct.Struct("<Q")

_Parts = tuple[int, list[np.ndarray], list[int], list[GGUFValueType]]


class CutShort(ValueError):
    """The file ends before its last tensor does, which would be at byte `expected`."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"its tensors end at byte {expected}")
        self.expected = expected


class FastGGUFReader(GGUFReader):
    """A GGUFReader that reads little-endian arrays of strings and numbers in one go.

    Raises CutShort, and what GGUFReader raises on a damaged file: ValueError, KeyError, IndexError or
    UnicodeDecodeError.
    """

    def __init__(self, path: Path) -> None:
        self._bytes: memoryview | None = None
        super().__init__(path)

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        expected = max((start_offs + _end_of(field) for field in fields), default=0)
        if expected > len(self.data):
            raise CutShort(expected)
        super()._build_tensors(start_offs, fields)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """As upstream's, which gives a shorter array, or fails in numpy's words, where the file ends."""
        start, size = int(offset), int(count) * np.dtype(dtype).itemsize
        if start + size > len(self.data):
            raise IndexError("the file ends inside a value")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if GGUFValueType(raw_type) is not GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        if self._bytes is None:
            self._bytes = np.asarray(self.data).data
        try:
            raw_item, count = _ARRAY_HEADER.unpack_from(self._bytes, orig_offs)
        except struct.error as error:
            raise IndexError("the file ends inside an array") from error
        item = GGUFValueType(raw_item)
        start = orig_offs + _ARRAY_HEADER.size
        if item is GGUFValueType.STRING:
            return self._strings(self._bytes, start, count)
        dtype = self.gguf_scalar_to_np.get(item)
        if dtype is None:
            return super()._get_field_parts(orig_offs, raw_type)
        values = self._get(start, dtype, count)
        return _ARRAY_HEADER.size + values.nbytes, [values], [0], [GGUFValueType.ARRAY, item]

    def _strings(self, raw: memoryview, start: int, count: int) -> _Parts:
        parts: list[np.ndarray] = []
        end = start
        for _ in range(count):
            text = end + _STRING_LENGTH.size
            if text > len(raw):
                raise IndexError("the file ends inside an array of strings")
            end = text + _STRING_LENGTH.unpack_from(raw, end)[0]
            if end > len(raw):
                raise IndexError("the file ends inside an array of strings")
            parts.append(np.frombuffer(raw[text:end], np.uint8))
        size = _ARRAY_HEADER.size + end - start
        return size, parts, list(range(count)), [GGUFValueType.ARRAY, GGUFValueType.STRING]


def _end_of(field: ReaderField) -> int:
    """Where a tensor ends, in bytes from the first one's start."""
    *_, dims, kind, offset = field.parts
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
    return int(offset[0]) + int(np.prod(dims)) * size // block
