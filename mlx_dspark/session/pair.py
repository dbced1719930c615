"""What is loaded together: a target, its tokenizer, and who drafts for it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlx_dspark.foundation.errors import (
    DownloadError,
    DrafterMismatch,
    DsparkError,
    LoadError,
    UsageError,
)
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.foundation.settings import LoadSettings, from_environment
from mlx_dspark.session.calibrate import calibrated, pair_facts, parts_of
from mlx_dspark.session.draft_model import find_draft_model, load_draft_model
from mlx_dspark.session.fits import MemoryGuard, config_of
from mlx_dspark.session.overlong import overlong
from mlx_dspark.session.placed import place_in_drafter, wanted_kernels, watched
from mlx_dspark.session.registered import (
    Registered,
    may_be_registered,
    registered,
    registered_as_shipped,
    without_drafter,
)
from mlx_dspark.session.session import Session, StreamsEvents
from mlx_dspark.session.trust import refuse_untrusted

if TYPE_CHECKING:
    from mlx_dspark.catalog.checkpoint import Checkpoint
    from mlx_dspark.catalog.gguf.weights import Requantized
    from mlx_dspark.catalog.pairs import Pair
    from mlx_dspark.catalog.progress import Progress
    from mlx_dspark.catalog.resolve import ModelRef
    from mlx_dspark.contracts import Drafter, Target
    from mlx_dspark.distributed.link import Link
    from mlx_dspark.drafters.block import BlockDrafter
    from mlx_dspark.drafters.lookup import LookupDrafter
    from mlx_dspark.engine.caps import MaxDraft
    from mlx_dspark.foundation.caps import CapPolicy
    from mlx_dspark.foundation.events import RoundReport
    from mlx_dspark.kernels.dispatch import CpuWeightsReport
    from mlx_dspark.kernels.framework.live import LiveKernels
    from mlx_dspark.session.calibrate import Calibration
    from mlx_dspark.session.live import BatchMeter


@dataclass(frozen=True)
class Parts:
    """A loaded target with its drafter, bound to it, or None for plain decoding."""

    target: Target
    tokenizer: Any
    drafter: Drafter | None
    config: dict[str, Any]
    end_ids: frozenset[int]
    mode: str
    name: str = ""
    max_draft: MaxDraft = None
    max_batch: int = 1
    weights: CpuWeightsReport | None = None
    """How the weights are held, and why; None where nothing was placed."""
    requantized: Requantized | None = None
    """What weights lost that MLX cannot hold as they are stored; None for none."""
    link: Link | None = None
    """To the other processes that hold parts of the target; None where this one holds all of it."""
    facts: Mapping[str, str] | None = None
    """What the costs of the pair depend on; None where there are none to measure."""
    acceptance: Mapping[str, Sequence[float]] | None = None
    """By drafter, the chance of each draft as it is recorded with the pair. Such a drafter runs with the
    automatic cap where no cap is given and nothing was measured."""
    calibration: Calibration | None = None
    """What is known of these costs; None where nobody has asked yet."""
    pairing: str = ""
    """What the registry of pairs had to say of the model."""
    pair: Pair | None = None
    """The model's row in the registry of pairs; None where it has none, or another drafter was named."""
    fingerprint: str = ""
    """Tells the target's content apart from others."""
    room: int = 0
    """The largest context in tokens that fits this machine's memory; 0 where that cannot be told."""
    usual: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """How the model's makers would have it sampled."""
    kernels: LiveKernels | None = None
    """The kernels of ours that it runs on; None where none were offered."""

    def session(self, *, own_thread: bool = True, warn: bool = True) -> Session:
        """An engine around the parts, ready to answer, or to follow rank 0.

        It has a thread of its own, which is the only one to call MLX, unless `own_thread` is False: such a
        session is for one caller in the main thread. `warn`: say so of a `max_draft` that no drafter reaches.
        """
        return Session(
            self._engine(own_thread, warn),
            self.tokenizer,
            end_ids=self.end_ids,
            mode=self.mode,
            name=self.name,
            weights=self.weights,
            requantized=self.requantized,
            context=self.target.spec.context,
            link=self.link,
            calibration=self.calibration,
            see=self._see(),
            pairing=self.pairing,
            kernels=self.kernels,
        )

    def _see(self) -> Callable[[RoundReport], None] | None:
        """Watches live rounds: what they cost, and whether kernels stall."""
        known = self.calibration
        curves = None if known is None else known.curves
        return watched(self.kernels, curves, [None if known is None else known.watch()])

    def _engine(self, own_thread: bool, warn: bool) -> StreamsEvents:
        from mlx_dspark.engine.caps import cap_policy
        from mlx_dspark.engine.engine import Engine
        from mlx_dspark.engine.loop import VerifyLoop
        from mlx_dspark.engine.scheduler import Scheduler

        loop: Callable[..., VerifyLoop] = VerifyLoop
        if self.link is not None:
            from mlx_dspark.engine.follow import Follower, FollowLoop
            from mlx_dspark.engine.lead import LeadLoop

            if self.link.rank:
                return Follower(FollowLoop(self.target, self.drafter, link=self.link), self.link)
            loop = partial(LeadLoop, link=self.link)
        curves = None if self.calibration is None else self.calibration.usable
        sources = self.drafter.sources if self.drafter is not None else ()
        unmeasured = self.max_draft is None and curves is None and self.acceptance
        asked = "auto" if unmeasured else self.max_draft
        if warn and (remark := overlong(self.max_draft, sources)):
            warnings.warn(remark, stacklevel=3)
        cap = cap_policy(asked, sources, curves=curves, acceptance=self.acceptance)
        if own_thread:
            meter = self._meter(cap)
            return Scheduler(
                self.target, self.drafter, cap=cap, max_rows=self.max_batch, loop=loop, meter=meter
            )
        return Engine(self.target, self.drafter, cap=cap, loop=loop)

    def _meter(self, cap: CapPolicy) -> BatchMeter | None:
        """Measures batches as they form, where that would move a cap."""
        from mlx_dspark.engine.live import LiveCaps

        if self.calibration is None or self.drafter is None or not isinstance(cap, LiveCaps):
            return None
        moves = self.max_batch > 1 and not isinstance(self.max_draft, int)
        return self.calibration.meter(self.target, self.drafter, cap.learn) if moves else None


def load_parts(settings: LoadSettings, progress: Progress | None = None) -> Parts:
    """Load what `settings` name. Raises UsageError, LoadError or DownloadError naming what is at fault.

    In a process that a launcher started as one of several, the target is split over them, and one that
    cannot load makes all raise.
    """
    from mlx_dspark.catalog.progress import silent
    from mlx_dspark.foundation.ranks import launched_rank

    report = progress or silent
    if launched_rank() is None:
        return _complete(settings, _read(settings, report, None), report, None)
    from mlx_dspark.distributed.link import join_ranks

    link = join_ranks()
    if link is None:
        return _complete(settings, _read(settings, report, None), report, None)
    try:
        _refuse_over_ranks(settings, link)
        read = _read(settings, report, link)
    except DsparkError as error:
        link.agree({}, error)
        raise
    link.agree(_about(settings, read))
    with link.step():
        return _complete(settings, read, report, link)


def _refuse_over_ranks(settings: LoadSettings, link: Link) -> None:
    if settings.cpu_weights not in (None, "stock"):
        raise UsageError(
            f"cpu_weights is {settings.cpu_weights!r}, and weights that {link.size} processes share are held "
            "in MLX's own way.",
            "Leave it out.",
            field="cpu_weights",
        )
    wanted_kernels(settings).refuse_where_none(f"a model that {link.size} processes share")


@dataclass(frozen=True)
class _Read:
    """What was read from files, before anything is computed: the checkpoint, who drafts, and the mode."""

    checkpoint: Checkpoint
    drafter: Drafter | None
    model: BlockDrafter | None
    mode: str
    shipped: Path | None
    known: Registered
    room: int = 0


def _about(settings: LoadSettings, read: _Read) -> dict[str, object]:
    """What must be the same in all processes of a run."""
    from mlx_dspark.distributed.versions import digest, versions
    from mlx_dspark.state.layout import layout_here

    checkpoint = read.checkpoint
    drafting = [str(source) for source in read.drafter.sources] if read.drafter is not None else []
    drafting += [mark for part in parts_of(read.drafter) if (mark := getattr(part, "fingerprint", ""))]
    return {
        **versions(),
        "model config": digest(checkpoint.config),
        "model files": digest([(file.name, file.stat().st_size) for file in checkpoint.files]),
        "drafter": digest(drafting),
        "context": checkpoint.context,
        "kv_bits": settings.kv_bits,
        "layout of rows": layout_here().value,
    }


@dataclass(frozen=True)
class Candidates:
    """What was found on this machine, or fetched to it: the model, and who may draft for it."""

    model: ModelRef
    guard: MemoryGuard
    shipped: Path | None
    known: Registered


def find_parts(settings: LoadSettings, report: Progress, guard: MemoryGuard, ranks: int) -> Candidates:
    """Find, and where needed fetch, what is to be loaded."""
    from mlx_dspark.catalog.resolve import resolve_model
    from mlx_dspark.catalog.shipped import may_have_shipped_drafter, shipped_drafter
    from mlx_dspark.targets.load import refuse_config

    named = None if settings.model is None else str(settings.model)
    may_ship = uses_shipped(settings) and may_have_shipped_drafter(named)
    if not may_ship and not (uses_shipped(settings) and may_be_registered(named)):
        drafting_mode(settings)
    found = resolve_model(
        named,
        cache_dir=default_cache_dir(),
        trust_remote_code=settings.trust_remote_code,
        progress=report,
        accept=partial(refuse_config, kv_bits=settings.kv_bits, ranks=ranks),
        weigh=guard.weigh,
    )
    shipped = shipped_drafter(found) if may_ship else None
    known = _known(settings, found, shipped)
    return Candidates(found, guard, None if known.leaves_shipped else shipped, known)


def _read(settings: LoadSettings, report: Progress, link: Link | None) -> _Read:
    from mlx_dspark.catalog.checkpoint import load_checkpoint
    from mlx_dspark.catalog.memory import memory_here
    from mlx_dspark.targets.load import divide_model, refuse_model

    ranks = 1 if link is None else link.size
    guard = MemoryGuard(settings, memory_here() if settings.memory_guard else None, ranks=ranks)
    search = find_parts(settings, report, guard, ranks)
    found, shipped, known = search.model, search.shipped, search.known

    def load(model: BlockDrafter | None = None, draft_model: ModelRef | None = None) -> Checkpoint:
        def accept(stored: Any, config: dict[str, Any]) -> None:
            refuse_model(stored, config, kv_bits=settings.kv_bits, ranks=ranks)
            guard.weigh_found(found, config, model, draft_model)

        divide = None if link is None else partial(divide_model, group=link.group)
        return load_checkpoint(found, progress=report, accept=accept, divide=divide)

    if settings.draft_model is not None:
        drafting = drafting_mode(settings)
        draft = find_draft_model(settings, report, weigh=guard.weigh_draft_model(found))
        checkpoint = load(draft_model=draft)
        drafter = load_draft_model(draft, settings, checkpoint, report, ranks=ranks)
        first = _after_lookup(settings, drafter)
        return _Read(checkpoint, first, None, drafting, None, Registered(), guard.room)
    if _would_be_fetched(str(settings.drafter or known.drafter or "")):
        refuse_unfit(found, settings, ranks)
    drafter, model, mode, known = read_drafter(settings, shipped, known, report)
    checkpoint = load(model)
    return _Read(checkpoint, drafter, model, mode, shipped, known, guard.room)


def _would_be_fetched(drafter: str) -> bool:
    """Whether a drafter of this name, if it is one, is not on this machine."""
    from mlx_dspark.catalog.hub import cached_repository, is_hub_id

    there = not is_hub_id(drafter) or Path(drafter).exists()
    return not there and cached_repository(drafter) is None


def refuse_unfit(found: ModelRef, settings: LoadSettings, ranks: int = 1) -> dict[str, Any]:
    """The config of a model on this machine. Raises LoadError where its files show that it cannot run."""
    from mlx_dspark.catalog.folder import check_folder
    from mlx_dspark.targets.load import refuse_config

    if found.packaging == "folder":
        check_folder(found.path, trust_remote_code=settings.trust_remote_code)
    config = config_of(found)
    refuse_config(config, kv_bits=settings.kv_bits, ranks=ranks)
    return config


def _known(settings: LoadSettings, found: ModelRef, shipped: Path | None) -> Registered:
    """What the registry says of a model; a shipped drafter has the row of its own name."""
    from mlx_dspark.catalog.checkpoint import fingerprint_of
    from mlx_dspark.catalog.pairs import load_registry
    from mlx_dspark.session.measured import measured_gains

    if not uses_shipped(settings):
        return Registered()
    gains = measured_gains(default_cache_dir(), fingerprint_of(found)) if settings.mode == "auto" else {}
    insists = _insists(settings)
    if shipped is not None:
        return registered_as_shipped(load_registry().named(shipped.name), gains, insists=insists)
    return registered(found, settings.mode, gains, insists=insists)


def _complete(settings: LoadSettings, read: _Read, report: Progress, link: Link | None) -> Parts:
    """Targets of several processes compute here, so from here on all of them must do the same."""
    from mlx_dspark.catalog.usual import usual_sampling
    from mlx_dspark.targets.load import load_target

    checkpoint, drafter, cache_dir = read.checkpoint, read.drafter, default_cache_dir()
    target = load_target(
        checkpoint,
        cpu_weights=settings.cpu_weights,
        kernels=wanted_kernels(settings),
        kv_bits=settings.kv_bits,
        ranks=1 if link is None else link.size,
        replay=settings.replay,
        cache_dir=cache_dir,
        progress=report,
    )
    read = _bound(settings, read, target)
    drafter = read.drafter
    refuse_untrusted(
        target,
        checkpoint,
        drafter,
        called=str(settings.drafter or "that is shipped with the model"),
        max_batch=settings.max_batch,
        cache_dir=cache_dir if link is None else None,
        progress=report,
    )
    if read.model is not None and target.report is not None and target.report.choice is not None:
        read.model.hold_weights(target.report.choice, cache_dir)
    if link is None:
        place_in_drafter(settings, drafter, read.model, target.kernels, report)
    return Parts(
        target,
        checkpoint.tokenizer,
        drafter,
        checkpoint.config,
        frozenset(checkpoint.eos_token_ids),
        read.mode,
        checkpoint.name,
        settings.max_draft,
        settings.max_batch,
        target.report,
        checkpoint.requantized,
        link,
        pair_facts(settings, checkpoint, target, drafter) if drafter is not None and link is None else None,
        _recorded(read),
        pairing=read.known.told,
        pair=read.known.pair,
        fingerprint=checkpoint.fingerprint,
        room=read.room,
        usual=usual_sampling(checkpoint.path),
        kernels=target.kernels,
    )


def _bound(settings: LoadSettings, read: _Read, target: Target) -> _Read:
    """The drafter bound to its target; a registered one that was not asked for and does not fit is left."""
    if read.drafter is None:
        return read
    try:
        read.drafter.bind(target)
    except DrafterMismatch as error:
        if read.known.drafter is None or _insists(settings):
            raise
        lookup = lookup_drafter(settings.max_draft, long_draft=settings.lookup_long_draft)
        lookup.bind(target)
        known = without_drafter(read.known, error)
        return replace(read, drafter=lookup, model=None, mode="lookup", known=known)
    return read


def _recorded(read: _Read) -> dict[str, Sequence[float]] | None:
    """The acceptance that is recorded with a shipped drafter."""
    from mlx_dspark.catalog.shipped import recorded_acceptance

    if read.shipped is None or read.model is None:
        return None
    return {read.model.name: recorded_acceptance(read.shipped)}


def uses_shipped(settings: LoadSettings) -> bool:
    """Whether a drafter that is shipped with the model would be used."""
    given = settings.drafter is not None or settings.draft_model is not None
    return not given and settings.mode not in ("lookup", "baseline", DRAFT_MODEL)


def drafting_mode(settings: LoadSettings, *, has_shipped: bool = False) -> str:
    """`model`, `draft-model`, `lookup` or `baseline`: who drafts.

    `has_shipped`: a drafter is shipped with the model.

    Raises UsageError where settings contradict each other: none is accepted and then ignored.
    """
    if settings.draft_model is not None or settings.mode == DRAFT_MODEL:
        _refuse_beside_draft_model(settings)
        _refuse_unused(settings, _BLOCK_KNOBS, "use a DSpark or DFlash drafter")
        return DRAFT_MODEL
    has_drafter = settings.drafter is not None or has_shipped
    if settings.mode in ("dspark", "dflash") and not has_drafter:
        raise UsageError(
            f"mode is {settings.mode!r}, no drafter is given, and none is shipped with this model or "
            "registered for it.",
            "Name one with --drafter, or choose --mode lookup, which needs none.",
            field="mode",
        )
    if settings.mode in ("lookup", "baseline") and settings.drafter is not None:
        raise UsageError(
            f"drafter is given, and mode {settings.mode!r} does not use one.",
            "Leave one of the two out.",
            field="drafter",
        )
    takes_drafter = has_drafter and settings.mode not in ("lookup", "baseline")
    drafting = "baseline" if settings.mode == "baseline" else "model" if takes_drafter else "lookup"
    _refuse_unused(settings, ("num_draft_tokens",), "name a draft model with --draft-model")
    unused = {"model": (), "lookup": _DRAFTER_KNOBS, "baseline": (*_DRAFTER_KNOBS, *_DRAFTING_KNOBS)}
    _refuse_unused(settings, unused[drafting], _USED_WITH[drafting])
    return drafting


def _refuse_beside_draft_model(settings: LoadSettings) -> None:
    if settings.draft_model is None:
        raise UsageError(
            f"mode is {settings.mode!r}, and no draft model is given.",
            "Name one with --draft-model.",
            field="mode",
        )
    if settings.drafter is not None:
        raise UsageError(
            "draft_model is given, and so is drafter.", "Leave one of the two out.", field="draft_model"
        )
    if settings.mode not in ("auto", DRAFT_MODEL):
        raise UsageError(
            f"draft_model is given, and mode {settings.mode!r} does not use one.",
            "Leave one of the two out.",
            field="draft_model",
        )


DRAFT_MODEL = "draft-model"
_BLOCK_KNOBS = ("confidence_threshold", "drafter_bits", "drafter_window")
_DRAFTER_KNOBS = (*_BLOCK_KNOBS, "lookup_drafts")
_DRAFTING_KNOBS = ("max_draft", "lookup_long_draft")
_USED_WITH = {
    "baseline": "choose a mode that drafts",
    "lookup": "name a drafter with --drafter",
    "model": "let lookup draft too (--lookup-drafts)",
}


def _refuse_unused(settings: LoadSettings, unused: Sequence[str], advice: str) -> None:
    for name in _set_knobs(settings, unused):
        if from_environment(settings, name):
            continue
        raise UsageError(
            f"{name} is set, and nothing here would use it.", f"Leave it out, or {advice}.", field=name
        )


def _insists(settings: LoadSettings) -> bool:
    """Whether what is asked for, a mode or a knob, needs a drafter with weights."""
    return settings.mode != "auto" or bool(_set_knobs(settings, _DRAFTER_KNOBS))


def _set_knobs(settings: LoadSettings, names: Sequence[str]) -> list[str]:
    """Those of the knobs that have another value than their default."""
    knobs = (knob for knob in LoadSettings.knobs() if knob.name in names)
    return [knob.name for knob in knobs if getattr(settings, knob.name) != knob.default]


def read_drafter(
    settings: LoadSettings, shipped: Path | None, known: Registered, progress: Progress
) -> tuple[Drafter | None, BlockDrafter | None, str, Registered]:
    """The drafter, not yet bound; the model drafter in it, if any; the mode it amounts to; and what is told.

    `shipped` is the folder of the drafter that is shipped with the model, None where another one is to be
    used or there is none. One that is only registered gives way to lookup where it cannot be had and nobody
    asked for it.
    """
    name = str(shipped) if shipped is not None else known.drafter
    drafting = drafting_mode(settings, has_shipped=name is not None)
    lookup = known.pair.lookup if known.pair is not None and name is not None else None
    try:
        return *_drafting(settings, drafting, name, lookup, progress, ships=shipped is not None), known
    except (LoadError, DownloadError) as error:
        if known.drafter is None or _insists(settings):
            raise
        known = without_drafter(known, error)
        return *_drafting(settings, drafting_mode(settings), None, None, progress), known


def _drafting(
    settings: LoadSettings,
    drafting: str,
    unnamed: str | None,
    lookup_first: bool | None,
    progress: Progress,
    *,
    ships: bool = False,
) -> tuple[Drafter | None, BlockDrafter | None, str]:
    """`unnamed` is the drafter to use where the settings name none, `lookup_first` whether lookup drafts
    before it, None where the drafter's kind decides."""
    if drafting == "baseline":
        return None, None, "baseline"
    if drafting == "lookup":
        return lookup_drafter(settings.max_draft, long_draft=settings.lookup_long_draft), None, "lookup"
    model = _model_drafter(settings, unnamed, progress)
    if settings.mode not in ("auto", model.name):
        called = settings.drafter or ("shipped with the model" if ships else unnamed)
        raise DrafterMismatch(
            f"mode is {settings.mode!r}, and the drafter {called} is a {model.name} drafter.",
            f"Use --mode {model.name} or --mode auto.",
            field="mode",
        )
    return _after_lookup(settings, model, lookup_first), model, model.name


def _after_lookup(settings: LoadSettings, model: Drafter, usual: bool | None = None) -> Drafter:
    """The drafter, with lookup before it where that is wanted; `usual` None: where its kind decides."""
    from mlx_dspark.drafters.first_hit import FirstHit

    usual = model.name == "dspark" if usual is None else usual
    first = usual if settings.lookup_drafts is None else settings.lookup_drafts
    if not first:
        _refuse_unused(settings, ("lookup_long_draft",), _USED_WITH["model"])
        return model
    lookup = lookup_drafter(settings.max_draft, long_draft=settings.lookup_long_draft, beside_model=True)
    return FirstHit([lookup, model])


def lookup_drafter(
    max_draft: MaxDraft, *, base: int = 6, long_draft: int = 32, beside_model: bool = False
) -> LookupDrafter:
    """A lookup drafter whose usual draft is the pinned `max_draft`, or `base` where none is pinned.

    Beside a model drafter it asks for longer matches, since a spurious hit forgoes that drafter's round.
    """
    from mlx_dspark.drafters.lookup import LONGEST_DRAFT, LookupDrafter

    pinned = max_draft if isinstance(max_draft, int) and max_draft > 0 else None
    min_n, max_n = (4, 5) if beside_model else (3, 4)
    usual = base if pinned is None else min(pinned, LONGEST_DRAFT)
    return LookupDrafter(min_n=min_n, max_n=max_n, max_draft=usual, long_draft=long_draft)


def _model_drafter(settings: LoadSettings, unnamed: str | None, progress: Progress) -> BlockDrafter:
    from mlx_dspark.catalog.progress import LoadProgress
    from mlx_dspark.catalog.resolve import resolve_drafter
    from mlx_dspark.drafters.load import load_drafter

    named = str(settings.drafter if unnamed is None else unnamed)
    found = resolve_drafter(named, progress=progress)
    progress(LoadProgress(f"reading drafter {found.name}"))
    return load_drafter(
        found.path,
        quantize_bits=settings.drafter_bits,
        window=settings.drafter_window,
        confidence_threshold=settings.confidence_threshold,
    )


def load_pair(
    model: str | os.PathLike[str] | None = None,
    drafter: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> tuple[Target, Any, Drafter | None, dict[str, Any]]:
    """Target, tokenizer, drafter and the model's config, for the functions that generate.

    Without `drafter`: the one shipped with the model, else lookup. `settings` are fields of LoadSettings.
    Raises UsageError, LoadError or DownloadError.
    """
    asked = LoadSettings.of({"model": model, "drafter": drafter, **settings})
    if asked.max_batch != 1:
        raise UsageError(
            f"max_batch is {asked.max_batch}, and functions that generate answer one prompt.",
            "Leave it out, or use load, whose session threads can share.",
            field="max_batch",
        )
    parts = calibrated(load_parts(asked), asked.calibrate)
    if parts.link is not None:
        raise UsageError(
            f"{parts.link.size} processes share the model, and functions that generate run in one.",
            "Use load, whose sessions the other processes can follow.",
        )
    return parts.target, parts.tokenizer, parts.drafter, parts.config


def load_dflash_pair(
    model: str | os.PathLike[str] | None = None,
    drafter: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> tuple[Target, Any, Drafter | None, dict[str, Any]]:
    """As `load_pair`, for a DFlash drafter; any other kind is refused."""
    if "mode" in settings:
        raise UsageError(
            "mode is given, and load_dflash_pair loads a DFlash drafter only.",
            "Leave it out, or use load_pair.",
            field="mode",
        )
    return load_pair(model, drafter, mode="dflash", **settings)


def end_ids_of(tokenizer: Any) -> Collection[int]:
    """The end-of-sequence ids that a loaded tokenizer carries: one, several or none."""
    ids = getattr(tokenizer, "eos_token_ids", None)
    return frozenset(() if ids is None else (ids,) if isinstance(ids, int) else ids)
