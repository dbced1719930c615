"""Whose turn it is: every arm once on every case in every trial, in an order drawn anew for each. No MLX."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

Case = TypeVar("Case")


class Turn(NamedTuple):
    """Arm `arm` on case `case` for the `trial`th time."""

    trial: int
    case: int
    arm: int


def turns(arms: int, cases: Sequence[Sequence[int]], trials: int, seed: int) -> Iterator[Turn]:
    """All turns. `cases[i]` lists the arms that take part in case `i`.

    A case's arms follow each other, so that heat and load change little between them, and who goes first is
    drawn, so that what changes favours none. The same seed gives the same order.
    """
    assert all(0 <= arm < arms for case in cases for arm in case)
    draw = random.Random(seed)
    for trial in range(trials):
        for case, taking_part in enumerate(cases):
            for arm in draw.sample(list(taking_part), len(taking_part)):
                yield Turn(trial, case, arm)
