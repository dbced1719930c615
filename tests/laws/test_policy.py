"""Cap policies against what could be known: on invented machines, over drawn acceptance, with right and wrong
curves. Arithmetic only, on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from mlx_dspark.calibration.simulate import Machine, Replay, Segment, Stretch
from mlx_dspark.engine.caps import MaxDraft, cap_policy
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint, expected_tokens
from mlx_dspark.foundation.source import Source

BLOCK = 7
DSPARK = Source("dspark", BLOCK)
TOKENS = 600
OVERHEAD = 0.0002


def curves(verify: Callable[[int], float], draft: Callable[[int], float]) -> CostCurves:
    return CostCurves(
        tuple(VerifyPoint(1, width, 0, verify(width), 0.0) for width in range(1, BLOCK + 2)),
        {"dspark": tuple(DraftPoint(1, cap, 0, draft(cap), 0.0) for cap in range(1, BLOCK + 1))},
        OVERHEAD,
        0.0,
    )


MACHINES = {
    "flat": curves(lambda w: 0.010 + 0.0002 * w, lambda _: 0.001),
    "linear": curves(lambda w: 0.008 + 0.002 * w, lambda c: 0.0005 + 0.0002 * c),
    "knee at 6": curves(lambda w: 0.0100 + 0.0002 * min(w - 1, 5) + 0.0045 * max(0, w - 6), lambda _: 0.0008),
    "steep MoE": curves(lambda w: 0.010 * (1 + 0.42 * (w - 1) ** 0.9), lambda _: 0.0006),
    "always loses": curves(lambda w: 0.010 * w, lambda _: 0.002),
}

TRACES: dict[str, tuple[float, ...]] = {
    **{str(chance): (chance,) * 2 for chance in (0.2, 0.5, 0.8, 0.97)},
    "drifting": (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 0.8, 0.65, 0.5, 0.35, 0.2),
    "alternating": (0.2, 0.9) * 3,
}

WRONG: dict[str, Callable[[int, float], float]] = {
    "right": lambda _, seconds: seconds,
    "measured hot": lambda _, seconds: 2 * seconds,
    "half": lambda _, seconds: seconds / 2,
    "too flat": lambda width, seconds: seconds / (1 + 0.12 * (width - 1)),
    "too steep": lambda width, seconds: seconds * (1 + 0.12 * (width - 1)),
    "plain measured hot": lambda width, seconds: 2 * seconds if width == 1 else seconds,
    "all but plain measured hot": lambda width, seconds: seconds if width == 1 else 2 * seconds,
}


@cache
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


def of_oracle(truth: CostCurves, stretch: Stretch) -> float:
    """What the caps of a stretch are expected to bring, as a share of what the best constant cap would."""
    chances, machine = [float(stretch.name)], Machine(truth, "dspark")
    tokens = sum(rounds * expected_tokens(chances, cap) for cap, rounds in stretch.caps.items())
    seconds = sum(rounds * machine.seconds(cap) for cap, rounds in stretch.caps.items())
    best = max(truth.speedup(chances, cap, source="dspark") or 0.0 for cap in range(BLOCK + 1))
    return tokens / seconds * machine.seconds(0) / best


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("machine", MACHINES)
def test_auto_comes_near_the_best_cap_and_loses_to_plain_nowhere(machine: str, trace: str) -> None:
    """Segments of one content are taken together, since how soon it is told from the last one is luck."""
    run = replay(machine, TRACES[trace], "auto", "right")
    assert run.gain >= 0.95
    assert run.gain_after(32) >= 0.98
    for chance in set(TRACES[trace]):
        reached = [of_oracle(MACHINES[machine], s) for s in run.stretches if s.name == str(chance)]
        assert sum(reached) / len(reached) >= 0.95, (chance, reached)


@pytest.mark.parametrize("max_draft", ["auto", None])
@pytest.mark.parametrize("wrong", [None, *WRONG])
@pytest.mark.parametrize("machine", MACHINES)
def test_wrong_curves_cost_a_few_rounds(machine: str, wrong: str | None, max_draft: MaxDraft) -> None:
    run = replay(machine, (0.2, 0.9), max_draft, wrong)
    assert run.gain >= 0.95
    assert run.gain_after(128) >= (0.98 if wrong in (None, "right") else 0.96)
    if max_draft == "auto" and wrong is not None:
        assert of_oracle(MACHINES[machine], run.stretches[-1]) >= 0.9
