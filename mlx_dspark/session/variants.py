"""One loaded target, drafted for in several ways: what `benchmark` and `race` compare."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.calibrate import parts_of
from mlx_dspark.session.draft_model import drafts_a_round
from mlx_dspark.session.pair import Parts, lookup_drafter

if TYPE_CHECKING:
    from mlx_dspark.contracts import Drafter
    from mlx_dspark.engine.caps import MaxDraft


def variant(parts: Parts, settings: LoadSettings, mode: str, max_draft: MaxDraft = None) -> Parts:
    """`parts` as they would be if `mode` and `max_draft` had been asked for when they were loaded.

    `parts` are what `settings` loaded, in mode auto and with no `max_draft`; target and drafter's model are
    shared. Raises UsageError where the mode needs a drafter that is not there.
    """
    if mode == "baseline":
        return replace(parts, drafter=None, mode="baseline", max_draft=None, acceptance=None)
    if mode == "auto":
        mode = parts.mode
    if mode not in ("lookup", parts.mode):
        option = "--draft-model" if mode == "draft-model" else "--drafter"
        raise UsageError(
            f"The mode {mode!r} needs a {mode} drafter, and what drafts for {parts.name} is {parts.mode}.",
            f"Name one with {option}, or leave the mode out.",
            field="mode",
        )
    if mode == parts.mode and max_draft is None:
        return parts
    drafter = _drafter(parts, settings, mode, max_draft)
    drafter.bind(parts.target)
    acceptance = parts.acceptance if mode == parts.mode else None
    return replace(parts, drafter=drafter, mode=mode, max_draft=max_draft, acceptance=acceptance)


def _drafter(parts: Parts, settings: LoadSettings, mode: str, max_draft: MaxDraft) -> Drafter:
    from mlx_dspark.drafters.draft_model.drafter import DraftModelDrafter
    from mlx_dspark.drafters.first_hit import FirstHit

    long_draft = settings.lookup_long_draft
    if mode == "lookup":
        return lookup_drafter(max_draft, long_draft=long_draft)
    assert parts.drafter is not None
    model = parts_of(parts.drafter)[-1]
    if isinstance(model, DraftModelDrafter):
        model = model.drafting(drafts_a_round(settings, max_draft))
    if not isinstance(parts.drafter, FirstHit):
        return model
    lookup = lookup_drafter(max_draft, long_draft=long_draft, beside_model=True)
    return FirstHit([lookup, model])
