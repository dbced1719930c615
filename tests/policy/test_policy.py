"""Cap policies against what could be known: on invented machines, over drawn acceptance. Arithmetic only,
on a simulated clock; `tests/laws/test_wrong_curves.py` has curves that are off."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.five_machines import BAD, BLOCK, DSPARK, GOOD, MACHINES, TOKENS, of_oracle
from mlx_dspark.calibration.simulate import Machine, Replay, Segment
from mlx_dspark.engine.acceptance import Acceptance, Pool
from mlx_dspark.engine.caps import MaxDraft, cap_policy
from mlx_dspark.foundation.source import Source

TRACES: dict[str, tuple[float, ...]] = {
    **{str(chance): (chance,) for chance in (0.2, 0.5, 0.8, 0.97)},
    "drifting": (0.2, 0.5, 0.8, 0.95, 0.8, 0.5, 0.2),
    "alternating": (BAD, GOOD) * 2,
}


@cache
def drawn(chances: tuple[float, ...], seed: int = 0) -> list[Segment]:
    rng = random.Random(seed)
    return [Segment.drawn(str(chance), [chance] * BLOCK, TOKENS, rng) for chance in chances]


def replay(machine: str, chances: tuple[float, ...], max_draft: MaxDraft) -> Replay:
    """A policy with the right curves; round times vary by 10 %."""
    truth, rng = MACHINES[machine], random.Random(99)
    run = Machine(truth, "dspark", lambda: 1 + 0.1 * rng.uniform(-1, 1))
    return run.run(cap_policy(max_draft, [DSPARK], curves=truth), drawn(chances))


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("machine", MACHINES)
def test_auto_comes_near_the_best_cap_and_loses_to_plain_nowhere(machine: str, trace: str) -> None:
    """Segments of one content are taken together, since how soon it is told from the last one is luck."""
    run = replay(machine, TRACES[trace], "auto")
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
