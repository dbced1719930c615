"""The bar chart as a file, drawn by matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlx_dspark.bench.chart import Bar
from mlx_dspark.foundation.pictures import save_picture

_INCHES_PER_BAR = 0.32


def save_chart(bars: Sequence[Bar], path: Path, *, title: str, unit: str) -> None:
    """Write the bars, with their spread, to a .png, .svg or .pdf file.

    Raises UsageError where it cannot be written.
    """
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(8, 1.2 + _INCHES_PER_BAR * len(bars)), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars))
    spread = [
        [each.value - each.low for each in bars],
        [each.high - each.value for each in bars],
    ]
    axes.barh(places, [each.value for each in bars], xerr=spread, color="tab:blue", ecolor="0.4", capsize=2)
    axes.set_yticks(places, [f"{each.group} · {each.label}" for each in bars])
    axes.invert_yaxis()
    for place, each in zip(places, bars, strict=True):
        axes.annotate(f" {each.note}", (each.high, place), va="center", fontsize=8)
    axes.margins(x=0.12)
    axes.set_xlabel(unit)
    axes.set_title(title)
    save_picture(figure, path)
