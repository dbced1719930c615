"""Kernels between settings, what was loaded, and the rounds of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.events import RoundReport
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.catalog.progress import Progress
    from mlx_dspark.contracts import Drafter
    from mlx_dspark.drafters.block import BlockDrafter
    from mlx_dspark.kernels.framework.live import LiveKernels
    from mlx_dspark.kernels.framework.offer import Wanted

See = Callable[[RoundReport], object]


def wanted_kernels(settings: LoadSettings, ranks: int = 1) -> Wanted:
    """What the settings say of kernels on a GPU; none where `ranks` processes must compute the same."""
    from mlx_dspark.kernels.framework.offer import Wanted

    if ranks > 1:
        return Wanted(small_m=False, multirow_attn=False, wide_gemm=False)
    return Wanted(settings.small_m, settings.multirow_attn, settings.wide_gemm)


def place_in_drafter(
    settings: LoadSettings,
    drafter: Drafter | None,
    layers: BlockDrafter | None,
    live: LiveKernels | None,
    report: Progress,
) -> None:
    """Offer kernels to a drafter's own `layers`, unless these run as one kernel; `live` takes in these and
    those of a draft model."""
    if live is None or live.back_end == "cpu":
        return
    from mlx_dspark.catalog.progress import LoadProgress
    from mlx_dspark.drafters.draft_model.drafter import DraftModelDrafter
    from mlx_dspark.foundation.paths import default_cache_dir
    from mlx_dspark.kernels.framework.offer import Offer
    from mlx_dspark.targets.dense.target import DenseTarget

    for part in getattr(drafter, "parts", (drafter,)):
        model = part.model if isinstance(part, DraftModelDrafter) else None
        if isinstance(model, DenseTarget) and model.kernels is not None:
            live.join(model.kernels)
    if layers is None or layers.one_kernel:
        return
    offer = Offer(
        wanted_kernels(settings),
        default_cache_dir(),
        lambda words, part: report(LoadProgress(words, part)),
        back_end=live.back_end,
    )
    offer.place(layers.model)
    live.join(offer.live)


def watched(
    live: LiveKernels | None, curves: CostCurves | None, others: Sequence[See | None]
) -> Callable[[RoundReport], None] | None:
    """Hands live rounds on to `others`, and to a watch over the kernels where some are live; None where
    nobody wants them."""
    seeing = [see for see in others if see is not None]
    if live is not None and live.live:
        from mlx_dspark.kernels.framework.watch import SlowRounds

        seeing.append(SlowRounds(live, curves).see)
    if not seeing:
        return None

    def see(report: RoundReport) -> None:
        for each in seeing:
            each(report)

    return see
