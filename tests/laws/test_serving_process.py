"""`mlx-dspark serve` as a process: what it says, what its flags do, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from mlx_dspark.catalog.usual import usual_sampling
from mlx_dspark.cli.main import run
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.serving import run as module_of_runs
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.loading import context_window, defaults_of
from mlx_dspark.serving.model import Model, chunk_of
from mlx_dspark.session.pair import Parts, load_parts
from tests.tiny import save_tiny
from tests.tiny_server import tiny_session

ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"
HANGING = """
import sys, threading
from mlx_dspark.cli.main import run
from mlx_dspark.engine.scheduler import Scheduler
submit = Scheduler.submit
def hanging(self, request, notify=None):
    if request.max_new_tokens == 33:
        object.__setattr__(request, "stop_check", lambda _: threading.Event().wait())
    return submit(self, request, notify)
Scheduler.submit = hanging
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("served") / "tiny-model")


@contextmanager
def process(
    folder: Path, *flags: str, program: Sequence[str] = ("-m", "mlx_dspark"), **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server, its address, and the lines it has written so far."""
    command = [sys.executable, *program, "serve", "--model", str(folder), "--port", "0", *flags]
    environment = os.environ | {"MLX_DSPARK_CACHE_DIR": str(folder.parent / "cache")} | variables
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line.strip())
            if address := re.fullmatch(r"Listening on (http://\S+)\n", line):
                break
        else:
            pytest.fail("\n".join(lines))
        try:
            yield server, address[1], lines
        finally:
            server.kill()


def test_flags_variables_and_an_end_by_signal(folder: Path) -> None:
    flags = ("--mode", "lookup", "--context-window", "100", "--default-max-tokens", "5", "--max-batch", "2")
    with process(folder, *flags, MLX_DSPARK_API_KEY="k3y") as (server, url, lines):
        assert not any("k3y" in line for line in lines)
        assert httpx.post(url + CHAT, json=ASKED).status_code == 401
        with httpx.Client(headers={"x-api-key": "k3y"}, base_url=url) as client:
            health = client.get("/health").json()
            assert (health["context_window"], health["max_batch"], health["mode"]) == (100, 2, "lookup")
            answer = client.post(CHAT, json=ASKED).json()
            assert answer["usage"]["completion_tokens"] == 5
            assert answer["model"] == "tiny-model"
            full = client.post(CHAT, json={**ASKED, "max_tokens": 200}).json()
            assert full["usage"]["total_tokens"] == 100
            long = {"messages": [{"role": "user", "content": "word " * 100}]}
            assert client.post(CHAT, json=long).json()["error"]["code"] == "context_length_exceeded"
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0


def test_an_engine_that_hangs_ends_the_process_with_an_exit_code(folder: Path) -> None:
    flags = ("--mode", "baseline", "--stall-timeout", "5", "--no-warmup")
    with process(folder, *flags, program=("-c", HANGING)) as (server, url, _):
        told = httpx.post(url + CHAT, json={**ASKED, "max_tokens": 33}, timeout=30)
        assert told.status_code == 503
        assert server.wait(20) == 70


def test_without_the_extra_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlx_dspark.cli.serve as module

    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert run(["serve"]) == 2
    told = capsys.readouterr().err
    assert re.search(r"pip install '/.+\[serve\]'", told)
    assert "'mlx-dspark[" not in told


def parts(room: int, **usual: float) -> Parts:
    spec = type("Spec", (), {"context": 1000})
    target = type("Target", (), {"spec": spec})
    return Parts(target, None, None, {}, frozenset(), "baseline", room=room, usual=usual)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("room", "asked", "window", "names"),
    [
        (0, None, None, ""),
        (1000, None, None, ""),
        (600, None, 600, "600"),
        (600, 500, 500, ""),
        (600, 700, 700, "600"),
        (0, 700, 700, ""),
        (1000, 2000, 1000, "1000"),
    ],
)
def test_the_context_window_is_what_fits_unless_one_is_asked_for(
    room: int, asked: int | None, window: int | None, names: str
) -> None:
    notes: list[str] = []
    assert context_window(parts(room), asked, notes.append) == window
    assert bool(notes) == bool(names)
    assert all(names in note for note in notes)


def test_requests_get_the_servers_defaults_then_the_models() -> None:
    usual = parts(0, temperature=0.6, top_p=0.9)
    bare = defaults_of(ServeSettings(), usual)
    assert (bare.temperature, bare.top_p, bare.top_k) == (0.6, 0.9, 0)
    said = defaults_of(ServeSettings(default_temperature=0.0, default_top_k=4), usual)
    assert (said.temperature, said.top_p, said.top_k) == (0.0, 0.9, 4)
    assert said.sampling(temperature=0.3, top_p=None).temperature == 0.3
    assert said.tokens(None) == said.tokens(0) == 2048
    assert said.tokens(10**9) == 32768


def test_how_the_makers_would_have_a_model_sampled(folder: Path, tmp_path: Path) -> None:
    loaded = load_parts(LoadSettings(model=folder, mode="baseline"))
    assert (loaded.room, dict(loaded.usual)) == (512, {})
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 7}))
    assert usual_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20}
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    assert usual_sampling(tmp_path) == {}


@pytest.mark.parametrize(
    ("seconds", "chunk"), [(0.001, 512), (0.1, 512), (0.4, 128), (0.5, 64), (60.0, 64), (0.0, 512)]
)
def test_a_chunk_of_a_prompt_is_as_long_as_others_can_wait(seconds: float, chunk: int) -> None:
    assert chunk_of(128, seconds, 512) == chunk


def test_warming_up_leaves_answers_as_they_are() -> None:
    with tiny_session() as session:
        told = session.generate("Hello", max_new_tokens=9)
        model = Model(session)
        model.warm_up()
        assert model.engine.prefill_chunk in range(64, 513)
        assert session.generate("Hello", max_new_tokens=9).token_ids == told.token_ids
        assert model.pulse.vitals().well


class Ran:
    """What a server would have been run with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module_of_runs, "Running", self)
        self.failure, self.stuck = None, False

    def __call__(self, host: Host, settings: ServeSettings, *_: object) -> Ran:
        self.clock, self.most = host.clock, host.gate._most
        self.body_limit = module_of_runs.rules_of(settings).body_limit
        return self

    async def run(self, *_: object) -> None:
        """Serves nothing."""


@pytest.mark.parametrize("by_flag", [True, False])
@pytest.mark.parametrize(
    ("flag", "value", "read"),
    [
        ("stream-keepalive-s", 3, lambda ran: ran.clock.keep_alive),
        ("queue-timeout", 7, lambda ran: ran.clock.queue),
        ("request-timeout", 9, lambda ran: ran.clock.deadline),
        ("queue", 5, lambda ran: ran.most - 1),
        ("max-body-mb", 2, lambda ran: ran.body_limit / 1e6),
    ],
)
def test_limits_are_those_of_the_flags_and_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, flag: str, value: int, read: Callable[[Ran], float], by_flag: bool
) -> None:
    ran = Ran(monkeypatch)
    if not by_flag:
        monkeypatch.setenv(f"MLX_DSPARK_{flag.replace('-', '_').upper()}", str(value))
    assert run(["serve", "--no-model", "--port", "0", *([f"--{flag}", str(value)] if by_flag else [])]) == 0
    assert read(ran) == value


def test_a_served_app_has_the_limit_of_bodies_that_was_set() -> None:
    running = module_of_runs.Running(Host(None), ServeSettings(max_body_mb=0.001, allow_host="testserver"))
    app: Any = running._config().app
    with TestClient(app) as client:
        assert client.post(CHAT, json={"messages": "x" * 2000}).status_code == 413


def test_warming_up_ends_where_it_is_told_to() -> None:
    with tiny_session() as session:
        model, told = Model(session), iter(range(3))

        def tell() -> None:
            next(told)

        with pytest.raises(StopIteration):
            model.warm_up(tell)
        assert model.engine.wait(10)
        assert model.pulse.vitals().silent == 0.0
