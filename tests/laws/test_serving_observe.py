"""What can be watched of a server equals what its answers say of themselves, and watching holds nobody up."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from mlx_dspark.calibration.roofline import Traffic, ceiling, judge
from mlx_dspark.catalog.fit import StateBytes
from mlx_dspark.foundation.bus import Bus
from mlx_dspark.serving.admin.swap import Swap
from mlx_dspark.serving.dialects.base import Frame
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.log import LOG, logged
from mlx_dspark.serving.observe.board import Board
from mlx_dspark.serving.observe.metrics import wants_json
from mlx_dspark.serving.observe.sse import QUEUE, frames_of
from mlx_dspark.serving.streaming import Clock
from mlx_dspark.session.traffic import weight_bytes
from tests.admin_server import admin_server, answered, asked, load
from tests.tiny import save_tiny, tiny_family
from tests.tiny_families import tiny_family as larger_family

CHAT = "/v1/chat/completions"
KEY = "k3y"
COPY = "one two three four one two three four one two three four"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("watched") / "tiny-model", seed=2)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[httpx.Client, Swap]]:
    with admin_server(clock=Clock(keep_alive=0.3)) as (client, swap):
        assert load(client, folder, mode="lookup", max_batch=2, max_draft=4).status_code == 200
        yield client, swap


@pytest.fixture
def client(server: tuple[httpx.Client, Swap]) -> httpx.Client:
    return server[0]


class Watching:
    """A reader of /events, from now on."""

    def __init__(self, client: httpx.Client) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._over = False
        self._url = str(client.base_url)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _read(self) -> None:
        with httpx.stream("GET", f"{self._url}/events", timeout=20) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            name = ""
            for line in stream.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    self.events.append((name, json.loads(line[6:])))
                    self._ready.set()
                if self._over:
                    return

    def __enter__(self) -> Watching:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()

    def of(self, request: str, name: str) -> list[dict[str, Any]]:
        return [data for event, data in list(self.events) if event == name and data.get("id") == request]


def until(true: Callable[[], Any], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_events_fold_to_what_the_answer_says_of_itself(client: httpx.Client, stream: bool, n: int) -> None:
    with Watching(client) as watching:
        told = client.post(CHAT, json=asked(COPY, max_tokens=60, n=n, stream=stream))
        if stream:
            chunks = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: {")]
            stats = next(chunk["x_mlx_dspark"] for chunk in chunks if "x_mlx_dspark" in chunk)
            id_ = chunks[0]["id"]
        else:
            stats, id_ = told.json()["x_mlx_dspark"], told.json()["id"]
        id_ = id_.removeprefix("chatcmpl-")
        until(lambda: len(watching.of(id_, "answer")) == n)
    rounds = watching.of(id_, "round")
    verifying = [each for each in rounds if each["drafted"]]
    assert verifying
    assert sum(each["drafted"] for each in rounds) == stats["drafted"]
    assert sum(each["accepted"] for each in rounds) == stats["accepted"]
    assert sum(each["parked"] for each in rounds) == stats["parked_rounds"]
    assert max(each["cap"] for each in rounds) == stats["cap"]
    lengths = [each["committed"] for each in verifying]
    assert round(sum(lengths) / len(lengths), 3) == stats["accept_len"]
    first = sum(each["committed"] for each in watching.of(id_, "first"))
    assert first + sum(each["committed"] for each in rounds) == stats["completion_tokens"] == 60 * n
    reading = watching.of(id_, "prefill")
    assert len(rounds) + len(reading) == stats["target_forwards"]
    assert all(each["processed"] <= each["total"] == stats["prompt_tokens"] for each in reading)
    whole = [each["stats"] for each in sorted(watching.of(id_, "answer"), key=lambda each: each["choice"])]
    expected = [{**each, "ignored": []} for each in stats.get("choices", [stats])]
    assert whole == expected
    numbers = [data["seq"] for name, data in watching.events if name != "stats" and "seq" in data]
    assert numbers == sorted(numbers)


def test_rounds_are_those_of_the_events_and_at_most_as_many_as_asked_for(client: httpx.Client) -> None:
    with Watching(client) as watching:
        id_ = client.post(CHAT, json=asked(COPY, max_tokens=30)).json()["id"].removeprefix("chatcmpl-")
        until(lambda: watching.of(id_, "answer"))
    seen = [{k: v for k, v in each.items() if k not in ("seq", "t")} for each in watching.of(id_, "round")]
    assert client.get(f"/rounds?limit={len(seen)}").json()["rounds"] == seen
    assert client.get("/rounds?limit=1").json()["rounds"] == seen[-1:]
    for limit in ("0", "513", "x"):
        assert client.get(f"/rounds?limit={limit}").status_code == 400


def test_silence_is_filled_with_stats(client: httpx.Client) -> None:
    with Watching(client) as watching:
        until(lambda: any(name == "stats" for name, _ in watching.events))
        stats = next(data for name, data in watching.events if name == "stats")
    assert stats["requests"] == client.get("/metrics", headers=JSON).json()["requests"]


JSON = {"accept": "application/json"}


def samples(client: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    told = client.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(told.text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_prometheus_reads_what_json_says_and_both_grow_by_what_was_answered(client: httpx.Client) -> None:
    before, before_json = samples(client), client.get("/metrics", headers=JSON).json()
    told = client.post(CHAT, json=asked(COPY, max_tokens=40)).json()
    until(lambda: client.get("/metrics", headers=JSON).json()["requests"] > before_json["requests"])
    after, after_json = samples(client), client.get("/metrics", headers=JSON).json()

    def grown(name: str, **labels: str) -> float:
        key = (f"mlx_dspark_{name}", tuple(sorted(labels.items())))
        return after[key] - before.get(key, 0.0)

    usage, stats = told["usage"], told["x_mlx_dspark"]
    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("completion_tokens_total") == usage["completion_tokens"]
    assert grown("answers_total", ending="length") == 1
    assert grown("drafted_tokens_total", source="lookup") == stats["drafted"]
    assert grown("accepted_tokens_total", source="lookup") == stats["accepted"]
    assert grown("first_token_seconds_count") == grown("answer_seconds_bucket", le="+Inf") == 1
    for name, total in (
        ("prompt_tokens_total", after_json["prompt_tokens"]),
        ("committed_tokens_total", after_json["rounds"]["committed_tokens"]),
        ("accept_length_sum", None),
        ("requests_under_way", 0),
        ("up", 1),
    ):
        value = after[(f"mlx_dspark_{name}", ())]
        assert total is None or value == total
        assert math.isfinite(value)
    rounds = {
        dict(key[1])["kind"]: value for key, value in after.items() if key[0] == "mlx_dspark_rounds_total"
    }
    assert rounds == after_json["rounds"]["kinds"]
    buckets = [value for key, value in after.items() if key[0] == "mlx_dspark_accept_length_bucket"]
    assert list(after_json["rounds"]["accept_histogram"].values()) == buckets == sorted(buckets)


@pytest.mark.parametrize(
    ("accept", "json_"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", True),
        ("application/json, text/plain;q=0.5", True),
        ("application/json;q=0.2, text/plain", False),
        ("application/json;q=x", False),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", False),
        ("text/html, application/json;q=0.9", True),
    ],
)
def test_accept_chooses(accept: str, json_: bool) -> None:
    assert wants_json(accept) is json_


def test_readers_that_do_not_read_change_no_answer_and_are_gone_when_they_leave(
    client: httpx.Client, server: tuple[httpx.Client, Swap]
) -> None:
    alone = answered(client, text=COPY, max_tokens=400)
    board, port = server[1].host.board, client.base_url.port
    stuck = []
    for _ in range(3):
        reader = socket.create_connection(("127.0.0.1", port))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.sendall(f"GET /events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        stuck.append(reader)
    until(lambda: board.bus.subscribers == 3)
    assert answered(client, text=COPY, max_tokens=400) == alone
    for reader in stuck:
        reader.close()
    until(lambda: board.bus.subscribers == 0)


def test_a_reader_that_was_too_slow_is_told_what_it_missed_and_gets_the_newest() -> None:
    async def check() -> None:
        board, ended = Board(), False
        frames = frames_of(board.bus, lambda: Frame({}, "stats"), quiet=60.0, ended=lambda: ended)
        first = asyncio.ensure_future(anext(frames))
        await asyncio.sleep(0)
        board.tell("round", number=-1)
        assert b'"number":-1' in await first
        for number in range(5000):
            board.tell("round", number=number)
        lines = (await anext(frames)).decode().split("\n\n")
        assert lines[0] == f'event: dropped\ndata: {{"events":{5000 - QUEUE}}}'
        assert [json.loads(line.split("data: ")[1])["number"] for line in lines[1:-1]] == [
            *range(5000 - QUEUE, 5000)
        ]
        ended = True
        assert [frame async for frame in frames] == []
        assert board.bus.subscribers == 0

    asyncio.run(check())


@given(st.integers(1, 8), st.integers(0, 4), st.lists(st.booleans(), max_size=40))
def test_a_full_queue_drops_the_oldest_and_counts_them(size: int, replay: int, reads: list[bool]) -> None:
    bus: Bus[int] = Bus(replay)
    bus.publish(-1)
    got: list[int] = []
    lost = 0
    with bus.subscribe(size, lambda: None) as reader:
        first, _ = reader.take()
        assert first == ([-1] if replay else [])
        for number, read in enumerate([*reads, True]):
            bus.publish(number)
            if read:
                items, dropped = reader.take()
                assert len(items) <= size
                assert items == list(range(number + 1 - len(items), number + 1))
                got, lost = got + items, lost + dropped
    assert bus.dropped == lost
    assert len(got) + lost == len(reads) + 1
    assert bus.subscribers == 0


def test_the_machine_and_the_ceiling_of_the_model(client: httpx.Client) -> None:
    answered(client)
    told = client.get("/machine").json()
    rate = told["bandwidth"]["gb_s"] * 1e9
    assert told["bandwidth"]["source"] == "measured"
    assert set(told["roofline"]) == {"at_zero", "at_last_request", "at_context_window"}
    for point in told["roofline"].values():
        assert point["plain_tokens_per_sec"] == pytest.approx(rate / point["bytes_per_token"], rel=0.02)
    assert told["roofline"]["at_zero"]["bytes_per_token"] == told["model"]["weights_bytes"]
    assert told["verdict"]["levers"]
    with admin_server() as (bare, _):
        assert bare.get("/machine").json()["model"] is None
        assert bare.get("/calibration").json() == {"available": False, "reason": "No model is loaded."}


def test_calibration_is_that_of_the_session(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path))
    with admin_server() as (client, swap):
        assert load(client, folder, mode="lookup", calibrate=True).status_code == 200
        told = client.get("/calibration").json()
        assert swap.host.model is not None
        known = swap.host.model.session.calibration
        assert known is not None
        assert told["reason"] == known.reason
        assert told["available"] is (known.curves is not None)
        if known.curves is not None:
            assert told["curves"] == known.curves.to_json()
            assert float(told["verify_ms"]["1"]) > 0


def test_a_token_reads_what_the_arithmetic_says() -> None:
    traffic = Traffic(1000, StateBytes(fixed=10, per_token=2, windows=((3, 5),)))
    assert [traffic.at(depth) for depth in (0, 4, 100)] == [1010, 1030, 1225]
    assert ceiling(traffic, 10_300.0, 4) == 10.0
    assert [judge(share).level for share in (0.8, 0.6, 0.1, None)] == ["healthy", "ok", "low", "unknown"]


def test_weights_that_a_token_reads() -> None:
    dense: Any = tiny_family("llama")
    total = sum(each.nbytes for _, each in _arrays(dense))
    assert weight_bytes(dense, {}) == total - dense.model.embed_tokens.weight.nbytes
    mixture: Any = larger_family("qwen3_moe")
    config = {"num_experts_per_tok": 2}
    experts = sum(each.nbytes for name, each in _arrays(mixture) if "switch_mlp" in name)
    assert experts
    assert weight_bytes(mixture, {}) - weight_bytes(mixture, config) == experts // 2


def _arrays(model: Any) -> list[tuple[str, Any]]:
    from mlx.utils import tree_flatten

    arrays: Any = tree_flatten(model.parameters())
    return list(arrays)


def test_the_doctor_of_a_running_server(client: httpx.Client) -> None:
    told = client.get("/doctor").json()
    names = {check["name"] for check in told["checks"]}
    assert {"compute", "quantized", "memory", "disk", "calibration", "registry", "versions"} <= names
    assert told["ok"] is all(check["status"] != "fail" for check in told["checks"])


# who may ask, and how ----------------------------------------------------------------------------

SHOWN = (
    "/metrics",
    "/events",
    "/rounds",
    "/calibration",
    "/machine",
    "/doctor",
    "/admin/status",
    "/admin/models",
)
CHANGING = ("/admin/load", "/admin/load/cancel", "/admin/unload", "/admin/race")


@pytest.fixture(scope="module")
def locked() -> Iterator[httpx.Client]:
    with admin_server(rules=Rules(api_key=KEY)) as (client, _):
        yield client


@pytest.mark.parametrize("path", [*SHOWN, *CHANGING])
def test_every_route_asks_for_the_key_and_refuses_other_pages(locked: httpx.Client, path: str) -> None:
    method, body = ("GET", None) if path in SHOWN else ("POST", {})
    assert locked.request(method, path, json=body).status_code == 401
    key = {"x-api-key": KEY}
    for page in (
        {"origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"host": "evil.example"},
    ):
        told = locked.request(method, path, json=body, headers=key | page)
        assert told.status_code == 403, (path, page)
        assert told.json()["error"]["message"]


@pytest.mark.parametrize("path", CHANGING)
def test_changes_take_json_bodies_only(locked: httpx.Client, path: str) -> None:
    key = {"x-api-key": KEY}
    for content, kind in ((b"model=x", "application/x-www-form-urlencoded"), (b"{}", "text/plain")):
        told = locked.post(path, content=content, headers=key | {"content-type": kind})
        assert told.status_code == 415
    for body in (b"", b"[]", b"null", b"{"):
        told = locked.post(path, content=body, headers=key | {"content-type": "application/json"})
        assert told.status_code == 400, (path, body, told.text)
        assert told.json()["error"]["message"]
    told = locked.post(path, json={"no_such_field": 1}, headers=key)
    assert told.status_code == 400
    assert locked.post(path, headers=key).status_code == 400


@pytest.mark.parametrize("path", [path for path in SHOWN if path != "/admin/models"])
def test_head_ends_without_a_body(client: httpx.Client, path: str) -> None:
    told = client.head(path, timeout=20)
    assert (told.status_code, told.content) == (200, b"")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/admin/load", 405),
        ("DELETE", "/admin/unload", 405),
        ("POST", "/metrics", 405),
        ("POST", "/events", 405),
        ("GET", "/admin/nothing", 404),
        ("POST", "/admin", 404),
    ],
)
def test_wrong_methods_and_paths_are_told_in_the_dialects_form(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    told = client.request(method, path, json={} if method == "POST" else None)
    assert told.status_code == status
    assert set(told.json()["error"]) == {"message", "type", "param", "code"}
    assert status != 405 or told.headers["allow"]


# the log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [False, True])
def test_the_log_is_json_and_shows_no_text_unless_asked(
    client: httpx.Client, server: Any, prompts: bool
) -> None:
    out, host = io.StringIO(), server[1].host
    host.logs_prompts = prompts
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    try:
        with logged("prompts" if prompts else "requests", out):
            text = answered(client, text="a secret wish")
            assert client.post(CHAT, json={"messages": "a secret wish"}).status_code == 400
            assert client.get("/nothing").status_code == 404
            said = {"messages": [{"role": "user", "content": "a secret wish"}], "max_tokens": 3}
            assert client.post("/v1/messages", json=said).status_code == 200
            until(lambda: out.getvalue().count("\n") == 4)
    finally:
        root.handlers = handlers
        host.logs_prompts = False
    answer, bad, lost, message = (json.loads(line) for line in out.getvalue().splitlines())
    assert (answer["event"], answer["error"], answer["stats"]["completion_tokens"]) == ("answer", None, 24)
    assert (bad["status"], bad["field"], bad["path"]) == (400, "messages", CHAT)
    assert message["stats"]["completion_tokens"] == 3
    if prompts:
        assert "a secret wish" in json.dumps(message["prompts"])
    assert (lost["status"], lost["method"]) == (404, "GET")
    assert ("a secret wish" in out.getvalue()) is prompts
    assert text not in out.getvalue()
    with logged("off", out):
        assert not LOG.hasHandlers() or LOG.handlers == []


def test_requests_together_are_counted_once_each(client: httpx.Client) -> None:
    before = client.get("/metrics", headers=JSON).json()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: answered(client, text=f"{seed} {COPY}", max_tokens=30), range(6)))
    until(lambda: client.get("/metrics", headers=JSON).json()["requests"] == before["requests"] + 6)
    after = client.get("/metrics", headers=JSON).json()
    assert after["completion_tokens"] - before["completion_tokens"] == 180
    assert after["batching"]["max_batch_seen"] == 2
    assert (after["under_way"], after["waiting"]) == (0, 0)
