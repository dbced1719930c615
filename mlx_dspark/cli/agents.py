"""`claude`, `pi`, `opencode`: coding agents started on a running server, through their own process's
environment only."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_dspark.cli import agent_setups
from mlx_dspark.cli.agent_setups import Server, Setup
from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import note
from mlx_dspark.foundation.agent_settings import ConnectSettings, LaunchSettings
from mlx_dspark.foundation.errors import UsageError

_SECONDS = 10.0
_WAIT = "Wait until it answers, and give the command again."
_LOAD = "Load one, or start a server with one: mlx-dspark serve --model MODEL."


def claude(connect: ConnectSettings, launch: LaunchSettings, *, rest: Sequence[str]) -> int:
    """Start Claude Code on a running server."""
    return _run(
        "claude", "npm install -g @anthropic-ai/claude-code", agent_setups.claude, connect, launch, rest
    )


def pi(connect: ConnectSettings, launch: LaunchSettings, *, rest: Sequence[str]) -> int:
    """Start pi on a running server."""
    install = "npm install -g @earendil-works/pi-coding-agent"
    return _run("pi", install, agent_setups.pi, connect, launch, rest)


def opencode(connect: ConnectSettings, launch: LaunchSettings, *, rest: Sequence[str]) -> int:
    """Start OpenCode on a running server."""
    return _run("opencode", "npm install -g opencode-ai", agent_setups.opencode, connect, launch, rest)


def _run(
    name: str,
    install: str,
    setup_of: Callable[[Server], Setup],
    connect: ConnectSettings,
    launch: LaunchSettings,
    rest: Sequence[str],
) -> int:
    refuse_ranks(name)
    if launch.print_env and launch.print_settings:
        raise UsageError(
            "--print-env and --print-settings are both given.", "Give one of the two.", field="print_settings"
        )
    server = find_server(connect)
    setup = setup_of(server)
    if launch.print_settings:
        print(json.dumps(setup.settings, indent=2))
        return 0
    if launch.print_env:
        print("\n".join(shell_lines(name, setup)))
        return 0
    program = shutil.which(name)
    if program is None:
        raise UsageError(f"{name} is not installed, or not on PATH.", f"Install it: {install}.")
    room = f", {server.context} tokens of context" if server.context else ""
    if setup.remark:
        note(setup.remark)
    note(f"{name} with {server.model} at {server.url}{room}.")
    become(program, [name, *setup.arguments, *rest], environment(os.environ, setup))
    return 0


def become(program: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Go on as another program; does not return."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, list(arguments), dict(variables))


def environment(variables: Mapping[str, str], setup: Setup) -> dict[str, str]:
    """A process's variables as an agent is to find them."""
    kept = {name: value for name, value in variables.items() if name not in setup.unsets}
    return kept | dict(setup.sets)


def shell_lines(name: str, setup: Setup) -> list[str]:
    """What a POSIX shell does the same with."""
    lines = [f"export {variable}={shlex.quote(value)}" for variable, value in setup.sets.items()]
    if setup.unsets:
        lines.append(f"unset {' '.join(setup.unsets)}")
    if setup.arguments:
        lines.append(f"# then: {name} {shlex.join(setup.arguments)}")
    return lines


def find_server(connect: ConnectSettings) -> Server:
    """The server that runs there. Raises UsageError saying how to start one, or what is wrong with it."""
    url, key = connect.url.rstrip("/"), connect.api_key
    health = _asked(f"{url}/health", key, faulty=True)
    models = _asked(f"{url}/v1/models", key)
    listed, status = models.get("data"), health.get("status")
    if not isinstance(listed, list) or not isinstance(status, str):
        raise _strange(url)
    if status == "loading":
        raise UsageError(f"The server at {url} is loading a model{_how_far(health)}.", _WAIT, field="url")
    if status in ("draining", "racing"):
        raise UsageError(f"The server at {url} is {status}: {health.get('reason', '')}", _WAIT, field="url")
    if not listed:
        raise UsageError(f"The server at {url} has no model loaded.", _LOAD, field="url")
    if status != "ok":
        raise UsageError(
            f"The server at {url} is {status}: {health.get('reason', '')}",
            "See what it says on its terminal.",
            field="url",
        )
    model = listed[0]
    context, thinks = model.get("context_length"), model.get("thinking", True)
    return Server(url, key, model["id"], context, health["max_output_tokens"], thinks)


def _how_far(health: Mapping[str, Any]) -> str:
    """The phase of a load, and how much of it is done where that is known."""
    stage = health.get("loading")
    if not isinstance(stage, Mapping):
        return ""
    fraction = stage.get("fraction")
    done = f", {fraction:.0%} done" if isinstance(fraction, float) else ""
    return f" ({stage.get('phase')}{done})"


def _asked(url: str, key: str | None, *, faulty: bool = False) -> dict[str, Any]:
    """The JSON object that a route answers; with `faulty`, whatever its status. Raises UsageError."""
    base = url.removesuffix("/v1/models").removesuffix("/health")
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS) as response:
            raw = response.read()
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise UsageError(
                f"The server at {base} asks for a key{', and not this one' if key else ''}.",
                "Give it with --api-key, or as MLX_DSPARK_API_KEY.",
                field="api_key",
            ) from error
        if not faulty:
            raise _strange(base) from error
        raw = error.read()
    except (OSError, http.client.HTTPException) as error:
        raise UsageError(
            f"No server answers at {base}.",
            "Start one in another terminal: mlx-dspark serve. Or name another with --url.",
            field="url",
        ) from error
    try:
        told = json.loads(raw)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise _strange(base)
    return told


def _strange(url: str) -> UsageError:
    return UsageError(
        f"What answers at {url} is no server of mlx-dspark.",
        "Name one with --url, or start one: mlx-dspark serve.",
        field="url",
    )
