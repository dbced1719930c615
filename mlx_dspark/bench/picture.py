"""The bar chart as a file, drawn by matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mlx_dspark.bench.chart import Bar
from mlx_dspark.foundation.bench_settings import PICTURES, TERMINAL
from mlx_dspark.foundation.errors import UsageError

_INCHES_PER_BAR = 0.32


def check_plot(plot: str | None) -> None:
    """Raises UsageError where nothing can be drawn there: asked before anything is measured."""
    if plot is None or plot == TERMINAL:
        return
    path = Path(plot)
    if path.suffix.lower() not in PICTURES:
        raise UsageError(
            f"plot is {plot!r}, which is neither {TERMINAL} nor a {', '.join(PICTURES)} file.",
            f"Write --plot {TERMINAL}, or --plot {path.stem or 'rates'}.png.",
            field="plot",
        )
    if not path.expanduser().absolute().parent.is_dir():
        raise UsageError(
            f"plot is {plot!r}, and its folder does not exist.", "Make it, or name another.", field="plot"
        )
    if not _installed():
        raise UsageError(
            f"plot is {plot!r}, and matplotlib, which draws pictures, is not installed.",
            f"Install it with: pip install 'mlx-dspark[plot]', or use --plot {TERMINAL}.",
            field="plot",
        )


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
    try:
        figure.savefig(path.expanduser(), dpi=150)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}.", "Name another file.", field="plot"
        ) from error


def _installed() -> bool:
    return find_spec("matplotlib") is not None
