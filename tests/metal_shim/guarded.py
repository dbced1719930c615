"""Memory with much inaccessible room at both ends, and a pattern in what is left of the last page."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from tests.metal_shim.arrays import Bytes

_PAGE = mmap.PAGESIZE
_ROOM = 16 << 20
"""Bytes that are inaccessible on either side: a kernel that is wrong by a row or a matrix ends there, and not
in memory of others."""
_ALIGNMENT = 16
_PATTERN = 0xA5
_FAILED = ctypes.c_void_p(-1).value


class Guarded:
    """A copy of some bytes that ends, or begins, where nothing is accessible.

    At the end this is exact to 16 bytes, a device buffer's alignment; bytes beyond are filled with a pattern.
    """

    def __init__(self, data: Bytes, at_start: bool) -> None:
        size = data.size
        room = -(-max(size, 1) // _PAGE) * _PAGE
        self._length = room + 2 * _ROOM
        self._base = _reserved(self._length)
        first = self._base + _ROOM
        if _libc().mprotect(first, room, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"no {room} bytes for a guarded buffer")
        self.address = first if at_start else first + room - -(-size // _ALIGNMENT) * _ALIGNMENT
        whole = np.ctypeslib.as_array((ctypes.c_uint8 * room).from_address(first))
        offset = self.address - first
        whole[:] = _PATTERN
        self.data = whole[offset : offset + size]
        self.data[:] = data
        self._around = (whole[:offset], whole[offset + size :])

    def intact(self) -> bool:
        """Whether nothing was written beside the buffer."""
        return all((part == _PATTERN).all() for part in self._around)

    def free(self) -> None:
        del self.data, self._around
        _libc().munmap(self._base, self._length)


@contextmanager
def guarded(data: list[Bytes], at_start: bool) -> Iterator[list[Guarded]]:
    held = [Guarded(each, at_start) for each in data]
    try:
        yield held
    finally:
        for each in held:
            each.free()


def _reserved(length: int) -> int:
    """Addresses that nothing else has, and nobody may use."""
    base = _libc().mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if base is None or base == _FAILED:
        raise MemoryError(f"no {length} bytes for a guarded buffer")
    return base


@cache
def _libc() -> Any:
    found = ctypes.CDLL(None, use_errno=True)
    word, size = ctypes.c_void_p, ctypes.c_size_t
    found.mmap.restype = word
    found.mmap.argtypes = [word, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found.mprotect.argtypes = [word, size, ctypes.c_int]
    found.munmap.argtypes = [word, size]
    return found
