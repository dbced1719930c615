"""Cost curves as a picture, drawn by matplotlib, which is an extra."""

from __future__ import annotations

from pathlib import Path

from mlx_dspark.calibration.shape import knee, verify_curve
from mlx_dspark.cli.curves import ACCEPTANCE, rates
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.pictures import save_picture


def save_curves(curves: CostCurves, path: Path, *, title: str) -> None:
    """Verify cost by width on the left, predicted rates by cap on the right, one panel for each drafter.

    Raises UsageError where it cannot be written.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(5.5 * (1 + len(curves.draft)), 4.2), layout="constrained")
    costs, *gains = figure.subplots(1, 1 + len(curves.draft))
    for depth in sorted({point.depth for point in curves.verify if point.rows == 1}):
        curve = verify_curve(curves, depth=depth)
        costs.plot(list(curve), [seconds * 1e3 for seconds in curve.values()], "o-", label=f"depth {depth}")
        if (bend := knee(curve)) is not None:
            costs.axvline(bend, color="0.6", linestyle=":", label=f"knee {bend}")
    costs.set(xlabel="width, tokens", ylabel="ms a round", title="cost of a round", ylim=(0, None))
    for axes, source in zip(gains, curves.draft, strict=True):
        for acceptance in ACCEPTANCE:
            predicted = rates(curves, source, [acceptance])
            axes.plot(list(predicted), list(predicted.values()), "o-", label=f"accepts {acceptance:.0%}")
        axes.axhline(1.0, color="0.6", linestyle=":")
        axes.set(xlabel="cap", ylabel="times plain decoding", title=f"predicted rate, {source}")
    for axes in (costs, *gains):
        axes.legend(fontsize=8)
    figure.suptitle(title)
    save_picture(figure, path)
