"""Checks of a model and the drafter it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_dspark.doctor.check import FAIL, OK, OPEN, WARN, Check
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.bench.suite import Tell
    from mlx_dspark.catalog.progress import Progress


def pair(model: str, progress: Progress, tell: Tell, low_advice: str) -> list[Check]:
    """Load the pair as a session would, then let it answer; `low_advice` is for drafts that are refused too
    often."""
    from mlx_dspark.bench.acceptance import guard_now
    from mlx_dspark.session.pair import load_parts

    loading = LoadSettings(model=model)
    try:
        parts = load_parts(loading, progress)
    except DsparkError as error:
        return [Check("pair", FAIL, error.sentence, error.next_step)]
    if parts.pair is None or parts.mode == "lookup":
        told = parts.pairing or f"No registered pair has {parts.name} as its target; lookup drafts."
        return [Check("pair", WARN, told, "Name a drafter made for this very model with --drafter.")]
    verdict = guard_now(parts, loading, tell)
    matched = Check("pair", OK, f"{parts.name}: {parts.pairing or parts.pair.id}, mode {parts.mode}")
    status = {"fine": OK, "low": WARN}.get(verdict.kind, OPEN)
    return [matched, Check("acceptance", status, str(verdict), low_advice if status == WARN else "")]
