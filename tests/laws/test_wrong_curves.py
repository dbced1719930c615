"""Cap policies whose curves are wrong, or that have none, on invented machines over drawn acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.five_machines import BLOCK, DSPARK, MACHINES, TOKENS, of_oracle
from mlx_dspark.calibration.simulate import Machine, Replay, Segment
from mlx_dspark.engine.caps import MaxDraft, cap_policy

WRONG: dict[str, Callable[[int, float], float]] = {
    "right": lambda _, seconds: seconds,
    "measured hot": lambda _, seconds: 2 * seconds,
    "half": lambda _, seconds: seconds / 2,
    "too flat": lambda width, seconds: seconds / (1 + 0.12 * (width - 1)),
    "too steep": lambda width, seconds: seconds * (1 + 0.12 * (width - 1)),
    "plain measured hot": lambda width, seconds: 2 * seconds if width == 1 else seconds,
    "all but plain measured hot": lambda width, seconds: seconds if width == 1 else 2 * seconds,
}


def drawn(chances: tuple[float, ...], seed: int = 0) -> list[Segment]:
    rng = random.Random(seed)
    return [Segment.drawn(str(chance), [chance] * BLOCK, TOKENS, rng) for chance in chances]


def replay(machine: str, chances: tuple[float, ...], max_draft: MaxDraft, wrong: str | None) -> Replay:
    """A policy whose curves may be wrong, or that has none (`wrong` is None); round times vary by 10 %."""
    truth, rng, known = MACHINES[machine], random.Random(99), None
    if wrong is not None:
        points = [replace(point, seconds=WRONG[wrong](point.width, point.seconds)) for point in truth.verify]
        known = replace(truth, verify=tuple(points))
    run = Machine(truth, "dspark", lambda: 1 + 0.1 * rng.uniform(-1, 1))
    return run.run(cap_policy(max_draft, [DSPARK], curves=known), drawn(chances))


@pytest.mark.parametrize(
    ("wrong", "max_draft"),
    [
        *((wrong, "auto") for wrong in (None, *WRONG)),
        *((wrong, None) for wrong in (None, "too flat")),
    ],
)
@pytest.mark.parametrize("machine", MACHINES)
def test_wrong_curves_cost_a_few_rounds(machine: str, wrong: str | None, max_draft: MaxDraft) -> None:
    run = replay(machine, (0.2, 0.9), max_draft, wrong)
    assert run.gain >= 0.95
    assert run.gain_after(128) >= (0.98 if wrong in (None, "right") else 0.96)
    if max_draft == "auto" and wrong is not None:
        assert of_oracle(MACHINES[machine], run.stretches[-1]) >= 0.9
