"""The runtime's structures, as `cpp/runtime.hpp` declares them."""

from __future__ import annotations

import ctypes


class Options(ctypes.Structure):
    schedule: int
    seed: int
    workers: int
    threadgroup_limit: int
    _fields_ = (
        ("schedule", ctypes.c_int),
        ("seed", ctypes.c_uint64),
        ("workers", ctypes.c_int),
        ("threadgroup_limit", ctypes.c_uint32),
    )


class Counts(ctypes.Structure):
    _fields_ = (
        ("matrix_products", ctypes.c_uint64),
        ("simd_operations", ctypes.c_uint64),
        ("simdgroup_barriers", ctypes.c_uint64),
        ("threadgroup_barriers", ctypes.c_uint64),
        ("partial_operations", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
    )

    def by_name(self) -> dict[str, int]:
        return {field[0]: getattr(self, field[0]) for field in self._fields_}
