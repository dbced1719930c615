"""Pictures are drawn by matplotlib, which is an extra: where one can be drawn, and writing it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.installing import pip_install

PICTURES = (".png", ".svg", ".pdf")


def check_picture(plot: str | None, *, stem: str, besides: str | None = None) -> None:
    """Raises UsageError where nothing can be drawn into the file `plot`: asked before anything is measured.

    `stem` is what a file could be called; `besides` a word that is taken in place of a file.
    """
    if plot is None or plot == besides:
        return
    path = Path(plot)
    if path.suffix.lower() not in PICTURES:
        kinds = f"{', '.join(PICTURES)} file"
        refused = f"no {kinds}" if besides is None else f"neither {besides} nor a {kinds}"
        named = f"--plot {path.stem or stem}.png"
        advice = named if besides is None else f"--plot {besides}, or {named}"
        raise UsageError(f"plot is {plot!r}, which is {refused}.", f"Write {advice}.", field="plot")
    if not path.expanduser().absolute().parent.is_dir():
        raise UsageError(
            f"plot is {plot!r}, and its folder does not exist.", "Make it, or name another.", field="plot"
        )
    if find_spec("matplotlib") is None:
        otherwise = "leave --plot out" if besides is None else f"use --plot {besides}"
        raise UsageError(
            f"plot is {plot!r}, and matplotlib, which draws pictures, is not installed.",
            f"Install it with: {pip_install('plot')}, or {otherwise}.",
            field="plot",
        )


def save_picture(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib. Raises UsageError where the file cannot be written."""
    try:
        figure.savefig(path.expanduser(), dpi=150)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}.", "Name another file.", field="plot"
        ) from error
