"""One request while it runs: its tokens, its limits, its outcome."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_dspark.engine.sampling import RowHistory
from mlx_dspark.foundation.caps import FixedCaps, RowCaps
from mlx_dspark.foundation.events import Trouble
from mlx_dspark.foundation.request import FinishReason, GenerateRequest


class Row:
    """`tokens` is prompt and output; all but those past the state's depth are fed already.

    The newest committed token, once there is one, is the anchor: committed, not yet fed. `budget` counts the
    tokens it may still commit. `trouble` says why it `drafts` no more, until that has been told;
    `read_again`: a round failed, so the state was made anew from the tokens.
    """

    def __init__(
        self, request: GenerateRequest, caps: RowCaps, limit: int, vocab: int, index: int = 0
    ) -> None:
        self.request = request
        self.stop_check = request.stop_check
        self.index = index
        self.caps = caps
        self.tokens = list(request.prompt)
        self.limit = limit
        self.budget = limit
        self.reason: FinishReason | None = None
        self.announced = False
        self.drafts = True
        self.trouble: Trouble | None = None
        self.read_again = False
        sampling = request.sampling
        self.history = RowHistory.start(request.prompt, vocab) if sampling.penalised else None

    @property
    def produced(self) -> int:
        return self.limit - self.budget

    @property
    def finished(self) -> bool:
        return self.reason is not None

    def stop_drafting(self, error: Exception) -> None:
        """Decode plainly from now on, and tell why; the first reason counts."""
        if self.drafts:
            self.trouble = Trouble.of("drafting stopped", error)
            self.drafts, self.caps = False, FixedCaps({})

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens until one ends the text; returns those taken."""
        taken = []
        for token in tokens:
            taken.append(token)
            self.budget -= 1
            self.reason = self._ending(token)
            if self.reason is not None:
                break
        self.tokens += taken
        return taken

    def take(self, tokens: Sequence[int], reason: FinishReason | None) -> None:
        """Take tokens of which somebody else found whether they end the text."""
        self.budget -= len(tokens)
        self.tokens += tokens
        self.reason = reason

    def _ending(self, token: int) -> FinishReason | None:
        if token in self.request.end_ids:
            return "stop"
        if self.stop_check is not None and self.stop_check(token):
            return "stop"
        return "length" if self.budget == 0 else None
