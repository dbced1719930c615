"""What it costs that a draft may come: rounds held back for sources that find one now and then. No MLX."""

from __future__ import annotations

from math import ceil

from mlx_dspark.engine.times import RoundTimes

PlainRounds = float
"""Time as a multiple of what a plain round takes that was launched ahead."""


class Standby:
    """Whether sources that find a draft now and then are asked, by number of rows.

    Where one might find a draft, the next round can not be launched before the last has landed, and more
    rows make that likelier. What such rounds lose is set against what drafts bring. Where that is MOST below
    nothing, nobody is asked for so long that the loss stays within SHARE of plain decoding.
    """

    MOST: PlainRounds = 4.0
    SHARE = 0.01
    UNKNOWN, SEEN = 16, 4
    """Rounds held back without knowing what that costs; then so many in which nobody is asked show it."""

    def __init__(self, times: RoundTimes) -> None:
        self._times = times
        self._balance: dict[int, PlainRounds] = {}
        self._left: dict[int, int] = {}
        self._unknown: dict[int, int] = {}

    def over(self, rows: int) -> bool:
        """Whether nobody is to be asked."""
        return self._left.get(rows, 0) > 0

    def ran(
        self, rows: int, seconds: float, committed: int, *, drafted: bool, held: bool, depth: int
    ) -> None:
        """A round of all rows with that many tokens in all; `drafted`: by such sources alone. `held`: back,
        for drafts that did not come."""
        if self.over(rows):
            self._left[rows] -= 1
            return
        if held and not self._times.runs_ahead(rows):
            self._look(rows)
        elif drafted or held:
            self._account(rows, seconds, committed, drafted, depth)

    def _look(self, rows: int) -> None:
        self._unknown[rows] = self._unknown.get(rows, 0) + 1
        if self._unknown[rows] % self.UNKNOWN == 0:
            self._left[rows] = self.SEEN

    def _account(self, rows: int, seconds: float, committed: int, drafted: bool, depth: int) -> None:
        plain = self._times.seconds(rows, 1, depth=depth)
        if plain is None or not self._times.runs_ahead(rows):
            return
        earned = committed / rows - seconds / plain
        balance = self._balance.get(rows, 0.0) + (earned if drafted else min(0.0, earned))
        self._balance[rows] = min(balance, self.MOST)
        if balance < -self.MOST:
            self._left[rows] = ceil(-balance / self.SHARE)
            self._balance[rows] = 0.0
