"""Checks of a model and the drafter it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_dspark.doctor.check import FAIL, OK, OPEN, WARN, Check
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.bench.acceptance import Guarded
    from mlx_dspark.bench.guard import GuardVerdict
    from mlx_dspark.bench.suite import Tell
    from mlx_dspark.catalog.progress import Progress
    from mlx_dspark.session.pair import Parts

_STATUS = {"fine": OK, "low": WARN}


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
    matched = Check("pair", OK, f"{parts.name}: {parts.pairing or parts.pair.id}, mode {parts.mode}")
    guarded = guard_now(parts, loading, tell)
    of_row = _against_row(parts, guarded.verdict, low_advice)
    return [matched, of_row, _against_before(parts, guarded, low_advice)]


def _against_row(parts: Parts, verdict: GuardVerdict, low_advice: str) -> Check:
    from mlx_dspark.catalog.pairs import user_file

    if parts.pair is not None and not parts.pair.expectations(parts.mode):
        told = f"{parts.pair.id} has no accept length of mode {parts.mode} on record to compare with."
        fix = f"Write one as [[pair.expected]] into a row of your own in {user_file()}."
        return Check("acceptance", OPEN, told, fix)
    status = _STATUS.get(verdict.kind, OPEN)
    return Check("acceptance", status, str(verdict), low_advice if status == WARN else "")


def _against_before(parts: Parts, guarded: Guarded, low_advice: str) -> Check:
    """Against what was remembered of this machine; the first run that is not low is remembered."""
    from mlx_dspark.foundation.paths import default_cache_dir
    from mlx_dspark.session.measured_acceptance import remember_acceptance

    name = "acceptance here"
    if guarded.before is not None:
        status = _STATUS.get(guarded.before.kind, OPEN)
        told = f"against what was measured here before, {guarded.before}"
        return Check(name, status, told, low_advice if status == WARN else "")
    told = (
        ", ".join(f"{each.content} {each.accept_length:.2f}" for each in guarded.found) or "nothing drafted"
    )
    if guarded.verdict.kind == "low" or not guarded.found or parts.pair is None:
        return Check(name, OPEN, f"accept lengths: {told}; not remembered")
    drafter = parts.pair.drafters[parts.mode]
    obstacle = remember_acceptance(default_cache_dir(), parts.fingerprint, drafter, parts.mode, guarded.found)
    if obstacle:
        return Check(name, WARN, f"accept lengths: {told}; they are not remembered: {obstacle}")
    return Check(name, OK, f"accept lengths: {told}; later runs are compared with them")
