"""The knobs of the commands that start coding agents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from mlx_dspark.foundation.knobs import About, Settings, Switch, Words
from mlx_dspark.foundation.serve_settings import Secret

_URL = re.compile(r"https?://[^/\s?#]+")


class _Address(Words):
    """The address of a server, without a path."""

    def __init__(self) -> None:
        super().__init__("an address such as http://127.0.0.1:8080, without a path")

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and _URL.fullmatch(value.rstrip("/")) is not None


@dataclass(frozen=True)
class ConnectSettings(Settings):
    """Which server an agent is to use."""

    group = "Running server"

    url: Annotated[str, About(_Address(), "The address of a running server.")] = "http://127.0.0.1:8080"
    api_key: Annotated[str | None, About(Secret(), "The server's key.")] = None


@dataclass(frozen=True)
class LaunchSettings(Settings):
    """What is done in place of starting the agent."""

    group = "In place of starting it"
    env_prefix = ""

    print_env: Annotated[
        bool, About(Switch(), "Print shell commands that set what the agent needs, and start nothing.")
    ] = False
    print_settings: Annotated[
        bool, About(Switch(), "Print the agent's own settings as JSON, and start nothing.")
    ] = False
