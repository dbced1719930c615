"""Agents are started with the running server in their environment, and in nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_dspark.cli.agent_setups import PI_EXTENSION, Server, claude, opencode, pi
from mlx_dspark.cli.agents import environment, shell_lines
from mlx_dspark.cli.main import run
from mlx_dspark.serving.app import create_app
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.stage import Stage
from tests.scripted_engine import ScriptedEngine, scripted_session, thinking_tokenizer
from tests.tiny_server import listening, tiny_host, tiny_server

SETUPS = {"claude": claude, "pi": pi, "opencode": opencode}
KEY = "it's a $ecret"
SERVER = Server("http://127.0.0.1:9", KEY, "owner/a model", 200_000, 32_000)
DUMP = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_server(rules=Rules(api_key="secret")) as url:
        yield url


@pytest.mark.parametrize("name", SETUPS)
def test_the_printed_commands_set_what_the_launched_process_gets(name: str) -> None:
    setup = SETUPS[name](SERVER)
    before = {
        "PATH": os.environ["PATH"],
        "ANTHROPIC_API_KEY": "x",
        "CLAUDE_CODE_USE_VERTEX": "1",
        "OTHER": "y",
    }
    script = "\n".join([*shell_lines(name, setup), f"{sys.executable} -c '{DUMP}'"])
    done = subprocess.run(["sh", "-c", script], env=before, capture_output=True, text=True, check=True)
    _, there = json.loads(done.stdout)
    wanted = environment(before, setup)
    assert {name: there[name] for name in wanted} == wanted
    assert set(before) - set(there) == set(before) - set(wanted)
    assert {each for each in before if each in wanted} >= {"PATH", "OTHER"}
    assert set(setup.unsets) & set(before) == set(before) - set(wanted)


@pytest.mark.parametrize("name", SETUPS)
def test_the_agent_replaces_the_command(name: str, url: str, tmp_path: Path) -> None:
    """A program of the agent's name says what it was started with, and its exit code is the command's."""
    program = tmp_path / name
    program.write_text(f"#!{sys.executable}\n{DUMP}\nsys.exit(7)\n")
    program.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),
        "HOME": str(tmp_path),
        "MLX_DSPARK_API_KEY": "secret",
        "ANTHROPIC_API_KEY": "somebody's",
    }
    command = [sys.executable, "-m", "mlx_dspark", name, "--url", f"{url}/", "--", "-p", "-", "--help"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    arguments, there = json.loads(done.stdout)
    setup = SETUPS[name](Server(url, "secret", "tiny", 512, 32768, False))
    assert arguments == [*setup.arguments, "-p", "-", "--help"]
    changed = {each: value for each, value in there.items() if variables.get(each) != value}
    assert changed.items() >= setup.sets.items()
    assert {each for each in changed if not each.startswith(("LC_", "__CF", "TRANSFORMERS_"))} == set(
        setup.sets
    )
    assert ("ANTHROPIC_API_KEY" in there) == (name != "claude")
    assert sorted(path.name for path in tmp_path.iterdir()) == [name]


def _told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", SETUPS)
def test_settings_are_printed_as_json(name: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _told(capsys, name, "--url", url, "--api-key", "secret", "--print-settings")
    assert code == 0
    assert json.loads(out) == SETUPS[name](Server(url, "secret", "tiny", 512, 32768, False)).settings


def test_a_window_that_claude_code_can_be_told_is_told() -> None:
    assert claude(SERVER).sets["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "160000"
    assert claude(SERVER).sets["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "32000"
    small = claude(Server("http://127.0.0.1:9", None, "m", 8192, 32_000)).sets
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in small
    assert small["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "8192"
    assert PI_EXTENSION.is_file()


class _Stranger(BaseHTTPRequestHandler):
    """Some other server."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html></html>")

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def stranger() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_is_in_the_way_is_told_with_what_to_do(
    url: str, stranger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    host = Host(None)
    with listening(create_app(host)) as empty:
        cases = [
            (["--url", "http://127.0.0.1:9"], "No server answers", "mlx-dspark serve"),
            (["--url", url], "asks for a key", "--api-key"),
            (["--url", url, "--api-key", "wrong"], "asks for a key, and not this one", "--api-key"),
            (["--url", stranger], "no server of mlx-dspark", "--url"),
            (["--url", empty], "no model loaded", "serve --model"),
            (["--url", "ftp://x"], "--url is", "an address such as"),
            (["--url", f"{url}/v1"], "--url is", "without a path"),
            (
                ["--url", url, "--api-key", "secret", "--print-env", "--print-settings"],
                "both",
                "one of the two",
            ),
            (["--frob"], "no flag --frob", "--help"),
        ]
        for arguments, wrong, mend in cases:
            code, out, err = _told(capsys, "claude", *arguments)
            assert (code, out) == (2, ""), arguments
            assert wrong in err
            assert mend in err
            assert "wrong" not in err
    host.close()


@pytest.mark.parametrize("phase", ["loading", "draining", "racing"])
def test_a_server_that_is_busy_with_its_model_is_waited_for(
    phase: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_host() as host, listening(create_app(host)) as busy:
        host.closed = "The model is busy."
        host.at(Stage(phase, "next", fraction=0.4))
        model = host.release() if phase == "loading" else None
        code, _, err = _told(capsys, "claude", "--url", busy)
        assert code == 2
        assert phase in err
        assert ("40% done" in err) == (phase == "loading")
        assert "Wait" in err
        assert "no model loaded" not in err
        host.at(None)
    if model is not None:
        model.close()


def test_what_a_model_cannot_do_is_known_to_the_agent(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def provider(server: str, key: str) -> Any:
        told = json.loads(_told(capsys, "pi", "--url", server, "--api-key", key, "--print-settings")[1])
        return told["providers"]["mlx-dspark"]["models"][0]

    assert provider(url, "secret")["reasoning"] is False
    engine = ScriptedEngine(tokenizer=thinking_tokenizer())
    with tiny_server(scripted_session(engine)) as thinking:
        assert provider(thinking, "x")["reasoning"] is True
        entry = httpx.get(f"{thinking}/v1/models").json()["data"][0]
        assert entry["max_tokens"] <= entry["max_input_tokens"]
    assert "15,000" in claude(Server("http://127.0.0.1:9", None, "m", 8192, 32_000)).remark
    assert claude(SERVER).remark == ""


def test_an_agent_that_is_not_installed_is_told_how(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in SETUPS:
        code, _, err = _told(capsys, name, "--url", url, "--api-key", "secret")
        assert code == 2
        assert "npm install -g" in err
