"""Round prices of machines that are not at hand, for `simulate.py`. Each says where its figures come from.

Measured ones are forwards that were timed. Invented ones fit a published result: at a cap, a round takes
`accept length / tokens per second`. Between the figures they are drawn by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint


@dataclass(frozen=True)
class Figures:
    """`plain` seconds of a plain round; a round of each width as a multiple of it; a draft likewise: of one
    token, and what each further one adds. `source` says where that is from."""

    plain: float
    widths: Mapping[int, float]
    draft: tuple[float, float]
    source: str

    def curves(self, name: str = "dspark", limit: int = 7) -> CostCurves:
        verify = [VerifyPoint(1, width, 0, self.plain * times, 0.0) for width, times in self.widths.items()]
        first, more = self.draft
        draft = [DraftPoint(1, cap, 0, self.plain * (first + more * (cap - 1)), 0.0) for cap in (1, limit)]
        return CostCurves(tuple(verify), {name: tuple(draft)}, 0.0, 0.0)


_H200 = "measured: an 8B model, random weights, 512 tokens of context, stock MLX 0.32.4; draft invented"


def _of_milliseconds(*times: float) -> dict[int, float]:
    widths = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32)
    return {width: ms / times[0] for width, ms in zip(widths, times, strict=True)}


MACHINES = {
    "M1, 4-bit": Figures(
        0.050,
        {1: 1.0, 2: 1.85, 4: 3.5, 8: 6.8},
        (0.15, 0.02),
        "invented: users report that no cap beats plain, as where each row reads the weights again",
    ),
    "M2, 2-bit 27B": Figures(
        0.039,
        {1: 1.0, 2: 1.6, 3: 2.2, 5: 3.4, 8: 5.2},
        (0.15, 0.04),
        "invented after an M4 Pro, 2-bit 27B: 25.4 tok/s plain, 27.2 at cap 2 with accept length 2.60",
    ),
    "M3, 8-bit 8B": Figures(
        0.0356,
        {1: 1.0, 2: 1.04, 3: 1.08, 4: 1.12, 5: 1.16, 6: 1.85, 7: 2.1, 8: 2.3},
        (0.2, 0.02),
        "invented after an M4 Pro without its own kernel: 28.1 tok/s plain, 57.7 at cap 4 with accept length "
        "2.94, and a cliff from width 5 to 6",
    ),
    "M4 Pro, 8-bit 27B": Figures(
        0.1205,
        {1: 1.0, 2: 1.06, 4: 1.12, 8: 1.22},
        (0.2, 0.012),
        "invented after an M4 Pro: 8.3 tok/s plain, 22.6 at cap 7 with accept length 4.05",
    ),
    "M4 Pro, 4-bit 27B": Figures(
        0.0676,
        {1: 1.0, 2: 1.12, 4: 1.34, 5: 1.40, 8: 1.45},
        (0.5, 0.05),
        "invented after an M4 Pro: 14.8 tok/s plain, 29.5 at cap 7 with accept length 4.49; 5 to 8 rows at "
        "1.4",
    ),
    "M4 Pro, 4-bit MoE": Figures(
        0.0115,
        {1: 1.0, 2: 1.55, 4: 2.6, 8: 4.3, 16: 5.8},
        (0.3, 0.03),
        "invented after an M4 Pro, 35B-A3B: 86.9 tok/s plain; blocks of 8 at 95 tok/s with accept length "
        "5.2, of 16 at 80 with 5.8",
    ),
    "M5 Max, 8-bit 27B": Figures(
        0.060,
        {1: 1.0, 2: 1.03, 3: 1.06, 4: 1.5, 5: 1.9, 8: 2.9},
        (0.15, 0.02),
        "invented: published as picking cap 2, where 7 is a small loss",
    ),
    "H200, bf16 8B": Figures(
        0.0097,
        _of_milliseconds(9.7, 17.6, 16.8, 16.3, 16.4, 16.4, 12.3, 17.5, 16.6, 11.9, 12.4, 12.5),
        (0.15, 0.02),
        _H200,
    ),
    "H200, 8-bit 8B": Figures(
        0.0088,
        _of_milliseconds(8.8, 13.0, 16.2, 20.5, 23.1, 26.6, 30.4, 19.7, 18.0, 20.1, 20.2, 25.2),
        (0.15, 0.02),
        _H200,
    ),
    "H200, 4-bit 8B": Figures(
        0.0122,
        _of_milliseconds(12.2, 16.9, 21.4, 25.0, 30.2, 35.5, 39.6, 22.7, 22.5, 22.2, 21.7, 30.7),
        (0.15, 0.02),
        _H200,
    ),
    "CPU, dense": Figures(
        1 / 15,
        {1: 1.0, 2: 1.20, 4: 1.54, 8: 1.7, 16: 1.8},
        (0.2, 0.03),
        "measured: the default model on two x86 cores, dense float32 over OpenBLAS; draft invented",
    ),
    "CPU, packed": Figures(
        1 / 6.8,
        {1: 1.0, 2: 1.95, 4: 3.9, 8: 7.6, 16: 15.0},
        (0.2, 0.03),
        "measured: the default model on two x86 cores, MLX's own 4-bit loops; draft invented",
    ),
}

CHANCES = {
    "chat": (0.40, 0.33, 0.38, 0.40, 0.45, 0.45, 0.45),
    "code": (0.65, 0.57, 0.68, 0.64, 0.69, 0.55, 0.67),
    "math": (0.53, 0.64, 0.68, 0.61, 0.64, 0.67, 0.83),
    "poor": (0.2,) * 7,
    "good": (0.8,) * 7,
    "copying": (0.97,) * 7,
}
"""Chances by position. The first three are of the drafter shipped with the default model, from its card."""
