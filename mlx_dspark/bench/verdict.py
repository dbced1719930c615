"""Whether two answers are the same tokens, and whether a difference is one of rounding. No MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TIE_FACTOR = 4.0
"""A gap of so many times the rounding that was seen is a tie: two logits move, each in both answers."""

Kind = Literal["identical", "tie", "differs", "explained", "unjudged"]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two answers part, the end of the shorter included; None when they are the same."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


@dataclass(frozen=True)
class Gap:
    """What the target thinks of the next token at one place, in logits.

    `top` and `top_gap`: its two likeliest tokens and how far they are apart. `token_gap`: how far the two
    tokens in question are apart. `rounding`: the most that any logit moves when the same tokens are read in
    another width.
    """

    top: tuple[int, int]
    top_gap: float
    token_gap: float
    rounding: float

    @property
    def tie(self) -> bool:
        """Whether rounding alone can turn one of the two tokens into the other."""
        return abs(self.token_gap) <= TIE_FACTOR * self.rounding


@dataclass(frozen=True)
class Verdict:
    """An arm's answer against the reference's.

    Where they differ: the place, and the token of each, None where an answer had ended; `gap` is None where
    the target was not asked. `reason`: why the arm may differ with no fault of anybody's; empty for none.
    """

    same: bool
    at: int | None = None
    expected: int | None = None
    got: int | None = None
    gap: Gap | None = None
    reason: str = ""

    @property
    def kind(self) -> Kind:
        """In one word."""
        if self.same:
            return "identical"
        if self.reason:
            return "explained"
        if self.gap is None:
            return "unjudged"
        return "tie" if self.gap.tie else "differs"


def compared(reference: Sequence[int], answer: Sequence[int]) -> Verdict:
    """A verdict in which the target has no say yet."""
    at = first_difference(reference, answer)
    if at is None:
        return Verdict(True)
    expected = reference[at] if at < len(reference) else None
    return Verdict(False, at, expected, answer[at] if at < len(answer) else None)
