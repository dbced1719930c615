"""Whether a drafter is accepted as often as its pair is known for. Numbers in, a verdict out; no MLX.

A wrong slot, rope, tap or head costs acceptance and shows nowhere else: text stays the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from mlx_dspark.bench.stats import VerifyRound
from mlx_dspark.catalog.pair_row import ALL, Expected

SHARE = math.sqrt(0.5)
"""As far, in ratios, from a drafter that is as good as its row as from one that lost half of its drafts."""
WIDE = 0.5
"""The share in the place of `SHARE` where a right drafter may be some way off what is expected of it."""
CERTAINTY = 0.99
"""On each side of the interval."""
LEAST_PROMPTS = 5
NEAR = 0.05
"""Shares this close to the threshold are not told apart from it, whatever is measured."""


@dataclass(frozen=True)
class Sample:
    """One prompt's answer: its content, and the rounds that its drafter drafted for."""

    content: str
    rounds: tuple[VerifyRound, ...]


@dataclass(frozen=True)
class GuardVerdict:
    """`low`: fewer than `threshold` of the expected drafts were accepted, beyond chance. `fine`: more, beyond
    chance. `open`: too little was measured to tell, and `tokens_needed` more tokens would. `unknown`:
    nothing is expected of it.

    `accept_length` and `expected` are means over the same rounds; `share` is what was accepted of the drafts
    that are expected to be. Its `interval`, None for a single prompt, leaves out 1 - `CERTAINTY` on each
    side. `against` says what it was compared with, where that is not the row's accept lengths by content.
    """

    kind: Literal["low", "fine", "open", "unknown"]
    accept_length: float | None = None
    expected: float | None = None
    share: float | None = None
    interval: tuple[float, float] | None = None
    rounds: int = 0
    prompts: int = 0
    tokens_needed: int = 0
    threshold: float = SHARE
    against: str = ""

    def __str__(self) -> str:
        if self.accept_length is None or self.share is None:
            return "no accept length is recorded for what was measured"
        within = "" if self.interval is None else "{:.0%} to {:.0%}; ".format(*self.interval)
        seen = (
            f"accept length {self.accept_length:.2f}, expected {self.expected:.2f}: {self.share:.0%} of the "
            f"expected drafts accepted ({within}{self.rounds} rounds of {self.prompts} prompts)"
        )
        if self.against:
            seen += f", compared with {self.against}, so only less than {self.threshold:.0%} is told"
        if self.kind == "open":
            return f"{seen}, too little to tell: about {self.tokens_needed} more tokens are needed"
        return f"{seen}, well under it" if self.kind == "low" else seen


def judge_acceptance(samples: Sequence[Sample], expected: Mapping[str, Expected]) -> GuardVerdict:
    """The drafts that were accepted, as a share of those that the row expects of the same rounds.

    A ratio of sums over prompts, which are the unit of chance since the rounds of one answer are alike:
    its interval is Student's, over the prompts' own residuals (Cochran, Sampling Techniques, 2.11 and 6.4).
    Of longer drafts than the row's cap only so many count, on both sides.
    A prompt whose content the row does not know is judged by `all`, or left out. One loose expectation makes
    the threshold `WIDE`.
    """
    known = [
        (sample.rounds, each)
        for sample in samples
        if sample.rounds and (each := expected.get(sample.content, expected.get(ALL))) is not None
    ]
    against = _loose_sources(each for _, each in known)
    threshold = WIDE if against else SHARE
    pairs = [
        (
            float(sum(min(one.committed - 1, each.cap) for one in rounds)),
            sum(expected_commit(each, one.drafted) - 1 for one in rounds),
        )
        for rounds, each in known
    ]
    accepted, promised = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    if not promised:
        return GuardVerdict("unknown")
    share, rounds, prompts = accepted / promised, sum(len(each) for each, _ in known), len(pairs)
    margin = _margin(pairs, share, threshold)
    interval = (max(0.0, share - margin), share + margin) if prompts > 1 else None
    figures = (1 + accepted / rounds, 1 + promised / rounds, share, interval)
    terms = {"threshold": threshold, "against": against}
    if prompts >= LEAST_PROMPTS and margin < abs(share - threshold):
        return GuardVerdict("low" if share < threshold else "fine", *figures, rounds, prompts, **terms)
    longer = (margin / max(abs(share - threshold), NEAR)) ** 2 if prompts > 1 else 0.0
    more = max(longer, LEAST_PROMPTS / prompts) - 1
    needed = max(1, math.ceil(more * (rounds + accepted)))
    return GuardVerdict("open", *figures, rounds, prompts, needed, **terms)


def _loose_sources(expected: Iterable[Expected]) -> str:
    """What loose expectations are of, in words; empty where all are by content, of the row's own target."""
    named = dict.fromkeys(each.basis or "one mean over contents" for each in expected if each.loose)
    return "; ".join(named)


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


def _margin(pairs: Sequence[tuple[float, float]], share: float, threshold: float) -> float:
    """Half the interval of a share, over (accepted, expected) by prompt.

    Its error is no smaller than that of as many drafts that are accepted each by itself, so that prompts
    which happen to be alike are not taken for certain.
    """
    promised, prompts = sum(each for _, each in pairs), len(pairs)
    if prompts < 2:
        return math.inf
    residual = sum((accepted - share * each) ** 2 for accepted, each in pairs)
    by_prompt = math.sqrt(residual * prompts / (prompts - 1)) / promised
    return student(CERTAINTY, prompts - 1) * max(by_prompt, math.sqrt(max(share, threshold) / promised))


def student(certainty: float, freedom: int) -> float:
    """The quantile of Student's t, by its expansion around the normal one (Abramowitz and Stegun, 26.7.5).

    Within 1 % for 4 degrees of freedom and more, up to a certainty of 0.99.
    """
    z = NormalDist().inv_cdf(certainty)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
