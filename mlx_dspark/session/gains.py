"""What drafting brought an answer, against plain decoding: as it was expected, and as it came. No MLX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from mlx_dspark.foundation.events import RoundReport


@dataclass(frozen=True, slots=True)
class Gains:
    """Tokens per second as multiples of plain decoding; None where no plain round was ever timed."""

    predicted: float | None = None
    observed: float | None = None

    @classmethod
    def of(cls, decoding: Sequence[RoundReport], begun_at: float) -> Self:
        """From an answer's rounds after its prompt, in order; `begun_at` is when the one before them landed.

        A round stands for `committed` plain rounds, and took its own seconds; one that was launched before
        its predecessor landed is charged from then on. Rounds of which no plain price was known are left out.
        `observed` is at most the tokens that a round committed: no round takes less than a plain one.
        """
        plain_rounds = expected = told = waited = rounds = 0.0
        for report in decoding:
            seconds = report.landed_at - max(report.launched_at, begun_at)
            begun_at, (gain, plain) = report.landed_at, report.outlook
            if not plain:
                continue
            waited += seconds / plain
            plain_rounds += report.committed
            rounds += 1
            if gain is not None:
                expected += gain * seconds / plain
                told += seconds / plain
        observed = min(plain_rounds / waited, plain_rounds / rounds) if waited else None
        return cls(expected / told if told else None, observed)


def rounds_by_cap(decoding: Iterable[RoundReport]) -> dict[int, int]:
    """By cap, in order, the rounds that drafted under it; 0 for those that did not draft."""
    return dict(sorted(Counter(report.cap if report.drafted else 0 for report in decoding).items()))
