"""`doctor`: checks that run something each, and what to do where one fails."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_dspark.cli.benchmark import LOW_ADVICE
from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress
from mlx_dspark.cli.streams import require_output
from mlx_dspark.foundation.doctor_settings import DoctorSettings
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.bench.acceptance import Guarded
    from mlx_dspark.bench.guard import GuardVerdict
    from mlx_dspark.session.pair import Parts

OK, WARN, FAIL, OPEN = "ok", "warn", "fail", "open"
_STATUS = {"fine": OK, "low": WARN}
FAILED = 2


@dataclass(frozen=True)
class Check:
    """One check: what was found, and the fix where there is something to fix. `open`: it could not tell."""

    name: str
    status: str
    found: str
    fix: str = ""


def doctor(settings: DoctorSettings) -> int:
    """Check this machine, and with --pair a model with its drafter; exit code 2 where a check fails."""
    refuse_ranks("doctor")
    require_output()
    progress = Progress()
    checks = [_checked(name, check) for name, check in (("compute", _compute), ("cache", _cache))]
    checks += _registry()
    if settings.pair is not None:
        checks += _pair(str(settings.pair), progress)
    progress.clear()
    if settings.json:
        print(json.dumps({"checks": [dataclasses.asdict(check) for check in checks]}, ensure_ascii=False))
    else:
        for check in checks:
            print(f"{check.status:5} {check.name}: {check.found}" + (f" {check.fix}" if check.fix else ""))
    return FAILED if any(check.status == FAIL for check in checks) else 0


def _checked(name: str, check: Callable[[], Check]) -> Check:
    """A check's outcome; an error of ours is one that failed, with its next step as the fix."""
    try:
        return check()
    except DsparkError as error:
        return Check(name, FAIL, error.sentence, error.next_step)


def _compute() -> Check:
    """A product on MLX's default device against the same in integers."""
    import mlx.core as mx

    device = mx.default_device().type.name
    try:
        found = (mx.arange(6.0).reshape(2, 3) @ mx.arange(6.0).reshape(3, 2)).tolist()
    except RuntimeError as error:
        return Check("compute", FAIL, f"MLX cannot compute on the {device}: {error}.", "Reinstall mlx.")
    if found != [[10.0, 13.0], [28.0, 40.0]]:
        return Check("compute", FAIL, f"MLX on the {device} multiplies wrongly.", "Reinstall mlx.")
    return Check("compute", OK, f"MLX {mx.__version__} on the {device}")  # pyright: ignore[reportAttributeAccessIssue]


def _cache() -> Check:
    """Whether what is measured can be kept."""
    from mlx_dspark.foundation.paths import CACHE_DIR_VARIABLE, default_cache_dir

    folder = default_cache_dir()
    probe = folder / "doctor.probe"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        return Check("cache", FAIL, f"{folder} cannot be written: {reason}.", f"Set {CACHE_DIR_VARIABLE}.")
    return Check("cache", OK, str(folder))


def _registry() -> list[Check]:
    from mlx_dspark.catalog.pairs import load_registry

    known = load_registry()
    faults = [Check("registry", FAIL, fault.sentence, fault.next_step) for fault in known.faults]
    return faults or [Check("registry", OK, f"{len(known.pairs)} pairs")]


def _pair(model: str, progress: Progress) -> list[Check]:
    """Load the pair as a session would, then let it answer."""
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
    pair = Check("pair", OK, f"{parts.name}: {parts.pairing or parts.pair.id}, mode {parts.mode}")
    guarded = guard_now(parts, loading, progress.tell)
    return [pair, _against_row(parts, guarded.verdict), _against_before(parts, guarded)]


def _against_row(parts: Parts, verdict: GuardVerdict) -> Check:
    from mlx_dspark.catalog.pairs import user_file

    if parts.pair is not None and not parts.pair.expectations(parts.mode):
        told = f"{parts.pair.id} has no accept length of mode {parts.mode} on record to compare with."
        fix = f"Write one as [[pair.expected]] into a row of your own in {user_file()}."
        return Check("acceptance", OPEN, told, fix)
    status = _STATUS.get(verdict.kind, OPEN)
    return Check("acceptance", status, str(verdict), LOW_ADVICE if status == WARN else "")


def _against_before(parts: Parts, guarded: Guarded) -> Check:
    """Against what was remembered of this machine; the first run that is not low is remembered."""
    from mlx_dspark.foundation.paths import default_cache_dir
    from mlx_dspark.session.measured_acceptance import remember_acceptance

    name = "acceptance here"
    if guarded.before is not None:
        status = _STATUS.get(guarded.before.kind, OPEN)
        told = f"against what was measured here before, {guarded.before}"
        return Check(name, status, told, LOW_ADVICE if status == WARN else "")
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
