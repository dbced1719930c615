"""How many drafts a row may have verified this round. Numbers in, numbers out; no MLX.

A cap is chosen per row and per drafter (source). A cap of 0 is plain decoding, and always a candidate unless
the user pinned a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from mlx_dspark.engine.live import LiveCaps
from mlx_dspark.foundation.caps import CapPolicy
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.source import Source

MaxDraft = int | Literal["auto"] | None


def cap_policy(
    max_draft: MaxDraft,
    sources: Sequence[Source],
    *,
    curves: CostCurves | None = None,
    acceptance: Mapping[str, Sequence[float]] | None = None,
) -> CapPolicy:
    """The policy a user's `--max-draft` asks for.

    None: derived once for a request and its depth, parked where it loses; without `curves`, whole blocks or
    none. "auto": the length chosen every round, 0 included. 0: the drafter's whole block, always. N: at most
    N, always. `curves` are this machine's prices of the pair; `acceptance` by source is what is recorded of
    it, the chance of each draft given those before it. Raises UsageError for another `max_draft`.
    """
    if max_draft is None or max_draft == "auto":
        return LiveCaps(sources, choose=max_draft == "auto", curves=curves, acceptance=acceptance)
    if not isinstance(max_draft, int) or isinstance(max_draft, bool) or max_draft < 0:
        raise UsageError(
            f"max_draft is {max_draft!r}, which is out of range.",
            'Give a positive number, 0 for the whole block, or "auto".',
            field="max_draft",
        )
    pinned = {s.name: min(max_draft, s.max_draft) if max_draft else s.max_draft for s in sources}
    return LiveCaps(sources, choose=False, curves=curves, acceptance=acceptance, pinned=pinned)
