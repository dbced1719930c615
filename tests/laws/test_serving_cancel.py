"""A cancel stops a load and nothing else, and what it reports is what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_dspark.engine.loop import VerifyLoop
from mlx_dspark.foundation.errors import BadCheckpoint, EngineLost
from mlx_dspark.serving.admin import swap as module
from mlx_dspark.serving.admin.swap import Swap
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.model import Model
from mlx_dspark.serving.stage import Stage
from tests.admin_server import admin_server, answered, asked, load
from tests.tiny import save_tiny

CHAT = "/v1/chat/completions"
RACE = {"prompt": "Hello there", "max_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("cancelled") / "one", seed=1)


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[httpx.Client, Swap]]:
    with admin_server() as (client, swap):
        assert load(client, folder, mode="baseline").status_code == 200
        yield client, swap


def until(true: Callable[[], Any], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


class Gate:
    """Where a thread waits until it may go on."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(20)


@pytest.mark.parametrize(("change", "body"), [("unload", {}), ("race", RACE)])
def test_what_waits_for_answers_is_told_by_health_and_not_cancelled(
    server: tuple[httpx.Client, Swap], monkeypatch: pytest.MonkeyPatch, change: str, body: dict[str, Any]
) -> None:
    client, swap = server
    launch, gate = VerifyLoop.launch, Gate()

    def held(*arguments: Any, **named: Any) -> Any:
        gate()
        return launch(*arguments, **named)

    monkeypatch.setattr(VerifyLoop, "launch", held)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(answered, client)
        assert gate.begun.wait(10)
        changing = pool.submit(client.post, f"/admin/{change}", json=body)
        until(lambda: swap.host.stage is not None)
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert health.json()["reason"] == client.post(CHAT, json=asked()).json()["error"]["message"]
        assert client.post("/admin/load/cancel", json={}).json()["cancelled"] is False
        gate.go.set()
        assert answer.result()
        assert changing.result().status_code == 200
        assert "error" not in changing.result().text.partition("event: ")[2].splitlines()[:1]
    assert (swap.host.model is None) == (change == "unload")


def test_a_race_is_told_by_health(server: tuple[httpx.Client, Swap], monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_dspark.serving.admin import race

    client, gate, run = server[0], Gate(), race.run_race

    def held(*arguments: Any, **named: Any) -> Any:
        gate()
        return run(*arguments, **named)

    monkeypatch.setattr(race, "run_race", held)
    with ThreadPoolExecutor() as pool:
        racing = pool.submit(client.post, "/admin/race", json=RACE)
        assert gate.begun.wait(10)
        assert client.get("/health").json()["status"] == "racing"
        gate.go.set()
        assert "event: done" in racing.result().text
    until(lambda: client.get("/health").status_code == 200)


def test_an_engine_that_cannot_be_ended_is_told_and_the_model_stays(
    server: tuple[httpx.Client, Swap], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = server[0]

    def stuck(*_: Any) -> None:
        raise EngineLost("The engine does not come to rest.", "It may hang; end the process.")

    with monkeypatch.context() as patched:
        patched.setattr(Model, "close", stuck)
        told = client.post("/admin/unload", json={})
        assert told.status_code == 503
        assert "come to rest" in told.json()["error"]["message"]
    assert answered(client)


def test_a_cancel_while_a_model_is_warmed_up_is_heeded_or_not_reported(
    server: tuple[httpx.Client, Swap], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, swap = server
    first, gate = answered(client), Gate()
    monkeypatch.setattr(Model, "warm_up", lambda self, tell: (tell(), gate()))
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load, client, folder, mode="lookup", warmup=True)
        assert gate.begun.wait(10)
        until(lambda: client.get("/admin/status").json()["phase"] == "warming up")
        cancelling = pool.submit(client.post, "/admin/load/cancel", json={})
        until(swap._stop.is_set)
        gate.go.set()
        assert cancelling.result().json()["cancelled"] is True
        assert loading.result().status_code == 409
    assert client.get("/admin/status").json()["mode"] == "baseline"
    assert answered(client) == first


def test_a_cancel_of_a_load_that_fails_by_itself_stopped_nothing(
    server: tuple[httpx.Client, Swap], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, swap = server
    gate = Gate()

    def failing(*_: Any, **__: Any) -> None:
        gate()
        raise BadCheckpoint("A weight is not finite.")

    monkeypatch.setattr(module, "examine", failing)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load, client, folder, mode="lookup")
        assert gate.begun.wait(10)
        cancelling = pool.submit(client.post, "/admin/load/cancel", json={})
        until(swap._stop.is_set)
        gate.go.set()
        assert cancelling.result().json()["cancelled"] is False
        assert loading.result().status_code == 422
    assert answered(client)


def test_who_watches_is_told_every_phase_and_not_every_step() -> None:
    host = Host(None)
    with host.board.bus.subscribe(4000, lambda: None) as watching:
        for phase in ("loading", "warming up"):
            for step in range(1000):
                host.at(Stage(phase, "m", fraction=step / 1000))
        host.at(None)
        frames, _ = watching.take()
    host.close()
    phases = [frame.data["stage"] and frame.data["stage"]["phase"] for frame in frames]
    assert list(dict.fromkeys(phases)) == ["loading", "warming up", None]
    assert len(frames) < 50
