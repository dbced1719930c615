"""A coding agent mends a bug: the agent is real, started by our launcher on our server; the model is a
script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_dspark.serving.app import create_app
from tests.scripted import scripted_session
from tests.tiny_server import listening, tiny_host

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BIN = HERE / "node_modules" / ".bin"
RECORDED = ROOT / "tests" / "golden" / "agents"
DONE = "Mended: add adds now."
_LONGEST = 40
_SECONDS = 120


@dataclass(frozen=True)
class Agent:
    """An agent's arguments, and how its model calls the tools that read, change and run."""

    name: str
    arguments: Sequence[str]
    read: Callable[[str], str]
    edit: Callable[[str, str, str], str]
    run: Callable[[str], str]


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


AGENTS = {
    "claude": Agent(
        "claude",
        ("-p", "Mend calc.py.", "--permission-mode", "acceptEdits", "--allowedTools", "Bash(python3:*)"),
        lambda path: _call("Read", file_path=path),
        lambda path, old, new: _call("Edit", file_path=path, old_string=old, new_string=new),
        lambda command: _call("Bash", command=command, description="Run the check"),
    ),
    "pi": Agent(
        "pi",
        ("-p", "Mend calc.py."),
        lambda path: _call("read", path=path),
        lambda path, old, new: _call("edit", path=path, edits=[{"oldText": old, "newText": new}]),
        lambda command: _call("bash", command=command),
    ),
}


def missing() -> str:
    """What to do before an agent can be started; empty where all is there."""
    absent = [name for name in ("node", *AGENTS) if not (BIN / name).exists()]
    if not absent:
        return ""
    return f"{', '.join(absent)} not in {BIN}: run `npm ci --prefix tests/agents`; npm comes with Node."


@dataclass
class Outcome:
    """What came of it. `asked` are the bodies of the agent's requests for answers, `statuses` those of all
    that it posted."""

    done: subprocess.CompletedProcess[str]
    code: str
    asked: list[Any] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)


class _Recorder:
    """ASGI middleware that keeps the bodies of posts, and the statuses of their answers."""

    def __init__(self, app: Any, outcome: Outcome) -> None:
        self._app, self._outcome = app, outcome

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        pieces: list[bytes] = []

        async def receiving() -> Any:
            message = await receive()
            pieces.append(message.get("body", b""))
            return message

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start" and scope["method"] == "POST":
                self._outcome.statuses.append(message["status"])
                self._outcome.asked.append(json.loads(b"".join(pieces)))
            await send(message)

        await self._app(scope, receiving, sending)


def mend(agent: Agent, folder: Path) -> Outcome:
    """Have an agent mend `folder/work/calc.py`, which it reads, changes and checks."""
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    file = work / "calc.py"
    file.write_text("def add(a, b):\n    return a - b\n")
    (work / "check.py").write_text("from calc import add\n\nassert add(2, 3) == 5\nprint('all is well')\n")
    steps = [
        f"<think>\nWhat does it say?\n</think>\n\nI read it.\n{agent.read(str(file))}",
        f"The sign is wrong.\n{agent.edit(str(file), 'a - b', 'a + b')}",
        agent.run("python3 check.py"),
    ]

    def script(prompt: str) -> str:
        results = re.findall("<tool_response>(.*?)</tool_response>", prompt, re.DOTALL)
        if len(results) < len(steps):
            return steps[len(results)]
        return DONE if "all is well" in results[-1] else "It does not work."

    outcome = Outcome(subprocess.CompletedProcess([], 0), "")
    with (
        tiny_host(scripted_session(script)) as host,
        listening(_Recorder(create_app(host), outcome)) as url,
    ):
        command = [sys.executable, "-m", "mlx_dspark", agent.name, "--url", url, "--", *agent.arguments]
        outcome.done = subprocess.run(
            command,
            cwd=work,
            env=_variables(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    outcome.code = file.read_text()
    return outcome


def _variables(home: Path) -> dict[str, str]:
    """A bare environment: nothing of this machine's user, and no calls home."""
    path = [str(BIN), str(Path(sys.executable).parent), "/usr/bin", "/bin"]
    return {
        "PATH": os.pathsep.join(path),
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
        "ANTHROPIC_API_KEY": "not-to-be-used",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "PI_OFFLINE": "1",
        "PI_TELEMETRY": "0",
    }


def scrubbed(value: Any, name: str = "") -> Any:
    """A body without what its agent's authors wrote and what tells of a machine: fields, types and short
    words are left."""
    if isinstance(value, dict):
        return {key: scrubbed(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [scrubbed(each, name) for each in value]
    if isinstance(value, str) and (name == "description" or len(value) > _LONGEST or "/" in value):
        return "Scrubbed."
    return value


def names(value: Any, inside: str = "") -> set[str]:
    """Every field of a body with where it stands, as `messages.content.type=text`; tools' schemas are left
    out."""
    if isinstance(value, list):
        return {each for item in value for each in names(item, inside)}
    if isinstance(value, dict):
        kind = f"={value['type']}" if isinstance(value.get("type"), str) else ""
        found = {f"{inside}{kind}"}
        for key, each in value.items():
            if key not in ("input_schema", "input"):
                found |= names(each, f"{inside}.{key}" if inside else key)
        return found
    return {inside}
