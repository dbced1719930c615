"""Clients that leave, hang, flood or are slow; engines that fail, stall or die; a server that is to end."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from mlx_dspark.foundation.errors import EngineLost, UsageError
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.serving.guard import Rules
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.model import Model
from mlx_dspark.serving.run import Running, bound, run_server
from mlx_dspark.serving.streaming import Clock
from mlx_dspark.serving.watch import PATIENCE, Pulse
from mlx_dspark.session.session import Session
from tests.scripted_engine import ScriptedEngine, scripted_session
from tests.tiny_server import tiny_server, tiny_session

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
LONG = "a " * 3000
SOON = 10.0
"""Seconds within which everything here happens, unless something hangs."""


def until(condition: Callable[[], bool], seconds: float = SOON) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def post(url: str, body: Any = ASKED, **options: Any) -> httpx.Response:
    return httpx.post(url + CHAT, json=body, timeout=SOON, **options)


def frames(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


@contextmanager
def scripted(engine: ScriptedEngine, rules: Rules | None = None, **options: Any) -> Iterator[str]:
    with tiny_server(scripted_session(engine), rules, **options) as url:
        yield url


def opened(url: str, body: Any) -> socket.socket:
    """A connection on which a request was sent and nothing was read."""
    port = int(url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=SOON)
    raw = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    connection.sendall(head.encode() + raw)
    return connection


# clients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("paused", [True, False])
def test_a_client_that_leaves_cancels(stream: bool, paused: bool) -> None:
    """While the engine is at work, and before it has said anything."""
    engine = ScriptedEngine(LONG, step=1, before=lambda *_: time.sleep(0.005))
    if paused:
        engine.go.clear()
    with scripted(engine) as url:
        connection = opened(url, {**ASKED, "stream": stream, "max_tokens": 3000})
        assert until(lambda: engine.asked == 1)
        assert paused or until(lambda: engine.steps > 5)
        connection.close()
        assert until(lambda: engine.cancelled == 1)
        assert httpx.get(f"{url}/health").json()["under_way"] == 0


def test_a_client_that_leaves_frees_its_row_of_the_real_engine() -> None:
    with tiny_session(rows=1) as session, tiny_server(session) as url:
        for stream in (True, False):
            prompt = {"messages": [{"role": "user", "content": "a " * 100}]}
            connection = opened(url, {**prompt, "stream": stream, "max_tokens": 400})
            assert until(lambda: httpx.get(f"{url}/health").json()["under_way"] == 1)
            connection.close()
            assert post(url, {**ASKED, "max_tokens": 2}).status_code == 200
        engine: Any = session.engine
        assert engine.wait(SOON)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_prompt_is_read_stops_that(stream: bool) -> None:
    """No chunk of it is read after the one under way."""
    with tiny_session(rows=1) as session, tiny_server(session) as url:
        engine: Any = session.engine
        engine.prefill_chunk = 2
        read, go = list[int](), threading.Event()
        forward = engine.target.forward

        def slowly(batch: Any, *rest: Any, **more: Any) -> Any:
            read.append(1)
            if len(read) == 5:
                assert go.wait(SOON)
            return forward(batch, *rest, **more)

        engine.target.forward = slowly
        prompt = {"messages": [{"role": "user", "content": "a " * 200}]}
        connection = opened(url, {**prompt, "stream": stream})
        assert until(lambda: len(read) == 5)
        connection.close()
        assert until(lambda: httpx.get(f"{url}/health").json()["under_way"] == 0)
        go.set()
        assert engine.wait(SOON)
        assert len(read) <= 7


def test_the_queue_is_bounded() -> None:
    engine = ScriptedEngine("Hi.", max_rows=1)
    engine.go.clear()
    with scripted(engine, queue=2) as url, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(post, url) for _ in range(3)]
        assert until(lambda: httpx.get(f"{url}/health").json()["under_way"] == 3)
        refused = post(url)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert post(url, {**ASKED, "n": 4}).status_code == 400
        engine.go.set()
        assert [each.result().status_code for each in waiting] == [200, 200, 200]
        assert post(url).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_wait_in_the_queue_has_an_end(stream: bool) -> None:
    engine = ScriptedEngine()
    engine.admit.clear()
    with scripted(engine, clock=Clock(queue=0.2)) as url:
        told = post(url, {**ASKED, "stream": stream})
        assert told.status_code == (200 if stream else 503)
        assert "No turn came within 0.2 s" in told.text
        engine.admit.set()
        assert post(url).status_code == 200


def test_an_answer_has_a_deadline() -> None:
    engine = ScriptedEngine("Hello there.", step=1)
    engine.before = lambda _, said: engine.go.clear() if said == 2 else None
    with scripted(engine, clock=Clock(deadline=0.3)) as url:
        plain = post(url)
        assert (plain.status_code, plain.json()["error"]["type"]) == (504, "timeout")
        engine.go.set()
        told = frames(post(url, {**ASKED, "stream": True}).text)
        assert told[-2]["error"]["type"] == "timeout"
        assert told[-1] == "[DONE]"
        assert any(frame.get("choices") for frame in told[:-2])
        assert until(lambda: engine.cancelled == 2)


def test_a_stream_is_kept_alive_by_the_clock() -> None:
    engine = ScriptedEngine("Hello there.", step=1)
    engine.go.clear()
    with scripted(engine, clock=Clock(keep_alive=0.1)) as url:
        threading.Timer(1.0, engine.go.set).start()
        asked = {**ASKED, "stream": True}
        told = frames(post(url, asked).text)
        deltas = [frame["choices"][0]["delta"] for frame in told if frame != "[DONE]"]
        assert deltas.count({"content": ""}) >= 5
        texts = [delta.get("content", "") for delta in deltas]
        assert "".join(texts) == post(url).json()["choices"][0]["message"]["content"] == "Hello there."


def test_a_client_that_does_not_read_is_dropped_and_holds_nobody_up() -> None:
    engine = ScriptedEngine(lambda request: LONG * 12 if request.max_new_tokens > 9 else "Hi.", step=400)
    with scripted(engine, clock=Clock(write=0.3)) as url:
        port = int(url.rpartition(":")[2])
        sluggish = socket.socket()
        sluggish.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sluggish.connect(("127.0.0.1", port))
        raw = json.dumps({**ASKED, "stream": True, "logprobs": True, "max_tokens": 30_000}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sluggish.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert until(lambda: httpx.get(f"{url}/health").json()["under_way"] == 1)
        assert post(url, {**ASKED, "max_tokens": 5}).status_code == 200
        assert until(lambda: httpx.get(f"{url}/health").json()["under_way"] == 0)
        sluggish.close()


# bodies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_refused(declared: bool) -> None:
    with scripted(ScriptedEngine(), Rules(body_limit=10_000)) as url:
        raw = json.dumps({**ASKED, "user": "x" * 20_000}).encode()
        pieces = raw if declared else iter([raw[:7000], raw[7000:]])
        told = httpx.post(url + CHAT, content=pieces, headers={"content-type": "application/json"})
        assert told.status_code == 413
        assert post(url).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with scripted(ScriptedEngine(), Rules(body_seconds=0.2)) as url:
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=SOON) as slow:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f'{head}Content-Length: 100\r\n\r\n{{"mess'.encode())
            assert b" 408 " in slow.recv(4096)
        assert post(url).status_code == 200


# engines -----------------------------------------------------------------------------------------


def test_an_answer_that_fails_fails_alone() -> None:
    def failing(request: GenerateRequest, said: int) -> None:
        if request.max_new_tokens == 7 and said >= 2:
            raise RuntimeError("a secret detail")

    with scripted(ScriptedEngine("Hello there.", step=1, before=failing)) as url:
        plain = post(url, {**ASKED, "max_tokens": 7})
        assert (plain.status_code, plain.json()["error"]["type"]) == (500, "server_error")
        streamed = post(url, {**ASKED, "max_tokens": 7, "stream": True})
        assert streamed.status_code == 200
        told = frames(streamed.text)
        assert told[-2]["error"]["type"] == "server_error"
        assert "secret" not in plain.text + streamed.text
        assert post(url, {**ASKED, "max_tokens": 8}).status_code == 200


def test_one_of_several_answers_that_fails_cancels_the_others() -> None:
    failures = iter([True])

    def failing(_: GenerateRequest, said: int) -> None:
        if said == 2 and next(failures, False):
            raise RuntimeError("one")
        time.sleep(0.005)

    engine = ScriptedEngine(LONG, step=1, before=failing)
    with scripted(engine) as url:
        assert post(url, {**ASKED, "n": 3, "max_tokens": 3000}).status_code == 500
        assert until(lambda: engine.cancelled == 2)


@contextmanager
def running(session: Session, **settings: Any) -> Iterator[tuple[str, Running, list[Exception]]]:
    """The server as `serve` runs it, around a session."""
    chosen = ServeSettings(port=0, **settings)
    ended: list[Exception] = []
    with bound(chosen.host, chosen.port) as listener:
        host = Host(Model(session), clock=Clock(), queue=chosen.queue)
        address: list[str] = []
        made = threading.Event()
        server: list[Running] = []

        async def serving() -> None:
            server.append(Running(host, chosen))
            made.set()
            await server[0].run(listener, address.append)
            if server[0].failure is not None:
                ended.append(server[0].failure)

        thread = threading.Thread(target=lambda: asyncio.run(serving()))
        thread.start()
        made.wait()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert until(lambda: _answers(url))
        try:
            yield url, server[0], ended
        finally:
            server[0].ask_to_end()
            thread.join(SOON)
            host.close()
        assert not thread.is_alive()


def _answers(url: str) -> bool:
    try:
        return bool(httpx.get(f"{url}/health"))
    except httpx.TransportError:
        return False


def test_a_stalled_engine_is_told_within_5_s_and_ends_the_server() -> None:
    """The engine's own thread hangs in a stop check, as it would in MLX."""
    session, hang = tiny_session(), threading.Event()
    engine: Any = session.engine
    original = engine.submit

    def submit(request: GenerateRequest, notify: Any = None) -> Any:
        object.__setattr__(request, "stop_check", lambda _: hang.wait(60))
        return original(request, notify)

    engine.submit = submit
    with running(session, stall_timeout=6.0) as (url, server, ended), ThreadPoolExecutor(2) as pool:
        begun = time.monotonic()
        waiting = [pool.submit(_asked, url, stream) for stream in (True, False)]
        assert until(lambda: httpx.get(f"{url}/health").status_code == 503, 5.0)
        assert time.monotonic() - begun >= PATIENCE - 0.5
        told = httpx.get(f"{url}/health").json()
        assert told["status"] == "stalled"
        assert "delivered nothing" in told["reason"]
        late = post(url)
        assert late.status_code == 503, "no more are taken meanwhile"
        assert "retry-after" in late.headers
        streamed, plain = (each.result(SOON) for each in waiting)
        assert "delivered nothing" in streamed.text
        assert plain.status_code == 503
        assert until(lambda: bool(ended))
        assert server.stuck
    hang.set()
    session.close()


def _asked(url: str, stream: bool) -> httpx.Response:
    return httpx.post(url + CHAT, json={**ASKED, "stream": stream, "max_tokens": 50}, timeout=30)


def test_a_dead_engine_is_told_at_once_and_ends_the_server() -> None:
    session = tiny_session()
    engine: Any = session.engine
    with running(session) as (url, server, ended):
        with opened(url, {**ASKED, "max_tokens": 480}) as waiting:
            assert until(lambda: httpx.get(f"{url}/health").json()["under_way"] == 1)
            engine.close()
            assert until(lambda: bool(ended))
            assert b"HTTP/1.1" in waiting.recv(65536)
        assert not server.stuck
        assert "thread has ended" in str(ended[0])


@dataclass
class Owed:
    ended: bool = False


def test_the_pulse_tells_a_stall_from_a_slow_chunk_and_from_idleness() -> None:
    now, alive = [0.0], [True]
    pulse = Pulse(lambda: alive[0], now=lambda: now[0])

    def after(seconds: float) -> str:
        now[0] += seconds
        return pulse.vitals().state

    assert after(1000) == "ok", "nobody waits"
    request = Owed()
    pulse.expect(request)
    assert after(PATIENCE) == "ok"
    assert after(1) == "stalled"
    pulse.heard()
    assert after(4.7) == "ok", "a chunk that took 5 s may be followed by another"
    assert after(0.3) == "stalled", "but is told of within 5 s"
    assert not pulse.lost(5.0), "and borne for three times as long"
    after(10.5)
    assert pulse.lost(5.0)
    assert not pulse.lost(20.0)
    for _ in range(65):
        pulse.heard()
        now[0] += 0.1
    assert after(PATIENCE + 0.1) == "stalled", "what was slow long ago is forgotten"
    assert pulse.lost(PATIENCE)
    request.ended = True
    assert after(1000) == "ok"
    pulse.expect(Owed())
    assert after(1) == "ok", "silence counts from when somebody waits"
    alive[0] = False
    assert pulse.vitals().state == "dead"


# ending ------------------------------------------------------------------------------------------


def test_a_server_that_ends_takes_no_more_and_finishes_what_it_has() -> None:
    engine = ScriptedEngine("Hello there.", step=1)
    engine.go.clear()
    with running(scripted_session(engine)) as (url, server, ended), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(_asked, url, stream) for stream in (True, False)]
        with httpx.Client() as client:
            assert until(lambda: len(server._host._generations) == 2)
            server.ask_to_end()
            assert until(lambda: client.get(f"{url}/health").status_code == 503)
            assert client.get(f"{url}/health").json()["status"] == "ending"
            assert client.post(url + CHAT, json=ASKED).status_code == 503
        engine.go.set()
        streamed, plain = (each.result(SOON) for each in waiting)
        assert frames(streamed.text)[-1] == "[DONE]"
        assert plain.json()["choices"][0]["message"]["content"] == "Hello there."
        assert until(lambda: not _answers(url))
        assert not ended


def test_what_does_not_finish_in_time_is_told_that_the_server_ends() -> None:
    engine = ScriptedEngine("Hello there.", step=1)
    engine.go.clear()
    with (
        running(scripted_session(engine), drain_timeout=0.2) as (url, server, ended),
        ThreadPoolExecutor(2) as pool,
    ):
        waiting = [pool.submit(_asked, url, stream) for stream in (True, False)]
        assert until(lambda: len(server._host._generations) == 2)
        server.ask_to_end()
        streamed, plain = (each.result(SOON) for each in waiting)
        assert "about to end" in streamed.text
        assert plain.status_code == 503
        assert not ended


def test_an_engine_that_does_not_come_to_rest_is_not_waited_for() -> None:
    session, hangs, hang = tiny_session(), threading.Event(), threading.Event()
    model = Model(session)

    def check(token: int) -> bool:
        hangs.set()
        return hang.wait(60)

    stream = model.engine.submit(GenerateRequest((5, 6), 4, stop_check=check))
    assert hangs.wait(SOON)
    stream.close()
    with pytest.raises(EngineLost):
        model.close(0.2)
    hang.set()
    model.close()
    assert not model.engine.running


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=str(port)) as caught:
            run_server("no/such/model", port=port)
        assert caught.value.field == "port"


def test_an_idle_server_does_nothing() -> None:
    with running(tiny_session()) as (url, _, _):
        assert post(url, {**ASKED, "max_tokens": 4}).status_code == 200
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(2.0)
        used = time.process_time() - before
    assert used < 0.01 * 2.0
