"""What to say of a cap that no drafter reaches."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_dspark.foundation.source import Source


def overlong(max_draft: object, sources: Sequence[Source], called: str = "max_draft") -> str:
    """How many drafts a round really has where `max_draft` pins more than any of the sources makes; empty
    where it does not; `called` names it. Lookup counts where nobody else drafts."""
    steady = [source for source in sources if not source.sporadic]
    block = max((source.max_draft for source in steady or sources), default=0)
    if not isinstance(max_draft, int) or not block or max_draft <= block:
        return ""
    who = "the drafter's block is" if steady else "lookup drafts at most"
    return f"{called} is {max_draft}, and {who} {block}: a round has no more drafts than that."
