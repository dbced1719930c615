"""Curves for a pair: out of the store, else measured; and what live rounds say of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from mlx_dspark.calibration.store import CalibrationStore, Entry
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.events import RoundReport
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.calibration.measure import Measured
    from mlx_dspark.catalog.checkpoint import Checkpoint
    from mlx_dspark.catalog.progress import Progress
    from mlx_dspark.contracts import Drafter, Target
    from mlx_dspark.engine.caps import MaxDraft
    from mlx_dspark.session.live import BatchMeter
    from mlx_dspark.session.pair import Parts
    from mlx_dspark.targets.dense.target import DenseTarget

MEASURING = "measuring what drafts cost here"
BUDGET = {"cpu": 12.0, "gpu": 6.0}
"""Seconds that a measurement may take, by device."""
OFF, UNWANTED = "switched off", "not known, and nobody asked"
UNASKED = True
"""Whether a pair is measured that nobody asked to measure."""


class Insist(Enum):
    """How much a caller wants curves."""

    MAYBE = None
    """Out of the store; measured where that is worth it, unless the user pinned the cap."""
    ONCE = "once"
    """Out of the store, measured wherever it has none."""
    ANEW = True
    NEVER = False


@dataclass(frozen=True)
class Calibration:
    """What is known of a pair's costs, and how.

    `reason` is "measured", "remembered", or why there are no curves or none that are kept.
    """

    curves: CostCurves | None
    reason: str
    key: str = ""
    seconds: float = 0.0
    """Seconds that measuring took."""
    doubtful: CostCurves | None = None
    """What was measured and is not kept, for the reason given."""
    store: CalibrationStore | None = None

    @property
    def usable(self) -> CostCurves | None:
        """What a session begins with: costs in doubt are better than none, and its rounds correct either."""
        return self.curves if self.curves is not None else self.doubtful

    def watch(self) -> Callable[[RoundReport], None] | None:
        """Takes live rounds, and has the pair measured anew where they disagree; None without curves."""
        if self.curves is None or self.store is None:
            return None
        from mlx_dspark.session.live import watching

        return watching(self.curves, self.key, self.store)

    def meter(
        self, target: Target, drafter: Drafter, learn: Callable[[CostCurves], None]
    ) -> BatchMeter | None:
        """Measures rounds of several rows when there are some, to be kept if the curves are; None without
        curves, in doubt or not."""
        if self.usable is None:
            return None
        from mlx_dspark.session.live import BatchMeter

        return BatchMeter(target, drafter, self.usable, learn, key=self.key, store=self.store)

    def __str__(self) -> str:
        if self.reason in (OFF, UNWANTED):
            return ""
        if self.curves is not None and self.seconds:
            return f"costs measured in {self.seconds:.0f} s" + (
                f" ({self.reason})" if self.reason != "measured" else ""
            )
        if self.curves is not None:
            return ""
        return f"costs {'in doubt' if self.doubtful is not None else 'not measured'}: {self.reason}"


def pair_facts(
    settings: LoadSettings, checkpoint: Checkpoint, target: DenseTarget, drafter: Drafter
) -> dict[str, str]:
    """What the costs of a pair depend on, in words."""
    from mlx_dspark.calibration.key import describe
    from mlx_dspark.kernels.dispatch import kernel_set
    from mlx_dspark.session.timing import timed

    return describe(
        name=checkpoint.name,
        target=checkpoint.fingerprint,
        drafter=next(filter(None, map(_mark, parts_of(drafter))), ""),
        quantization={
            "target": checkpoint.config.get("quantization"),
            "drafter_bits": settings.drafter_bits,
            "drafter_window": settings.drafter_window,
        },
        sources=[(each.name, each.max_draft, each.own_length) for each in timed(drafter).sources],
        states=(*target.state_kinds, f"rows as {target.layout.value}"),
        kernels=[*kernel_set(target.report, target.kernels), *_replayed(target, drafter)],
    )


def _replayed(target: DenseTarget, drafter: Drafter) -> list[str]:
    models = {"target": target, **{part.name: getattr(part, "model", None) for part in parts_of(drafter)}}
    return [f"{name} replayed" for name, model in models.items() if getattr(model, "replayed", False)]


def parts_of(drafter: Drafter | None) -> tuple[Any, ...]:
    """The parts of a composition, else the drafter itself, if there is one."""
    return () if drafter is None else getattr(drafter, "parts", (drafter,))


def _mark(part: Any) -> str:
    """Tells a drafter's weights apart from others; empty where it has none."""
    from mlx_dspark.catalog.integrity import content_fingerprint

    folder = getattr(part, "folder", None)
    return getattr(part, "fingerprint", "") if folder is None else content_fingerprint(_drafter_files(folder))


def _drafter_files(folder: Path) -> list[Path]:
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    return [path for path in files if path.is_file()]


def calibrated(parts: Parts, asked: bool | Insist | None, progress: Progress | None = None) -> Parts:
    """The parts with what is known of their costs, which is measured where that is wanted and not known.

    `asked` is the setting `calibrate`, or an Insist. Raises UsageError where curves are insisted on and there
    is nothing to measure.
    """
    asked = Insist(asked)
    if parts.facts is None:
        if asked in (Insist.ANEW, Insist.ONCE):
            raise UsageError(
                "calibrate is set, and there is nothing to measure: "
                + ("nobody drafts." if parts.link is None else "several processes share the model."),
                "Leave it out.",
                field="calibrate",
            )
        return parts
    if asked is Insist.NEVER:
        return replace(parts, calibration=Calibration(None, OFF))
    found = _found(parts, parts.facts, asked, progress)
    if parts.drafter is not None and found.curves is not None:
        _KNOWN[parts.drafter] = found
        _OF_TARGET[parts.target] = found
    return replace(parts, calibration=found)


def known_calibration(target: Target, drafter: Drafter | None) -> Calibration | None:
    """What `calibrated` found out about this pair, if it did.

    Of a lookup drafter that was loaded with no target, it is what the target's rounds cost beside the drafter
    that was: looking up costs nothing. Such rounds say nothing of that pair, so none is watched.
    """
    if drafter is None or drafter in _KNOWN:
        return None if drafter is None else _KNOWN[drafter]
    found = _OF_TARGET.get(target) if all(source.sporadic for source in drafter.sources) else None
    return None if found is None else replace(found, store=None)


_KNOWN: weakref.WeakKeyDictionary[Any, Calibration] = weakref.WeakKeyDictionary()
_OF_TARGET: weakref.WeakKeyDictionary[Any, Calibration] = weakref.WeakKeyDictionary()


def _found(parts: Parts, facts: Mapping[str, str], asked: Insist, progress: Progress | None) -> Calibration:
    from mlx_dspark.calibration.key import key_of

    store, key = CalibrationStore(default_cache_dir()), key_of(facts)
    entry = store.recall(key)
    fixed = pinned(parts.max_draft) and asked is Insist.MAYBE
    if entry is not None and asked is not Insist.ANEW and (fixed or not entry.outdated(time())):
        return Calibration(entry.curves, "remembered", key, store=store)
    if asked is Insist.MAYBE:
        if fixed or not UNASKED:
            return Calibration(None, UNWANTED, key)
        if wait := store.waiting(key):
            known = entry.curves if entry is not None and not entry.stale else None
            stale = entry.curves if entry is not None and entry.stale else None
            again = f"the last try was not believed, and the next is due in {max(1, round(wait / 60))} min"
            return Calibration(known, again, key, doubtful=stale, store=store)
    doing, damage = _doing(entry), store.damage(key)
    return _kept(_measured(parts, progress, doing), store, key, facts, damage)


def _doing(entry: Entry | None) -> str:
    """What is told while it is measured, and why where that is not the first time."""
    if entry is None:
        return f"{MEASURING}, once for this pair"
    why = entry.outdated(time())
    return f"{MEASURING} anew" + (f": {why}" if why else "")


def pinned(max_draft: MaxDraft) -> bool:
    """Whether the user chose the cap, so that no cost moves it."""
    return isinstance(max_draft, int)


def _measured(parts: Parts, progress: Progress | None, doing: str) -> Measured | str:
    """The measurement, or why there is none."""
    import mlx.core as mx

    from mlx_dspark.calibration.measure import measure
    from mlx_dspark.calibration.plan import pair_plan
    from mlx_dspark.catalog.progress import LoadProgress, silent
    from mlx_dspark.session.timing import timed_rounds

    report = progress or silent
    report(LoadProgress(doing, 0.0))
    assert parts.drafter is not None
    try:
        timer = timed_rounds(parts.target, parts.drafter)
        plan = pair_plan(timer.most, timer.depths, context=parts.target.spec.context)
        budget = BUDGET[mx.default_device().type.name]
        return measure(timer, plan, budget=budget, progress=lambda part: report(LoadProgress(doing, part)))
    except Exception as error:  # noqa: BLE001
        return f"measuring failed, {type(error).__name__}: {error}"
    finally:
        mx.clear_cache()


def _kept(
    found: Measured | str, store: CalibrationStore, key: str, facts: Mapping[str, str], damage: str
) -> Calibration:
    if isinstance(found, str):
        store.refuse(key)
        return Calibration(None, found, key)
    if found.refusal:
        store.refuse(key)
        return Calibration(None, found.refusal, key, found.seconds, doubtful=found.curves)
    obstacle = store.remember(key, found.curves, facts)
    reason = f"not remembered: {obstacle}" if obstacle else damage or "measured"
    return Calibration(found.curves, reason, key, found.seconds, store=store)
