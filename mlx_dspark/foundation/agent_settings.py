"""The knobs of the commands that start coding agents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mlx_dspark.foundation.knobs import About, Settings, Switch
from mlx_dspark.foundation.serve_settings import DEFAULT_URL, Address, Secret


@dataclass(frozen=True)
class ConnectSettings(Settings):
    """Which server an agent is to use."""

    group = "Running server"

    url: Annotated[str, About(Address(), "The address of a running server.")] = DEFAULT_URL
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
