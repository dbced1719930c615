"""Arrays for another thread.

A lazy array belongs to the stream of the thread that made it, and MLX evaluates it nowhere else. So whatever
objects hold is evaluated where they were made, before another thread works with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx

_CLOSED = (str, bytes, int, float, complex, bool, type, ModuleType, type(None))


def settle(*owners: Any) -> None:
    """Evaluate every array that the owners hold, however deep."""
    mx.eval(list(_arrays(owners)))


def _arrays(owners: tuple[Any, ...]) -> Iterator[mx.array]:
    left: list[Any] = list(owners)
    seen: set[int] = set()
    while left:
        owner = left.pop()
        if id(owner) in seen or isinstance(owner, _CLOSED):
            continue
        seen.add(id(owner))
        if isinstance(owner, mx.array):
            yield owner
        else:
            left += _parts(owner)


def _parts(owner: Any) -> list[Any]:
    if isinstance(owner, FunctionType):
        return list(_closed_over(owner))
    if isinstance(owner, MethodType):
        return [owner.__self__]
    if isinstance(owner, partial):
        return [owner.func, *owner.args, *owner.keywords.values()]
    parts = list(vars(owner).values()) if hasattr(owner, "__dict__") else []
    if isinstance(owner, Mapping):
        parts += owner.values()
    elif isinstance(owner, list | tuple | set | frozenset):
        parts += owner
    slots = [name for kind in type(owner).__mro__ for name in _slots(kind)]
    return parts + [getattr(owner, name) for name in slots if hasattr(owner, name)]


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    """What the function's closure holds; a variable that is not bound yet holds nothing."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            yield cell.cell_contents
