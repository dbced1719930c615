"""Numbers on the command lines of the scripts here."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """A `type` of argparse: whole numbers from `least` on; it says so of anything else."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
        return int(text)

    return number
