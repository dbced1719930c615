"""What one row may lose to drafts that do not pay, in plain rounds. Arithmetic; no MLX."""

from __future__ import annotations

LOSS = 0.016
"""The share of plain decoding that probes may be expected to cost."""


class Budget:
    """Two accounts, of which both must cover a probe (baseline play against a budget; Wu et al. 2016).

    The credit is of what probes are expected to cost, so that an unlucky one does not put off the next. It
    grows by LOSS with every plain round, and by LOSS_IF_RICH while drafting has saved the row RICH rounds.
    The balance is of what drafting really brought, with LOST of every token on top: however wrong chances
    are, a row loses little more than that. After the first FIRST rounds, in which most is to be learnt and
    more may be lost, both begin anew.
    """

    LOSS_IF_RICH, RICH, MOST_SAVED = 0.025, 4.0, 32.0
    LOST, MOST_CREDIT = 0.014, 1.0
    FIRST, FIRST_BALANCE, FIRST_DEBT, DEBT = 32, 1.5, 3.0, 0.5

    def __init__(self) -> None:
        self._credit = 0.0
        self._balance = self.FIRST_BALANCE
        self._rounds = 0

    def count(self) -> None:
        """Take a round, whatever it was."""
        self._rounds += 1
        if self._rounds == self.FIRST:
            self._credit, self._balance = max(0.0, self._credit), 0.0

    def wait(self) -> None:
        """Take a plain round."""
        self._credit += self.LOSS_IF_RICH if self._balance > self.RICH else LOSS
        self._credit = min(self._credit, self.MOST_CREDIT)
        self._save(self.LOST)

    def draft(self, committed: int, spent: float) -> None:
        """Take a round with drafts: its tokens, and its time in plain rounds."""
        self._save((1 + self.LOST) * committed - spent)

    def charge(self, cost: float) -> None:
        """Take what a probe is thought to have cost."""
        self._credit -= cost

    def park(self) -> None:
        self._credit = min(self._credit, 0.0)

    def _save(self, rounds: float) -> None:
        self._balance = min(self._balance + rounds, self.MOST_SAVED)

    @property
    def exhausted(self) -> bool:
        return self._balance <= 0

    def covers(self, cost: float) -> bool:
        return min(self._credit, self._balance) >= cost

    def lends(self, cost: float) -> bool:
        """Whether a probe that is likely to find something may be made on debt."""
        debt = self.FIRST_DEBT if self._rounds < self.FIRST else self.DEBT
        return min(self._credit, self._balance) + debt >= cost
