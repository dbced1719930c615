"""What counts as a number, and how a refused value is shown: settings, requests and files all ask here."""

from __future__ import annotations

import math
import reprlib
from typing import Any, TypeGuard

_SHOWN_CHARACTERS = 80
_SHOWN_BITS = 128


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer of any size; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether `value` is an integer or a float, and one that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _SHOWN_CHARACTERS
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 6

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= _SHOWN_BITS else f"<an integer of {x.bit_length()} bits>"


def brief(value: Any) -> str:
    """`repr(value)` in a length that fits a message."""
    return _BRIEF.repr(value)


_BRIEF = _Brief()
