"""The knobs of `inspect` and `doctor`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from mlx_dspark.foundation.knobs import About, Settings, Switch, Words
from mlx_dspark.foundation.serve_settings import DEFAULT_URL, OptionalAddress, Secret

_JSON = "Print one JSON object in place of the lines."


@dataclass(frozen=True)
class InspectSettings(Settings):
    """What is looked at, and how it is shown."""

    group = "Inspection"
    env_prefix = ""

    thing: Annotated[
        str | None,
        About(
            Words("a drafter or a model"),
            "A drafter or a model: a folder, a file, a hub repository.",
            unset="none",
        ),
    ] = None
    json: Annotated[bool, About(Switch(), _JSON)] = False


@dataclass(frozen=True)
class DoctorSettings(Settings):
    """What is checked, and how it is shown."""

    group = "Checks"
    env_prefix = ""

    pair: Annotated[
        str | os.PathLike[str] | None,
        About(
            Words("a model"),
            "Check this model, the drafter it gets, and whether drafts are accepted as often as is expected.",
            unset="the machine only",
        ),
    ] = None
    json: Annotated[bool, About(Switch(), _JSON)] = False


@dataclass(frozen=True)
class ServerToCheck(Settings):
    """Which server is checked."""

    group = "Server to check"

    url: Annotated[
        str | None,
        About(
            OptionalAddress(),
            "The server to ask how it is; that none answers there is then a failure.",
            unset=f"{DEFAULT_URL}, if one is there",
        ),
    ] = None
    api_key: Annotated[str | None, About(Secret(), "The key of that server.", unset="none")] = None
