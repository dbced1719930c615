"""Cap policies against what could be known: on invented machines, over drawn acceptance, with right and wrong
curves. Arithmetic only, on a simulated clock."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from mlx_dspark.calibration.simulate import Machine, Replay, Segment, Stretch
from mlx_dspark.engine.acceptance import Acceptance, Pool
from mlx_dspark.engine.caps import MaxDraft, cap_policy
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint, expected_tokens
from mlx_dspark.foundation.source import Source

BLOCK = 7
DSPARK = Source("dspark", BLOCK)
TOKENS = 500
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
    **{str(chance): (chance,) for chance in (0.2, 0.5, 0.8, 0.97)},
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


@pytest.mark.parametrize("seed", [1011, 1014, 1017])
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_that_are_all_accepted_are_left_be_where_even_those_lose(machine: str, seed: int) -> None:
    truth, rng = MACHINES[machine], random.Random(seed + 5)
    run = Machine(truth, "dspark", lambda: 1 + 0.1 * rng.uniform(-1, 1))
    found = run.run(cap_policy("auto", [DSPARK], curves=truth), drawn((0.97,), seed))
    assert found.gain >= 0.95
    assert found.gain_after(32) >= 0.98


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


CONFIDENT = Source("dspark", BLOCK, confident=True)


@pytest.mark.parametrize("knows", [True, False], ids=["a head that knows", "a head that guesses"])
@pytest.mark.parametrize("chance", [0.75, 0.97])
@pytest.mark.parametrize("machine", ["flat", "steep MoE"])
def test_drafts_are_cut_by_confidence_only_where_that_pays(machine: str, chance: float, knows: bool) -> None:
    """It needs a curve that rises, drafts that fail, and a head that tells which."""
    truth, segments = MACHINES[machine], drawn((chance,) * 3)
    cuts: list[int] = []

    def cut(run: int, cap: int) -> int:
        cuts.append(cap)
        return min(cap, max(1, run)) if knows else 1

    pinned = 5
    whole = Machine(truth, "dspark").run(cap_policy(pinned, [DSPARK]), segments)
    asked = Machine(truth, "dspark", cut=cut).run(cap_policy(pinned, [CONFIDENT], curves=truth), segments)
    can_pay = machine == "steep MoE" and chance < 0.9
    assert bool(cuts) == can_pay
    assert asked.gain >= (1.1 if can_pay and knows else 0.95) * whole.gain


def test_policies_and_the_simulator_import_no_mlx() -> None:
    code = "import sys, mlx_dspark.engine.caps, mlx_dspark.calibration.simulate; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"mlx", "mlx.core", "mlx_lm", "numpy"} & set(done.stdout.split())


@pytest.mark.parametrize("max_draft", [3, 0, "auto", None])
def test_what_is_expected_of_a_round_is_what_curves_and_record_say(max_draft: MaxDraft) -> None:
    truth, recorded = MACHINES["linear"], (0.9, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6)
    row = cap_policy(max_draft, [DSPARK], curves=truth, acceptance={"dspark": recorded}).row()
    for drafted in (1, 3, BLOCK):
        outlook = row.outlook(1, "dspark", drafted, drafted + 1)
        assert outlook.gain == pytest.approx(truth.speedup(recorded, drafted, source="dspark"))
        assert outlook.plain_seconds == pytest.approx(truth.round_seconds(0, source="dspark"))
    assert row.outlook(1, "", 0, 1).gain == 1.0
    assert row.outlook(2, "dspark", 3, 4) == (None, None), "rows that were never measured"


@pytest.mark.parametrize("deep", [0, 6000])
def test_depth_narrows_the_derived_cap_where_it_was_measured_to_cost(deep: int) -> None:
    shallow = MACHINES["flat"]
    points = [replace(p, depth=8000, seconds=p.seconds * (1 + 0.3 * (p.width - 1))) for p in shallow.verify]
    truth = replace(shallow, verify=shallow.verify + tuple(points))
    policy = cap_policy(None, [DSPARK], curves=truth, acceptance={"dspark": (0.8,)})
    (stretch,) = Machine(truth, "dspark").run(policy, drawn((0.8,)), depth=deep).stretches
    usual = max(stretch.caps, key=lambda cap: stretch.caps[cap])
    assert abs(usual - truth.best_cap([0.8], source="dspark", depth=deep, limit=BLOCK)) <= 1
    assert (usual == BLOCK) == (deep == 0)


@pytest.mark.parametrize(("before", "after"), [(1.0, 0.0), (0.0, 1.0)])
def test_content_that_changes_is_noticed_within_a_few_rounds(before: float, after: float) -> None:
    acceptance = Acceptance(Pool(BLOCK), BLOCK)
    for share, rounds in ((before, 40), (after, 5)):
        for _ in range(rounds):
            acceptance.count(3, round(3 * share))
    assert abs(acceptance.chances()[0] - after) < 0.5


@pytest.mark.parametrize(
    "source", [DSPARK, Source("dspark", BLOCK, own_length=True)], ids=["block", "own length"]
)
@pytest.mark.parametrize("max_draft", ["auto", None])
def test_every_kind_of_drafter_is_parked_where_it_loses_and_probed(
    source: Source, max_draft: MaxDraft
) -> None:
    truth = MACHINES["always loses"]
    run = Machine(truth, "dspark").run(cap_policy(max_draft, [source], curves=truth), drawn((0.2, 0.5)))
    assert run.gain_after(32) >= 0.98
    for stretch in run.stretches:
        assert 0.9 * stretch.rounds < stretch.parked
        assert stretch.parked + sum(rounds for cap, rounds in stretch.caps.items() if cap) <= stretch.rounds
        assert len(stretch.caps) > 1, "probes go on"
