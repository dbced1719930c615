"""Whether a drafter is accepted as often as its pair is known for. Numbers in, a verdict out; no MLX.

A wrong slot, rope, tap or head costs half the acceptance and shows nowhere else: text stays the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

from mlx_dspark.bench.stats import VerifyRound
from mlx_dspark.catalog.pair_row import Expected

SHARE = 0.6
"""Below so much of the expected accept length, a run is well under it."""
SIGMAS = 3.0
LEAST_PROMPTS, LEAST_ROUNDS = 4, 60


@dataclass(frozen=True)
class Sample:
    """One prompt's answer: its content, and the rounds that its drafter drafted for."""

    content: str
    rounds: tuple[VerifyRound, ...]


@dataclass(frozen=True)
class GuardVerdict:
    """`low`: well under what is expected, beyond chance. `fine`: not so, beyond chance. `open`: too little
    was measured to tell, and `tokens_needed` more tokens would. `unknown`: nothing is expected of it.

    `accept_length` and `expected` are means over the same rounds.
    """

    kind: Literal["low", "fine", "open", "unknown"]
    accept_length: float | None = None
    expected: float | None = None
    rounds: int = 0
    prompts: int = 0
    tokens_needed: int = 0

    def __str__(self) -> str:
        if self.accept_length is None or self.expected is None:
            return "no accept length is recorded for what was measured"
        seen = (
            f"accept length {self.accept_length:.2f}, expected {self.expected:.2f} "
            f"({self.rounds} rounds of {self.prompts} prompts)"
        )
        if self.kind == "open":
            return f"{seen}: too little to tell; about {self.tokens_needed} more tokens are needed"
        return f"{seen}: well under it" if self.kind == "low" else seen


def judge_acceptance(samples: Sequence[Sample], expected: Mapping[str, Expected]) -> GuardVerdict:
    """What was committed against `SHARE` of what the row expects of the same rounds.

    The prompt is the unit of chance, since the rounds of one answer are alike: the mean shortfall of prompts
    must be `SIGMAS` standard errors from 0, and the errors are no smaller than those of single rounds. A
    prompt whose content the row does not know is judged by `all`, or left out.
    """
    known = [
        (sample, each)
        for sample in samples
        if sample.rounds and (each := expected.get(sample.content, expected.get("all"))) is not None
    ]
    if not known:
        return GuardVerdict("unknown")
    gaps = [
        [one.committed - SHARE * expected_commit(each, one.drafted) for one in sample.rounds]
        for sample, each in known
    ]
    rounds = sum(map(len, gaps))
    committed = sum(one.committed for sample, _ in known for one in sample.rounds)
    promised = sum(expected_commit(each, one.drafted) for sample, each in known for one in sample.rounds)
    mean, error = _mean_and_error(gaps)
    figures = (committed / rounds, promised / rounds, rounds, len(known))
    missing = max(0, LEAST_ROUNDS - rounds, (LEAST_PROMPTS - len(known)) * math.ceil(rounds / len(known)))
    if not missing and abs(mean) < SIGMAS * error:
        needed = rounds * ((SIGMAS * error / max(abs(mean), 0.05)) ** 2 - 1)
        missing = max(1, math.ceil(needed))
    if missing:
        return GuardVerdict("open", *figures, tokens_needed=math.ceil(missing * figures[0]))
    return GuardVerdict("low" if mean < 0 else "fine", *figures)


def expected_commit(expected: Expected, drafted: int) -> float:
    """Tokens that a round of so many drafts commits on average, the target's own included.

    With `reached` it is exact up to the row's cap; without, every draft has the same chance given those
    before it, the one that gives the recorded accept length.
    """
    if expected.reached:
        return 1.0 + sum(expected.reached[:drafted])
    chance = _chance(expected.accept_length, expected.cap)
    return sum(chance**i for i in range(min(drafted, expected.cap) + 1))


def _chance(accept_length: float, cap: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(cap + 1)) < accept_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _mean_and_error(gaps: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean over rounds, and the larger of its standard errors by prompt and by round."""
    flat = [gap for prompt in gaps for gap in prompt]
    mean = fmean(flat)
    by_round = math.sqrt(variance(flat) / len(flat)) if len(flat) > 1 else math.inf
    if len(gaps) < 2:
        return mean, by_round
    totals = [sum(gap - mean for gap in prompt) for prompt in gaps]
    spread = sum(total**2 for total in totals) * len(gaps) / (len(gaps) - 1)
    return mean, max(by_round, math.sqrt(spread) / len(flat))
