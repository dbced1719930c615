"""Whether settings can be loaded, found out without reading the model: what runs now can go on meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.draft_model import find_draft_model
from mlx_dspark.session.fits import MemoryGuard
from mlx_dspark.session.pair import drafting_mode, find_parts, read_drafter, refuse_unfit

if TYPE_CHECKING:
    from mlx_dspark.catalog.progress import Progress


def examine(settings: LoadSettings, progress: Progress, *, released: int = 0) -> None:
    """Find, and where needed fetch, what `load_parts` would load, and refuse what its files show to be unfit.

    The drafter is read, the model is not. `released` bytes of memory are taken now and will be free by then.
    Raises UsageError, LoadError or DownloadError, as `load_parts` does.
    """
    from mlx_dspark.catalog.memory import memory_here

    have = memory_here(released) if settings.memory_guard else None
    guard = MemoryGuard(settings, have)
    found = find_parts(settings, progress, guard, 1)
    config = refuse_unfit(found.model, settings)
    if settings.draft_model is not None:
        drafting_mode(settings)
        find_draft_model(settings, progress)
        guard.weigh_found(found.model, config, None)
        return
    _, drafter, _, _ = read_drafter(settings, found.shipped, found.known, progress)
    guard.weigh_found(found.model, config, drafter)
