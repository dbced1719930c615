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
from mlx_dspark.serving.dialects.anthropic import AnthropicMessages
from mlx_dspark.serving.dialects.anthropic_body import MessagesBody
from mlx_dspark.serving.host import Host
from tests.scripted import scripted_session
from tests.tiny_server import listening, tiny_host

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BIN = HERE / "node_modules" / ".bin"
RECORDED = ROOT / "tests" / "golden" / "agents"
DONE = "Mended: add adds now."
STRAY = "stray.txt"
_LONGEST = 40
_SUMMARY, _TAIL = "Respond with plain text only", 3000
"""How Claude Code asks for a summary, near the end of the prompt."""
_SECONDS = 120


@dataclass(frozen=True)
class Agent:
    """An agent's arguments, and how its model calls the tools that read, change and run, and others that it
    has."""

    name: str
    arguments: Sequence[str]
    read: Callable[[str], str]
    edit: Callable[[str, str, str], str]
    run: Callable[[str], str]
    others: Sequence[str] = ()


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


AGENTS = {
    "claude": Agent(
        "claude",
        ("-p", "Mend calc.py.", "--permission-mode", "acceptEdits", "--allowedTools", "Bash(python3:*)"),
        lambda path: _call("Read", file_path=path),
        lambda path, old, new: _call("Edit", file_path=path, old_string=old, new_string=new),
        lambda command: _call("Bash", command=command, description="Run the check"),
        others=[_call("ToolSearch", query="select:NotebookEdit")],
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
    return f"{', '.join(absent)} not in {BIN}: run `make test`, or `npm ci --prefix tests/agents`."


@dataclass
class Outcome:
    """What came of it. `asked` are the bodies of the agent's requests for answers, `statuses` those of all
    that it posted."""

    done: subprocess.CompletedProcess[str]
    code: str
    asked: list[Any] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    summaries: int = 0


class _Recorder:
    """ASGI middleware that keeps the bodies of posts, and the statuses of their answers. After the first, the
    model's context ends `room` tokens behind its prompt."""

    def __init__(self, app: Any, outcome: Outcome, host: Host, room: int | None) -> None:
        self._app, self._outcome, self._host, self._room = app, outcome, host, room

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
        if self._room is not None and self._outcome.asked and self._host.model is not None:
            dialect, body = AnthropicMessages(), MessagesBody(**self._outcome.asked[0])
            self._host.model.context = await self._host.count(dialect, body) + self._room
            self._room = None


def broken(agent: Agent) -> str:
    """A call with whole arguments that breaks off behind them; run, it would leave the file STRAY."""
    whole = agent.run(f'python3 -c \'open("{STRAY}", "w")\'')
    return whole.replace("}\n</tool_call>", ", oops}\n</tool_call>")


def mend(
    agent: Agent, folder: Path, *, first: Sequence[str] = (), comments: int = 0, room: int | None = None
) -> Outcome:
    """Have an agent mend `calc.py` in `work`, which it reads, changes and checks, after it said `first`.

    The file begins with so many lines of comments; the model's context ends `room` tokens after the first
    prompt.
    """
    work, home = folder / "work", folder / "home"
    work.mkdir()
    home.mkdir()
    file = work / "calc.py"
    file.write_text("# This line says nothing.\n" * comments + "def add(a, b):\n    return a - b\n")
    (work / "check.py").write_text("from calc import add\n\nassert add(2, 3) == 5\nprint('all is well')\n")
    script = _Script(agent, first, str(file))
    outcome = Outcome(subprocess.CompletedProcess([], 0), "")
    with (
        tiny_host(scripted_session(script)) as host,
        listening(_Recorder(create_app(host), outcome, host, room)) as url,
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
    outcome.code, outcome.summaries = file.read_text(), script.summaries
    return outcome


class _Script:
    """The model: one step after the other, and a summary where one is asked for."""

    def __init__(self, agent: Agent, first: Sequence[str], file: str) -> None:
        self.summaries = 0
        self._steps = [
            *first,
            f"<think>\nWhat does it say?\n</think>\n\nI read it.\n{agent.read(file)}",
            f"The sign is wrong.\n{agent.edit(file, 'a - b', 'a + b')}",
            agent.run("python3 check.py"),
        ]

    def __call__(self, prompt: str) -> str:
        if _SUMMARY in prompt[-_TAIL:]:
            self.summaries += 1
            return "<analysis>Hm.</analysis><summary>calc.py was read; its sign is wrong.</summary>"
        results = re.findall("<tool_response>(.*?)</tool_response>", prompt, re.DOTALL)
        done = len(results) + self.summaries
        if done < len(self._steps):
            return self._steps[done]
        return DONE if "all is well" in results[-1] else "It does not work."


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
