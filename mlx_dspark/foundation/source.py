"""One drafter as cap policies see it: a name and a few facts. No MLX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """One drafter as cap policies see it. `own_length`: it sizes each draft by itself, below the cap.
    `confident`: it can end a draft where its confidence falls below a threshold that the policy names.
    `sporadic`: it has a draft in some rounds only, and looking for one costs nothing. `likely`: the chance of
    a draft of which nothing is recorded."""

    name: str
    max_draft: int
    own_length: bool = False
    confident: bool = False
    sporadic: bool = False
    likely: float = 0.7
