"""`calibrate`: measure what drafts cost here, and show it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from mlx_dspark.calibration.store import CalibrationStore
from mlx_dspark.cli.curve_picture import save_curves
from mlx_dspark.cli.curves import cap_table, summary, told, verify_table
from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress, count, note
from mlx_dspark.cli.streams import require_output
from mlx_dspark.foundation.calibrate_settings import CalibrateSettings
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.json_file import aside_of
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.foundation.pictures import check_picture
from mlx_dspark.foundation.settings import LoadSettings, from_environment

NOT_BELIEVED = 2
"""The exit code where what was measured is not kept."""


def calibrate(own: CalibrateSettings, loading: LoadSettings) -> int:
    """Measure what drafts of a model cost on this machine, and print the curves."""
    refuse_ranks("calibrate")
    if own.show and own.force:
        raise UsageError(
            "force is set, and --show measures nothing.", "Leave one of the two out.", field="force"
        )
    check_picture(own.plot, stem="curves")
    require_output()
    return _show(own, loading) if own.show else _measure(own, loading)


def _measure(own: CalibrateSettings, loading: LoadSettings) -> int:
    from mlx_dspark.session.calibrate import Insist, calibrated
    from mlx_dspark.session.pair import load_parts

    progress = Progress()
    parts = load_parts(loading, progress)
    parts = calibrated(parts, Insist.ANEW if own.force else Insist.ONCE, progress)
    progress.clear()
    found = parts.calibration
    assert found is not None
    assert parts.facts is not None
    curves = found.curves or found.doubtful
    if curves is not None:
        doubt = "" if found.curves is not None else found.reason
        _print(own, [(parts.facts, curves, doubt)], parts.acceptance or {})
    if found.curves is None:
        note(
            f"mlx-dspark: nothing was kept: {found.reason}. Close other programs, let it cool, and try again."
        )
        return NOT_BELIEVED
    note(str(found) or f"costs remembered in {CalibrationStore(default_cache_dir()).file}")
    return 0


def _show(own: CalibrateSettings, loading: LoadSettings) -> int:
    """Everything in the store that was measured with this model."""
    from mlx_dspark.catalog.checkpoint import fingerprint_of
    from mlx_dspark.catalog.resolve import resolve_model

    found = resolve_model(
        None if loading.model is None else str(loading.model),
        cache_dir=default_cache_dir(),
        trust_remote_code=loading.trust_remote_code,
        progress=(progress := Progress()),
    )
    progress.clear()
    _refuse_unused(loading)
    store, mark = CalibrationStore(default_cache_dir()), fingerprint_of(found)
    known = [
        (entry.about, entry.curves, entry.stale)
        for entry in store.entries()
        if entry.about.get("target") == mark
    ]
    if trouble := store.trouble():
        raise UsageError(
            f"{store.file} cannot be read: {trouble}.",
            f"Leave --show out to measure anew; a damaged file is then set aside as {aside_of(store.file)}.",
            field="show",
        )
    if damaged := store.damaged_entries():
        note(f"mlx-dspark: {store.file}: of what it holds, {count(damaged, 'measurement')} cannot be read.")
    if not known:
        raise UsageError(
            f"Nothing is known of {found.name} in {store.file}.",
            "Leave --show out to measure it.",
            field="show",
        )
    _print(own, known)
    return 0


def _refuse_unused(loading: LoadSettings) -> None:
    for knob in LoadSettings.knobs():
        used = knob.name in ("model", "trust_remote_code")
        given = getattr(loading, knob.name) != knob.default and not from_environment(loading, knob.name)
        if given and not used:
            raise UsageError(
                f"{knob.name} is set, and --show tells of everything measured with the model.",
                "Leave one of the two out.",
                field=knob.name,
            )


def _print(
    own: CalibrateSettings,
    known: list[tuple[Mapping[str, str], CostCurves, str]],
    recorded: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:
    if own.json:
        listed = [{"about": dict(about), "doubt": doubt, **told(curves)} for about, curves, doubt in known]
        print(json.dumps(listed, ensure_ascii=False))
    else:
        for about, curves, doubt in known:
            _print_tables(about, curves, doubt, recorded)
    if own.plot is not None:
        about, curves, _ = known[-1]
        save_curves(curves, Path(own.plot), title=_title(about))
        note(f"Wrote {own.plot}.")


def _print_tables(
    about: Mapping[str, str], curves: CostCurves, doubt: str, recorded: Mapping[str, Sequence[float]]
) -> None:
    from rich.console import Console

    console = Console(file=sys.stdout)
    measured = datetime.fromtimestamp(curves.measured_at).strftime("%Y-%m-%d %H:%M")
    console.print(f"{_title(about)} · measured {measured}", highlight=False)
    console.print(verify_table(curves))
    for source in curves.draft:
        console.print(cap_table(curves, source, recorded.get(source, ())))
    console.print(summary(curves), highlight=False)
    if doubt:
        console.print(f"in doubt: {doubt}", highlight=False)


def _title(about: Mapping[str, str]) -> str:
    return " · ".join(about.get(name, "") for name in ("name", "device") if about.get(name))
