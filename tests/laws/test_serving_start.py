"""What a server says when it is started and asked to end, and which settings it takes at all."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_dspark.cli.main import run
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.serving import loading
from mlx_dspark.serving.observe.machine import calibration_json
from mlx_dspark.serving.run import run_server
from mlx_dspark.session.calibrate import UNWANTED, Calibration
from tests.laws.test_serving_robust import running, until
from tests.scripted_engine import ScriptedEngine, scripted_session
from tests.tiny import save_tiny
from tests.tiny_server import tiny_session

ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"
PORT_0 = """
import mlx_dspark, os, signal
def ready(url):
    print(url, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
mlx_dspark.run_server(no_model=True, port=0, ready=ready)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("started") / "tiny-model")


def test_a_free_port_is_told_to_whoever_waits_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", PORT_0], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("http://127.0.0.1:")
    assert f"Listening on {done.stdout}" in done.stderr


@pytest.mark.parametrize(
    "setting",
    [
        {"drafter": "/nope"},
        {"mode": "dflash"},
        {"max_draft": 3},
        {"max_draft": 0},
        {"kv_bits": 8},
        {"calibrate": True},
    ],
)
def test_no_model_takes_no_setting_that_it_would_ignore(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as refused:
        run_server(no_model=True, port=0, **setting)
    assert refused.value.field in setting
    assert "/admin/load" in refused.value.next_step


def test_no_model_tells_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--no-model", "--port", "0", "--drafter", "/nope"]) == 2
    assert "--drafter is '/nope'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "told"), [("prot", "Did you mean port?"), ("qqqq", "stall_timeout")])
def test_a_setting_that_is_none_is_compared_with_all(name: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){name}.*{told.removesuffix('?')}"):
        run_server(None, **dict[str, Any]({name: 3}))


def test_costs_that_were_not_believed_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusing(parts: Any, *_: Any) -> Any:
        return replace(parts, calibration=Calibration(None, "the machine was busy"))

    monkeypatch.setattr(loading, "calibrated", refusing)
    monkeypatch.setattr("mlx_dspark.session.calibrate.calibrated", refusing)
    notes: list[str] = []
    asked = LoadSettings(model=folder, mode="lookup")
    loading.load_model(asked, ServeSettings(warmup=False), note=notes.append).model.close()
    assert notes == ["Costs not measured: the machine was busy."]
    assert run(["demo", "--model", str(folder), "--mode", "lookup"]) == 0
    assert "costs not measured: the machine was busy" in capsys.readouterr().err


def test_why_no_costs_are_known_says_what_would_have_them_measured() -> None:
    with tiny_session() as session:
        nobody = calibration_json(session)
        session.calibration = Calibration(None, UNWANTED)
        unasked = calibration_json(session)
    reasons = [each["reason"] for each in (calibration_json(None), nobody, unasked)]
    assert "No model" in reasons[0]
    assert "nobody drafts" in reasons[1]
    assert "calibrate" in reasons[2]


def test_a_busy_server_that_is_to_end_says_what_it_waits_for_and_refuses_who_has_not_begun() -> None:
    engine = ScriptedEngine("word " * 40, step=1)
    with running(scripted_session(engine)) as (url, server, ended), ThreadPoolExecutor() as pool:
        notes: list[str] = []
        server._note = notes.append
        engine.go.clear()
        begun = pool.submit(httpx.post, url + CHAT, json=ASKED, timeout=30)
        assert until(lambda: server._host.under_way == 1)
        engine.admit.clear()
        waiting = pool.submit(httpx.post, url + CHAT, json=ASKED, timeout=30)
        assert until(lambda: engine.asked == 2)
        server.ask_to_end()
        refused = waiting.result(5)
        assert (refused.status_code, begun.done()) == (503, False)
        assert "one answer under way" in notes[0]
        assert "again" in notes[0]
        server.ask_to_end()
        assert begun.result(5).status_code == 503
        engine.admit.set()
        engine.go.set()
    assert not ended


def test_a_start_that_fails_is_told_once(folder: Path) -> None:
    command = [sys.executable, "-m", "mlx_dspark", "serve", "--model", str(folder / "nope"), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("There is no model") == 1
    assert "No model is loaded" not in done.stderr
