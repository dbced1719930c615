"""Cap policies on numbers alone: plain is always a candidate, a losing source is parked, a pin is a pin."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mlx_dspark.contracts import Source
from mlx_dspark.engine.caps import LiveCaps, RoundTimes, cap_policy
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.events import RoundReport

BLOCK = Source("dspark", 7)
LOOKUP = Source("lookup", 32, own_length=True)


class Machine:
    """A simulated machine: `cost(width)` seconds a round, drafts accepted with probability `p` each."""

    def __init__(self, cost: Callable[[int], float], p: float, seed: int = 0, noise: float = 0.0) -> None:
        self.cost, self.p, self.noise = cost, p, noise
        self.rng = random.Random(seed)
        self.clock = 0.0

    def run(self, policy: LiveCaps, source: Source, tokens: int) -> tuple[float, list[int]]:
        """Seconds for `tokens` tokens, and the cap of every round."""
        row, produced, caps, start = policy.row(), 0, [], self.clock
        while produced < tokens:
            cap = row.caps()[source.name]
            accepted = 0
            while accepted < cap and self.rng.random() < self.p:
                accepted += 1
            launched = self.clock
            self.clock += self.cost(cap + 1) * (1 + self.noise * self.rng.uniform(-1, 1))
            row.observe(
                RoundReport(
                    launched,
                    self.clock,
                    1,
                    cap + 1,
                    1,
                    cap,
                    cap,
                    accepted,
                    accepted + 1,
                    produced,
                    source.name if cap else "",
                )
            )
            produced += accepted + 1
            caps.append(cap)
        return self.clock - start, caps


def flat(width: int) -> float:
    return 0.010 + 0.0002 * width


def steep(width: int) -> float:
    return 0.010 * width


CHOOSERS = pytest.mark.parametrize("choose", [False, True], ids=["derived", "auto"])


@CHOOSERS
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("cost", [flat, steep], ids=["flat", "steep"])
def test_never_much_slower_than_plain(
    cost: Callable[[int], float], p: float, noise: float, choose: bool
) -> None:
    seconds, _ = Machine(cost, p, noise=noise).run(LiveCaps([BLOCK], choose=choose), BLOCK, 3000)
    assert seconds <= 3000 * cost(1) / 0.97


@CHOOSERS
def test_a_good_drafter_on_a_flat_curve_is_used_throughout(choose: bool) -> None:
    seconds, caps = Machine(flat, 0.9).run(LiveCaps([BLOCK], choose=choose), BLOCK, 1000)
    assert seconds < 1000 * flat(1) / 4
    assert caps.count(0) <= 3


@CHOOSERS
def test_a_losing_drafter_is_parked_and_probed(choose: bool) -> None:
    _, caps = Machine(steep, 0.1).run(LiveCaps([BLOCK], choose=choose), BLOCK, 2000)
    assert caps.count(0) > 0.97 * len(caps)
    assert any(caps[1000:]), "probes go on"


@CHOOSERS
def test_content_that_turns_good_is_found_again(choose: bool) -> None:
    machine, policy = Machine(flat, 0.0), LiveCaps([BLOCK], choose=choose)
    row_seconds, _ = machine.run(policy, BLOCK, 200)
    machine.p = 0.9
    after, caps = machine.run(policy, BLOCK, 1000)
    assert row_seconds > 0
    assert caps.count(0) < 50
    assert after < 1000 * flat(1) / 3


def test_auto_shortens_drafts_where_width_costs() -> None:
    def knee(width: int) -> float:
        return 0.010 * (1.1 if width <= 4 else 1.1 + 0.6 * (width - 4))

    machine, policy = Machine(knee, 0.7, noise=0.05), LiveCaps([BLOCK], choose=True)
    _, caps = machine.run(policy, BLOCK, 2000)
    late = [cap for cap in caps[200:] if cap]
    assert late
    assert sum(late) / len(late) < 5.5


def test_rows_learn_apart_and_sources_are_parked_apart() -> None:
    policy = LiveCaps([BLOCK, LOOKUP], choose=False)
    good, bad = policy.row(), policy.row()
    clock = 0.0

    def tell(row: object, source: str, drafted: int, accepted: int) -> None:
        nonlocal clock
        report = RoundReport(
            clock,
            clock + flat(drafted + 1),
            1,
            drafted + 1,
            1,
            drafted,
            drafted,
            accepted,
            accepted + 1,
            9,
            source,
        )
        clock += flat(drafted + 1)
        row.observe(report)  # type: ignore[attr-defined]

    for _ in range(4):
        tell(good, "", 0, 0)
    for _ in range(8):
        tell(bad, "dspark", 7, 0)
    assert bad.caps()["dspark"] == 0
    assert bad.caps()["lookup"] == 32
    assert good.caps()["dspark"] == 7


def test_rounds_that_the_reader_held_up_are_no_samples() -> None:
    times = RoundTimes()
    times.charge(RoundReport(0.0, 1.0, 1, 1, 1, 0, 0, 0, 1, 9, waited=0.05))
    times.charge(RoundReport(1.0, 9.0, 1, 1, 1, 0, 0, 0, 1, 9, waited=7.0))
    assert times.seconds(1, 1) == pytest.approx(1.0)


def test_round_times_charge_overlapping_rounds_once() -> None:
    times = RoundTimes()

    def report(launched: float, landed: float, width: int = 1) -> RoundReport:
        return RoundReport(launched, landed, 1, width, 1, 0, width - 1, 0, 1, 9)

    assert times.charge(report(0.0, 1.0)) == pytest.approx(1.0)
    assert times.charge(report(0.5, 1.8)) == pytest.approx(0.8)
    assert times.charge(report(0.5, 1.8)) == pytest.approx(0.8), "asked again by another row"
    assert times.seconds(1, 1) == pytest.approx(0.9)
    assert times.seconds(1, 5) is None
    times.charge(report(2.0, 4.0, 9))
    assert times.seconds(1, 5) == pytest.approx((0.9 + 2.0) / 2)
    assert times.seconds(2, 1) is None


@pytest.mark.parametrize(("pinned", "wanted"), [(3, 3), (0, 7), (99, 7)])
def test_a_pinned_number_is_never_overridden(pinned: int, wanted: int) -> None:
    row = cap_policy(pinned, [BLOCK]).row()
    for i in range(50):
        assert row.caps() == {"dspark": wanted}
        row.observe(RoundReport(i, i + 0.9, 1, wanted + 1, 1, wanted, wanted, 0, 1, i, "dspark"))


@pytest.mark.parametrize("wrong", [-1, "fast", 1.5, True])
def test_anything_else_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="max_draft"):
        cap_policy(wrong, [BLOCK])  # type: ignore[arg-type]
