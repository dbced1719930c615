"""The knobs of `kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mlx_dspark.foundation.knobs import About, Settings, Switch


@dataclass(frozen=True)
class KernelSettings(Settings):
    """What is tried, and how it is shown."""

    group = "Kernels"
    env_prefix = ""

    check: Annotated[
        bool,
        About(
            Switch(),
            "Try every case of every kernel on this machine against float32: errors, thread limits, and on "
            "a GPU the device's own times. What is found out is remembered.",
        ),
    ] = False
    json: Annotated[bool, About(Switch(), "Print one JSON object in place of the tables.")] = False
