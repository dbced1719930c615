"""The knobs of `calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mlx_dspark.foundation.knobs import About, Settings, Switch, Words
from mlx_dspark.foundation.pictures import PICTURES


@dataclass(frozen=True)
class CalibrateSettings(Settings):
    """What is measured, and how it is shown."""

    group = "Calibration"
    env_prefix = ""

    force: Annotated[bool, About(Switch(), "Measure anew, though the costs are known.")] = False
    show: Annotated[
        bool, About(Switch(), "Print what is known of this model, with any drafter, and measure nothing.")
    ] = False
    json: Annotated[bool, About(Switch(), "Print one JSON object in place of the tables.")] = False
    plot: Annotated[
        str | None,
        About(
            Words(f"a file that ends in {', '.join(PICTURES)}"),
            f"Draw the curves into a {', '.join(PICTURES)} file as well; needs matplotlib.",
        ),
    ] = None
