"""Cap policies against their bars, on machines, contents and curves that none was tuned on.

    python benchmarks/policy_bars.py                       200 requests, with right and wrong curves
    python benchmarks/policy_bars.py --seed 7 --requests 50 --policy derived
    python benchmarks/policy_bars.py --show 5              the worst ones, segment by segment

The bars: 0.95 of the best constant cap on every segment, in expectation; 0.98 of plain decoding after the
first 32 rounds, and 0.95 of it altogether. The best constant cap is known to nobody beforehand.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mlx_dspark.calibration.simulate import Machine, Replay, Segment
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint, expected_tokens
from mlx_dspark.foundation.events import RoundReport
from mlx_dspark.foundation.source import Source

OF_ORACLE, OF_PLAIN, ALTOGETHER = 0.95, 0.98, 0.95
WARM_UP = 32
SOURCE = "dspark"
DEEPEST = 24_000

Price = Callable[[int], float]
"""Of a width, as a multiple of a plain round."""


def plateau(rng: random.Random) -> Price:
    """Nearly free up to some width, then a cliff."""
    last, cliff, slope = rng.randint(2, 9), rng.uniform(0.3, 1.6), rng.uniform(0.0, 0.25)
    flat = rng.uniform(0.005, 0.04)
    return lambda w: 1 + flat * (w - 1) + (cliff + slope * (w - last) if w > last else 0.0)


def linear(rng: random.Random) -> Price:
    slope = rng.choice((0.03, 0.1, 0.2, 0.35, 0.6, 1.0)) * rng.uniform(0.8, 1.25)
    return lambda w: 1 + slope * (w - 1)


def concave(rng: random.Random) -> Price:
    """As experts that are read by more and more tokens."""
    first, bend = rng.uniform(0.2, 0.7), rng.uniform(0.5, 0.9)
    return lambda w: 1 + first * (w - 1) ** bend


def saddle(rng: random.Random) -> Price:
    """Dear up to some width, and cheaper after it, where another kernel takes over."""
    last, slope, then = rng.randint(3, 7), rng.uniform(0.25, 0.6), rng.uniform(1.3, 2.2)
    return lambda w: 1 + slope * (w - 1) if w <= last else then + 0.02 * (w - last)


MACHINES = (plateau, linear, concave, saddle)

WRONG: Mapping[str, Callable[[int, float], float] | None] = {
    "right": lambda _, seconds: seconds,
    "half": lambda _, seconds: seconds / 2,
    "double": lambda _, seconds: 2 * seconds,
    "plain double": lambda width, seconds: 2 * seconds if width == 1 else seconds,
    "wide double": lambda width, seconds: seconds if width == 1 else 2 * seconds,
    "wide half": lambda width, seconds: seconds if width == 1 else seconds / 2,
    "none": None,
}
"""How the stored curves are off."""


@dataclass(frozen=True)
class Request:
    """One drawn request: a machine whose prices may drift with depth, and contents one after another."""

    kind: str
    block: int
    truth: CostCurves
    chances: tuple[tuple[float, ...], ...]
    segments: tuple[Segment, ...]
    noise: float
    seed: int

    @classmethod
    def drawn(cls, seed: int) -> Request:
        rng = random.Random(seed)
        kind, block = rng.choice(MACHINES), rng.choice((7, 7, 15))
        truth = _truth(rng, kind(rng), block)
        chances = tuple(_chances(rng, block) for _ in range(rng.randint(1, 5)))
        lengths = [
            3000 if each[0] < 0.2 and rng.random() < 0.5 else rng.randint(500, 3000) for each in chances
        ]
        segments = tuple(
            Segment.drawn(f"{each[0]:.2f}", each, tokens, rng)
            for each, tokens in zip(chances, lengths, strict=True)
        )
        return cls(kind.__name__, block, truth, chances, segments, rng.uniform(0.05, 0.15), seed)

    def run(self, max_draft: str | None, wrong: str) -> Outcome:
        """What a policy makes of it with curves that are off in this way."""
        rng, caps = random.Random(self.seed + 1), _Watched(max_draft, self.block, self._stored(wrong))
        machine = Machine(self.truth, SOURCE, lambda: max(0.2, rng.gauss(1, self.noise)))
        return Outcome(self, wrong, machine.run(caps, self.segments), tuple(caps.seen))

    def _stored(self, wrong: str) -> CostCurves | None:
        """The curves as they were measured: at no depth, and off."""
        off = WRONG[wrong]
        if off is None:
            return None
        verify = [replace(p, seconds=off(p.width, p.seconds)) for p in self.truth.verify if p.depth == 0]
        draft = tuple(p for p in self.truth.draft[SOURCE] if p.depth == 0)
        if wrong in ("half", "double"):
            draft = tuple(replace(p, seconds=off(2, p.seconds)) for p in draft)
        return replace(self.truth, verify=tuple(verify), draft={SOURCE: draft})

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.truth, SOURCE)


def _truth(rng: random.Random, price: Price, block: int) -> CostCurves:
    plain, first, more = rng.uniform(0.008, 0.06), rng.uniform(0.03, 0.4), rng.uniform(0.0, 0.04)
    hotter, steeper = rng.choice(
        ((0.0, 0.0), (0.0, 0.0), (0.35, 0.0), (-0.2, 0.0), (0.1, 0.05), (0.0, -0.02))
    )
    verify = []
    for width in range(1, block + 2):
        for depth, share in ((0, 0.0), (DEEPEST, 1.0)):
            drift = max(0.6, 1 + share * (hotter + steeper * (width - 1)))
            verify.append(VerifyPoint(1, width, depth, plain * price(width) * drift, 0.0))
    draft = tuple(DraftPoint(1, cap, 0, plain * (first + more * (cap - 1)), 0.0) for cap in (1, block))
    return CostCurves(tuple(verify), {SOURCE: draft}, 0.01 * plain, 0.0)


def _chances(rng: random.Random, block: int) -> tuple[float, ...]:
    first = rng.choice((0.03, 0.15, 0.3, 0.45, 0.6, 0.75, 0.88, 0.96)) + rng.uniform(-0.03, 0.03)
    slope = rng.choice((0.0, -0.03, 0.02))
    return tuple(min(0.98, max(0.02, first + slope * i)) for i in range(block))


class _Watched:
    """A policy of one row, as policy and caps, that remembers the depth and cap of every round."""

    def __init__(self, max_draft: str | None, block: int, curves: CostCurves | None) -> None:
        asked = "auto" if max_draft == "auto" else None
        row = self._row = cap_policy(asked, [Source(SOURCE, block)], curves=curves).row()
        self.seen: list[tuple[int, int]] = []
        self.caps, self.parked, self.measuring = row.caps, row.parked, row.measuring
        self.thresholds, self.outlook, self.settled = row.thresholds, row.outlook, row.settled

    def row(self) -> _Watched:
        return self

    def observe(self, report: RoundReport) -> None:
        self.seen.append((report.depth, report.cap))
        self._row.observe(report)


@dataclass(frozen=True)
class Outcome:
    """What came of a request."""

    request: Request
    wrong: str
    replay: Replay
    rounds: tuple[tuple[int, int], ...]

    @property
    def altogether(self) -> float:
        return self.replay.gain

    @property
    def warm(self) -> float:
        return self.replay.gain_after(WARM_UP)

    @cached_property
    def of_oracle(self) -> list[float]:
        """Per segment, what its caps are expected to bring as a share of what the best constant cap would:
        luck with drafts and round times is left out."""
        shares, begin, at = [], 0, 0
        for chances, stretch in zip(self.request.chances, self.replay.stretches, strict=True):
            rounds = self.rounds[at : at + stretch.rounds]
            shares.append(self._rate(chances, rounds) / self._best(chances, begin, begin + stretch.tokens))
            at, begin = at + stretch.rounds, begin + stretch.tokens
        return shares

    def _rate(self, chances: Sequence[float], rounds: Sequence[tuple[int, int]]) -> float:
        machine = self.request.machine
        tokens = {cap: expected_tokens(chances, cap) for cap in range(self.request.block + 1)}
        plain = sum(tokens[cap] * machine.seconds(0, depth) for depth, cap in rounds)
        return plain / sum(machine.seconds(cap, depth) for depth, cap in rounds)

    def _best(self, chances: Sequence[float], begin: int, end: int) -> float:
        depths = range(begin, end, 128)
        return max(
            self._rate(chances, [(depth, cap) for depth in depths]) for cap in range(self.request.block + 1)
        )

    @property
    def failures(self) -> list[str]:
        """The bars that were missed."""
        segments = [share for share in self.of_oracle if share < OF_ORACLE]
        return [
            *(f"segment at {share:.3f} of the oracle" for share in segments),
            *([f"{self.warm:.3f} of plain after {WARM_UP} rounds"] if self.warm < OF_PLAIN else []),
            *([f"{self.altogether:.3f} of plain altogether"] if self.altogether < ALTOGETHER else []),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1_000_000)
    parser.add_argument("--policy", choices=("auto", "derived"), default="auto")
    parser.add_argument("--wrong", action="append", choices=WRONG)
    parser.add_argument("--show", type=int, default=0, help="of the worst requests, the segments")
    args = parser.parse_args()
    requests = [Request.drawn(args.seed + i) for i in range(args.requests)]
    columns = ("curves", "segments", "< .95", "least", "mean", "warm < .98", "least", "all < .95", "least")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    missed: list[Outcome] = []
    for wrong in args.wrong or WRONG:
        outcomes = [request.run(args.policy, wrong) for request in requests]
        missed += [outcome for outcome in outcomes if outcome.failures]
        print(f"| {wrong} | {' | '.join(_row(outcomes))} |", flush=True)
    for outcome in sorted(missed, key=lambda each: min(each.of_oracle))[: args.show]:
        _show(outcome)


def _row(outcomes: Sequence[Outcome]) -> list[str]:
    shares = [share for outcome in outcomes for share in outcome.of_oracle]
    warm, altogether = [each.warm for each in outcomes], [each.altogether for each in outcomes]
    return [
        str(len(shares)),
        f"{sum(share < OF_ORACLE for share in shares) / len(shares):.1%}",
        f"{min(shares):.3f}",
        f"{sum(shares) / len(shares):.3f}",
        f"{sum(each < OF_PLAIN for each in warm)}",
        f"{min(warm):.3f}",
        f"{sum(each < ALTOGETHER for each in altogether)}",
        f"{min(altogether):.3f}",
    ]


def _show(outcome: Outcome) -> None:
    request = outcome.request
    machine = request.machine
    prices = " ".join(f"{machine.seconds(cap) / machine.seconds(0):.2f}" for cap in range(request.block + 1))
    print(f"\nseed {request.seed}, {request.kind}, curves {outcome.wrong}, noise {request.noise:.0%}")
    print(f"rounds by cap: {prices}\nmissed: {'; '.join(outcome.failures)}")
    for chances, stretch, share in zip(
        request.chances, outcome.replay.stretches, outcome.of_oracle, strict=True
    ):
        gains = [
            expected_tokens(chances, cap) * machine.seconds(0) / machine.seconds(cap)
            for cap in range(request.block + 1)
        ]
        best = max(range(request.block + 1), key=lambda cap: gains[cap])
        usual = sorted(stretch.caps.items(), key=lambda each: -each[1])[:5]
        print(
            f"  {chances[0]:.2f}..{chances[-1]:.2f} {stretch.tokens:5d} tokens: {share:.3f} of cap {best} at "
            f"{gains[best]:.2f}; caps {', '.join(f'{cap} x{rounds}' for cap, rounds in usual)}"
        )


if __name__ == "__main__":
    main()
