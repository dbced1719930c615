"""Swapping the model of a running server: nothing is lost silently, and what fails leaves what was there."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_dspark.catalog import folder as folders
from mlx_dspark.catalog.progress import LoadProgress
from mlx_dspark.engine.loop import VerifyLoop
from mlx_dspark.foundation.errors import BadCheckpoint, UsageError
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.serving.admin import swap as module
from mlx_dspark.serving.admin.body import as_json
from mlx_dspark.serving.admin.swap import Swap
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.run import Running, bound, run_server
from mlx_dspark.session.pair import load_parts
from tests.admin_server import admin_server, answered, asked, load
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dspark

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "one", seed=1)
    save_tiny(folder / "two", seed=2)
    save_tiny_dspark(folder / "drafter")
    broken = save_tiny(folder / "broken", seed=3)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    (folder / "drafter-of-another").mkdir()
    save_tiny_dspark(folder / "drafter-of-another", hidden=128)
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[tuple[httpx.Client, Swap]]:
    with admin_server() as (client, swap):
        yield client, swap


@pytest.fixture
def slow_rounds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes every round of an engine take longer."""
    launch, pause = VerifyLoop.launch, [0.0]

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(pause[0])
        return launch(*arguments, **named)

    monkeypatch.setattr(VerifyLoop, "launch", slow)
    return lambda seconds: pause.__setitem__(0, seconds)


@pytest.fixture
def client(server: tuple[httpx.Client, Swap], models: Path) -> httpx.Client:
    """One whose server has the model `one`."""
    client, swap = server
    if (
        swap.host.model is None
        or swap.host.model.session.name != "one"
        or swap.host.model.session.mode != "baseline"
    ):
        assert load(client, models / "one", mode="baseline").status_code == 200
    return client


def test_without_a_model_requests_are_told_so_until_one_is_loaded(models: Path) -> None:
    with admin_server() as (client, _):
        refused = client.post(CHAT, json=asked())
        assert refused.status_code == 503
        assert "No model is loaded" in refused.json()["error"]["message"]
        assert client.get("/health").status_code == 503
        assert client.get("/admin/status").json()["ready"] is False
        assert client.post("/admin/unload", json={}).json()["unloaded"] is False
        loaded = load(client, models / "one", max_batch=3, mode="lookup", context_window=100)
        assert loaded.status_code == 200
        assert loaded.json()["settings"]["max_batch"] == 3
        health = client.get("/health").json()
        assert (health["model"], health["mode"], health["max_batch"]) == ("one", "lookup", 3)
        assert health["context_window"] == 100
        assert health["warnings"] == []
        assert load(client, models / "one", context_window=5000).status_code == 200
        assert "all that the model has" in client.get("/admin/status").json()["warnings"][0]
        assert answered(client)


def test_another_model_answers_after_a_swap_and_the_first_one_again_as_before(
    client: httpx.Client, models: Path
) -> None:
    first = answered(client)
    assert load(client, models / "two", mode="baseline").status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "two"
    assert answered(client) != first
    assert load(client, models / "one", mode="lookup").status_code == 200
    assert answered(client) == first


def test_a_drafter_is_a_setting_like_any_other_and_none_stays_behind(
    client: httpx.Client, models: Path
) -> None:
    first = answered(client)
    told = load(client, models / "one", drafter=str(models / "drafter"), max_draft=3)
    assert told.status_code == 200, told.text
    assert (told.json()["mode"], told.json()["settings"]["max_draft"]) == ("dspark", 3)
    assert answered(client) == first
    told = load(client, models / "one", mode="lookup")
    assert told.json()["settings"]["drafter"] is None


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "model"),
        ({"model": None}, 400, "model"),
        ({"model": 3}, 400, "model"),
        ({"model": "nothing-of-that-name"}, 404, None),
        ({"model": "a" * 300}, 404, None),
        ({"model": "a" * 5000}, 400, "model"),
        ({"model": "ONE", "drafter": "a" * 300}, 404, None),
        ({"model": "ONE", "draft_model": "a" * 300}, 404, None),
        ({"model": "x\0y"}, 404, None),
        ({"model": "ONE", "mode": "fast"}, 400, "mode"),
        ({"model": "ONE", "mode": "dspark"}, 400, "mode"),
        ({"model": "ONE", "max_draft": -1}, 400, "max_draft"),
        ({"model": "ONE", "kv_bits": 5}, 400, "kv_bits"),
        ({"model": "ONE", "max_batch": "4"}, 400, "max_batch"),
        ({"model": "ONE", "port": 80}, 400, "port"),
        ({"model": "ONE", "modle": "x"}, 400, "modle"),
        ({"model": "ONE", "context_window": 0}, 400, "context_window"),
        ({"model": "ONE", "trust_remote_code": True}, 400, "trust_remote_code"),
        ({"model": "ONE", "drafter": "no-such-drafter"}, 404, None),
        ({"model": "DRAFTER"}, 422, "model"),
        ({"model": "BROKEN", "mode": "baseline"}, 422, None),
        ({"model": "ONE", "drafter": "OTHER"}, 422, None),
    ],
)
def test_a_load_that_fails_leaves_the_model_answering_as_before(
    client: httpx.Client,
    server: tuple[httpx.Client, Swap],
    models: Path,
    body: dict[str, Any],
    status: int,
    field: str | None,
) -> None:
    old = server[1].host.model
    names = {"ONE": "one", "DRAFTER": "drafter", "BROKEN": "broken", "OTHER": "drafter-of-another"}
    first = answered(client, temperature=0.8, seed=5)
    given, body = (
        body,
        {name: str(models / names[value]) if value in names else value for name, value in body.items()},
    )
    told = client.post("/admin/load", json=body)
    assert told.status_code == status, told.text
    error = told.json()["error"]
    assert field is None or error["param"] == field
    assert error["message"]
    assert "a" * 100 not in error["message"]
    state = client.get("/admin/status").json()
    assert (state["ready"], state["model"], state["mode"]) == (True, "one", "baseline")
    assert server[1].host.model is old or "OTHER" in given.values()
    assert answered(client, temperature=0.8, seed=5) == first


def test_what_is_found_unfit_only_while_it_is_read_brings_the_old_model_back(
    client: httpx.Client, server: tuple[httpx.Client, Swap], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, old = answered(client), server[1].host.model
    phases = phases_of(server[1], monkeypatch)
    real = module.load_model

    def failing(loading: LoadSettings, *rest: Any) -> Any:
        if str(loading.model).endswith("two"):
            raise BadCheckpoint("A weight is not finite.", "Fetch it again.")
        return real(loading, *rest)

    monkeypatch.setattr(module, "load_model", failing)
    told = load(client, models / "two", mode="baseline")
    assert told.status_code == 422
    assert "one goes on answering" in told.json()["error"]["message"]
    assert phases[0] == "finding"
    assert "restoring" in phases
    assert server[1].host.model not in (None, old)
    assert answered(client) == first
    assert "not finite" in client.get("/admin/status").json()["error"]


@pytest.mark.parametrize("field", ["model", "draft_model"])
def test_no_answer_lists_what_lies_in_a_folder(client: httpx.Client, tmp_path: Path, field: str) -> None:
    weightless = tmp_path / "weightless"
    weightless.mkdir()
    (weightless / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("private-1.txt", "private-2.gguf", "private-3.gguf"):
        (tmp_path / name).touch()
        (weightless / name).touch()
    for named in (tmp_path, weightless, tmp_path / "private-", tmp_path / "private-2.ggu"):
        body = {"model": str(tmp_path.parent / "absent"), field: str(named)}
        if field == "draft_model":
            body["model"] = str(client.get("/admin/status").json()["settings"]["model"])
        told = client.post("/admin/load", json=body)
        assert told.status_code in (404, 422)
        seen = told.json()["error"]["message"].replace(str(named), "")
        assert "private" not in seen, seen
        assert "private" not in client.get("/admin/status").json()["error"].replace(str(named), "")
    with pytest.raises(BadCheckpoint, match="private-1"):
        load_parts(LoadSettings(model=weightless, mode="baseline"))


def test_nothing_but_errors_of_ours_is_told_to_clients(
    client: httpx.Client, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(module, "examine", failing)
    told = load(client, models / "two")
    assert told.status_code == 500
    assert "secret" not in told.text
    assert answered(client)


def test_answers_under_way_are_completed_and_new_ones_are_told_to_come_again(
    client: httpx.Client, server: tuple[httpx.Client, Swap], models: Path, slow_rounds: Any
) -> None:
    whole = answered(client, max_tokens=60)
    slow_rounds(0.01)
    with client.stream("POST", CHAT, json=asked(max_tokens=60, stream=True)) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(answered, client, max_tokens=60) for _ in range(2)]
            until(lambda: len(server[1].host._generations) == 3)
            swapping = pool.submit(load, client, models / "two", mode="baseline")
            until(lambda: client.get("/admin/status").json()["phase"] == "draining")
            refused = client.post(CHAT, json=asked())
            text = streamed([first, *lines])
            answers = [each.result() for each in waiting]
            assert swapping.result().status_code == 200
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert {text, *answers} == {whole}
    assert client.get("/v1/models").json()["data"][0]["id"] == "two"


def test_answers_that_take_too_long_are_told_that_they_are_cut_off(models: Path, slow_rounds: Any) -> None:
    with admin_server(drain_timeout=0.2) as (client, swap):
        load(client, models / "one", mode="baseline", max_batch=2)
        whole = answered(client)
        slow_rounds(0.05)
        with ThreadPoolExecutor() as pool:
            plain = [pool.submit(client.post, CHAT, json=asked(max_tokens=400)) for _ in range(3)]
            stream = pool.submit(client.post, CHAT, json=asked(max_tokens=400, stream=True))
            until(lambda: len(swap.host._generations) == 4)
            assert client.post("/admin/unload", json={}).json()["unloaded"]
            for each in plain:
                assert each.result().status_code == 503
                assert "unloaded before" in each.result().json()["error"]["message"]
            assert stream.result().status_code == 200
            assert "unloaded before" in stream.result().text
            assert stream.result().text.endswith("data: [DONE]\n\n")
        slow_rounds(0.0)
        assert load(client, models / "one", mode="baseline").status_code == 200
        assert answered(client) == whole


def test_one_change_at_a_time(client: httpx.Client, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = hold(monkeypatch, "examine")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(load, client, models / "two", mode="baseline")
        assert held.begun.wait(10)
        assert answered(client)
        for path, body in (
            ("load", {"model": str(models / "one")}),
            ("unload", {}),
            ("race", {"prompt": "x"}),
        ):
            told = client.post(f"/admin/{path}", json=body)
            assert told.status_code == 409 or "under way" in told.text, (path, told.text)
        held.go.set()
        assert first.result().status_code == 200


@pytest.mark.parametrize("where", ["examine", "load_model"])
def test_a_load_that_is_cancelled_leaves_the_model_that_was_there(
    client: httpx.Client, models: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    first = answered(client)
    held = hold(monkeypatch, where)
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load, client, models / "two", mode="baseline")
        assert held.begun.wait(10)
        download = client.get("/health").json()["loading"]
        assert download["phase"] == "fetching"
        assert download["download"] == {"bytes_done": 5, "bytes_total": 10}
        told = client.post("/admin/load/cancel", json={})
        assert told.json()["cancelled"] is True
        assert loading.result().status_code == 409
    until(lambda: client.get("/admin/status").json()["ready"])
    assert client.get("/v1/models").json()["data"][0]["id"] == "one"
    assert answered(client) == first
    assert client.post("/admin/load/cancel", json={}).json()["cancelled"] is False


def test_a_model_that_is_unloaded_gives_its_memory_back(
    client: httpx.Client, server: Any, models: Path
) -> None:
    first = answered(client)
    target = weakref.ref(server[1].host.loaded.parts.target)
    assert client.post("/admin/unload", json={}).json()["unloaded"]
    gc.collect()
    assert target() is None
    assert client.post(CHAT, json=asked()).status_code == 503
    assert client.get("/health").json()["status"] == "no model"
    assert load(client, models / "one", mode="baseline").status_code == 200
    assert answered(client) == first


def test_a_request_whose_prompt_is_rendered_during_a_swap_gets_the_new_model(
    client: httpx.Client, server: tuple[httpx.Client, Swap], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = server[1].host
    assert load(client, models / "two", mode="baseline").status_code == 200
    expected = answered(client)
    assert load(client, models / "one", mode="baseline").status_code == 200
    begun, go = threading.Event(), threading.Event()
    model: Any = host.model
    render = model.render

    def slow(prompt: Any) -> Any:
        begun.set()
        go.wait(10)
        return render(prompt)

    monkeypatch.setattr(model, "render", slow)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(answered, client)
        assert begun.wait(10)
        assert load(client, models / "two", mode="baseline").status_code == 200
        go.set()
        assert answer.result() == expected


def test_the_models_that_are_known_and_here(
    client: httpx.Client, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MLX_DSPARK_MODEL_DIRS", str(models))
    told = client.get("/admin/models").json()
    assert any(each["drafters"] and not each["loaded"] for each in told["registered"])
    local = {each["name"]: each for each in told["local"]}
    assert (local["one"]["loaded"], local["two"]["loaded"]) == (True, False)
    assert local["two"]["fit"]["fits"]
    assert {"kind": "MLX_DSPARK_MODEL_DIRS", "path": str(models)} in told["folders"]
    assert told["memory_bytes"] > 0
    assert told["bandwidth_gb_s"] > 0
    assert told["default"] == "smollm2-135m"


def test_a_list_of_models_reads_again_only_what_has_changed(
    client: httpx.Client, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def local() -> dict[str, Any]:
        listed = client.get("/admin/models").json()["local"]
        return {
            each["name"]: (each["fit"] and each["fit"]["smallest_bytes"], each["trouble"]) for each in listed
        }

    folder = save_tiny(tmp_path / "models" / "changing", seed=4)
    save_tiny(tmp_path / "models" / "staying", seed=5)
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MLX_DSPARK_MODEL_DIRS", str(tmp_path / "models"))
    read: list[str] = []
    check = folders.check_folder
    monkeypatch.setattr(folders, "check_folder", lambda path: (read.append(path.name), check(path))[1])
    first = local()
    assert sorted(read) == ["changing", "staying"]
    assert local() == first
    assert len(read) == 2
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert local()["changing"][1]
    weights.write_bytes(whole)
    assert local() == first
    assert read[2:] == ["changing", "changing"]


def test_a_race_tells_every_arm_and_the_same_text(client: httpx.Client) -> None:
    first = answered(client)
    body = {
        "prompt": "Hello there",
        "max_tokens": 24,
        "arms": [{"mode": "baseline"}, {"mode": "lookup", "cap": 4}],
    }
    frames = events_of(client.post("/admin/race", json=body).text)
    names = [name for name, _ in frames]
    assert (names[0], names[-2:]) == ("start", ["verdict", "done"])
    texts: dict[str, str] = {}
    for name, data in frames:
        if name == "arm":
            texts[data["arm"]] = texts.get(data["arm"], "") + data["text"]
    assert texts == {"baseline": first, "lookup 4": first}
    assert dict(frames)["verdict"]["identical"] is True
    assert answered(client) == first


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"arms": [{"mode": "baseline"}]}, 400),
        ({"arms": [{"mode": "baseline"}, {"mode": "baseline"}]}, 400),
        ({"arms": [{"mode": "baseline"}, {"mode": "dspark"}]}, 400),
        ({"arms": [{"mode": "baseline"}, {"mode": "lookup", "confidence": 0.5}]}, 400),
        ({"arms": [{"mode": "baseline", "cap": 3}, {"mode": "lookup"}]}, 400),
        ({"arms": [{"mode": "lookup", "cap": -3}, {"mode": "lookup"}]}, 400),
        ({"max_tokens": 0}, 400),
        ({"prompt": ""}, 400),
        ({"thinking": True}, 400),
        ({"prompt": "word " * 600}, 400),
    ],
)
def test_a_race_that_cannot_be_is_refused_before_it_begins(
    client: httpx.Client, fields: dict[str, Any], status: int
) -> None:
    told = client.post("/admin/race", json={"prompt": "Hi", **fields})
    assert told.status_code == status, told.text
    assert told.json()["error"]["message"]
    assert client.get("/admin/status").json()["ready"]


def test_a_cap_that_nobody_reaches_is_told(client: httpx.Client, models: Path) -> None:
    told = load(client, models / "one", drafter=str(models / "drafter"), max_draft=99)
    longest = client.get("/admin/status").json()["warnings"]
    assert [f"block is {drafts}:" in longest[0] for drafts in (7, 99)] == [True, False], told.text
    assert load(client, models / "one", drafter=str(models / "drafter")).json()["warnings"] == []
    arms = [{"mode": "baseline"}, {"mode": "auto", "cap": 99}]
    frames = events_of(client.post("/admin/race", json={"prompt": "Hi", "max_tokens": 3, "arms": arms}).text)
    assert ["block is 7:" in each for each in frames[0][1]["warnings"]] == [True]


def test_the_settings_of_the_default_model_name_it() -> None:
    assert as_json(LoadSettings())["model"] == "smollm2-135m"


def test_a_race_that_nobody_watches_ends_and_the_model_answers_again(client: httpx.Client) -> None:
    arms = [{"mode": "baseline"}, {"mode": "lookup"}, {"mode": "lookup", "cap": 2}]
    body = {"prompt": "Hello there", "max_tokens": 4000, "arms": arms}
    with client.stream("POST", "/admin/race", json=body) as stream:
        next(stream.iter_lines())
        assert client.post(CHAT, json=asked()).status_code == 503
    until(lambda: client.get("/admin/status").json()["ready"])
    assert answered(client)


def test_a_server_tells_how_far_its_first_model_is_and_can_be_ended_meanwhile(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold(monkeypatch, "load_model")
    started = (LoadSettings(model=models / "one"), ServeSettings(port=0, api_key="k3y"))
    notes: list[str] = []
    with bound("127.0.0.1", 0) as listener:
        host = Host(None)
        running: list[Running] = []

        async def serving() -> None:
            running.append(Running(host, started[1], Swap(host, started)))
            await running[0].run(listener, notes.append)

        thread = threading.Thread(target=lambda: asyncio.run(serving()))
        thread.start()
        assert held.begun.wait(10)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
        stranger = httpx.get(url)
        assert (stranger.status_code, stranger.json()["status"]) == (503, "loading")
        assert str(models) not in stranger.text
        told = httpx.get(url, headers={"x-api-key": "k3y"}).json()["loading"]
        assert (told["phase"], told["model"]) == ("fetching", str(models / "one"))
        running[0].ask_to_end()
        thread.join(20)
        assert not thread.is_alive()
        assert (running[0].failure, running[0].stuck, notes, host.model) == (None, False, [], None)
        host.close()


def test_no_model_as_a_process(models: Path) -> None:
    command = [sys.executable, "-m", "mlx_dspark", "serve", "--no-model", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = server.stderr.readline().strip().removeprefix("Listening on ")
            with httpx.Client(base_url=url, timeout=60) as client:
                assert client.get("/health").json()["status"] == "no model"
                assert load(client, models / "one", mode="baseline").status_code == 200
                text = answered(client)
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
            log = [json.loads(line) for line in server.stderr if line.startswith("{")]
        finally:
            server.kill()
    assert [line["event"] for line in log] == ["loaded", "answer"]
    assert text not in json.dumps(log)
    with pytest.raises(UsageError, match="no_model"):
        run_server(models / "one", no_model=True)


# helpers -----------------------------------------------------------------------------------------


def until(true: Any, seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def phases_of(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    phases: list[str] = []
    at = swap.host.at

    def seen(stage: Any) -> None:
        if stage is not None:
            phases.append(stage.phase)
        at(stage)

    monkeypatch.setattr(swap.host, "at", seen)
    return phases


class hold:
    """The next call of a step tells of a download, and then asks on and on until it may go or is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        real = getattr(module, name)

        def held(loading: LoadSettings, *rest: Any, **named: Any) -> Any:
            progress = next(each for each in rest if callable(each))
            while not (self.begun.is_set() and self.go.wait(0.01)):
                if self.begun.is_set() and self._over:
                    break
                progress(LoadProgress("fetching", 0.5, "", 5, 10))
                self.begun.set()
            return real(loading, *rest, **named)

        self._over = False

        def once(*arguments: Any, **named: Any) -> Any:
            monkeypatch.setattr(module, name, real)
            return held(*arguments, **named)

        monkeypatch.setattr(module, name, once)


def streamed(lines: list[str]) -> str:
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


def events_of(text: str) -> list[tuple[str, Any]]:
    frames = [frame.split("\n") for frame in text.strip().split("\n\n")]
    return [
        (frame[0].removeprefix("event: "), json.loads(frame[1].removeprefix("data: "))) for frame in frames
    ]
