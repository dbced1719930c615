"""Planted mistakes: the test of a kernel's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.metal_shim.capture import Change
from tests.metal_shim.compiling import Mode
from tests.metal_shim.errors import ShimError
from tests.metal_shim.running import SCHEDULES

Trial = Callable[[str, Mode, Change | None], str | None]
"""Runs a kernel in a schedule and a mode, perhaps changed; what is wrong with what it gave, if anything. A
`ShimError` is wrong too."""


@dataclass(frozen=True)
class Mutation:
    """A mistake: `old`, which the kernel's source has once, becomes `new`. `trial`, the number of one of the
    kernel's, and `mode` are what is known to find it."""

    name: str
    old: str
    new: str
    trial: int = 0
    mode: Mode = Mode.PLAIN


def found(mutation: Mutation, trial: Trial, mode: Mode) -> str | None:
    """What one trial says of the mistake, in all schedules where the mode is plain."""
    for schedule in SCHEDULES if mode is Mode.PLAIN else SCHEDULES[:1]:
        try:
            said = trial(schedule, mode, (mutation.old, mutation.new))
        except ShimError as error:
            said = str(error).split("\n")[0]
        if said is not None:
            return said
    return None


def table(
    mutations: Sequence[Mutation], trials: Sequence[Trial]
) -> Iterator[tuple[Mutation, dict[Mode, str]]]:
    """Of each mistake, what its trial says, in every mode that finds it."""
    for mutation in mutations:
        said = {mode: found(mutation, trials[mutation.trial], mode) for mode in Mode}
        yield mutation, {mode: text for mode, text in said.items() if text is not None}
