"""The doctor's checks evaluate what they speak of, and each that finds something names a fix."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlx_dspark.calibration.store import FILE
from mlx_dspark.catalog.fit import Memory
from mlx_dspark.cli.main import run
from mlx_dspark.doctor import machine
from mlx_dspark.doctor.check import FAIL, OK, OPEN, WARN
from mlx_dspark.doctor.server import server
from mlx_dspark.serving.guard import Rules
from tests.admin_server import admin_server
from tests.tiny_server import tiny_server


@pytest.mark.parametrize(
    ("kind", "processor", "status"),
    [
        ("Darwin", "arm64", OK),
        ("Darwin", "x86_64", FAIL),
        ("Linux", "x86_64", OK),
        ("Linux", "aarch64", OK),
        ("Windows", "AMD64", FAIL),
    ],
)
def test_the_system(kind: str, processor: str, status: str) -> None:
    found = machine.system(kind, processor)
    assert found.status == status
    assert bool(found.fix) is (status == FAIL)


@pytest.mark.parametrize(
    ("needed", "status", "named"),
    [
        (["mlx>=0.1", "mlx-lm"], OK, "mlx-lm"),
        (["mlx>=99"], FAIL, "'mlx>=99'"),
        (["no-such-package-anywhere>=2,<3", "mlx"], FAIL, "no-such-package-anywhere"),
        (["no-such-package-anywhere; extra == 'serve'"], OK, ""),
        (["mlx>=99; python_version < '3'"], OK, ""),
    ],
)
def test_versions(needed: list[str], status: str, named: str) -> None:
    found = machine.versions(needed)
    assert found.status == status
    assert named in (found.fix if status == FAIL else found.found)


def test_what_is_installed_here_is_what_this_program_needs() -> None:
    assert machine.versions().status in (OK, OPEN)


def test_a_device_that_computes_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    real = mx.arange, mx.quantized_matmul
    assert (machine.compute().status, machine.quantized().status) == (OK, OK)
    monkeypatch.setattr(mx, "quantized_matmul", lambda *a, **k: real[1](*a, **k) * 1.5)
    assert machine.quantized().status == FAIL
    monkeypatch.setattr(mx, "arange", lambda *a: real[0](*a) + 1)
    assert machine.compute().status == FAIL

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no device")

    monkeypatch.setattr(mx, "arange", broken)
    for found in (machine.compute(), machine.quantized()):
        assert found.status == FAIL
        assert "no device" in found.found
        assert found.fix


@pytest.mark.parametrize(("limit", "status"), [("0\n", OK), ("24000\n", WARN), ("", OPEN), ("what\n", OPEN)])
def test_a_wired_limit_is_never_to_be_raised(limit: str, status: str) -> None:
    found = machine.wired_limit(lambda: limit)
    assert found.status == status
    assert (status == WARN) is ("wired_limit_mb=0" in found.fix)


@pytest.mark.parametrize(("have", "status"), [(None, OPEN), (1 << 30, WARN), (64 << 30, OK)])
def test_memory(monkeypatch: pytest.MonkeyPatch, have: int | None, status: str) -> None:
    memory = None if have is None else Memory(have, "a test")
    monkeypatch.setattr("mlx_dspark.catalog.memory.memory_here", lambda: memory)
    monkeypatch.setattr(machine, "_swap_share", lambda: 0.0)
    assert machine.memory().status == status
    monkeypatch.setattr(machine, "_swap_share", lambda: 0.9)
    assert machine.memory().status == (OPEN if have is None else WARN)


def test_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    for free, status in ((1 << 30, WARN), (1 << 40, OK)):
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda _, free=free: usage(1 << 41, 0, free))
        assert machine.disk().status == status


def test_folders_and_stores_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("MLX_DSPARK_MODEL_DIRS", str(tmp_path))
    assert (machine.models().status, machine.calibration().status) == (OK, OK)
    monkeypatch.setenv("MLX_DSPARK_MODEL_DIRS", str(tmp_path / "absent"))
    assert machine.models().status == WARN
    for content in ("{", "[]", '{"schema": 99, "entries": {}, "refused": {}}'):
        (tmp_path / FILE).write_text(content)
        found = machine.calibration()
        assert (found.status, str(tmp_path / FILE) in found.found) == (WARN, True)
    assert (tmp_path / FILE).read_text() == content


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_a_server_that_answers_loads_or_is_not_there() -> None:
    nowhere = f"http://127.0.0.1:{closed_port()}"
    assert server(nowhere)[0].status == OPEN
    assert server(nowhere, expected=True)[0].status == FAIL
    assert server("no address at all", expected=True)[0].status == FAIL
    with tiny_server() as url:
        assert [check.status for check in server(url)] == [OK]
    with tiny_server(rules=Rules(api_key="k3y")) as url:
        assert [check.status for check in server(url, "k3y")] == [OK]
        for key in (None, "wrong"):
            assert [check.status for check in server(url, key)] == [OK, WARN]
    with admin_server() as (client, _):
        found = server(str(client.base_url))
        assert found[0].status == WARN
        assert "/admin/load" in found[0].fix


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"\xff", b'{"a": 1}', b""])
def test_a_stranger_is_told_as_the_agents_tell_it(body: bytes) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Stranger) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        found = server(f"http://127.0.0.1:{other.server_port}", expected=True)
        other.shutdown()
        thread.join()
    assert [check.status for check in found] == [FAIL]
    assert "no server of mlx-dspark" in found[0].found


def test_the_server_and_its_key_may_stand_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server(rules=Rules(api_key="k3y")) as url:
        monkeypatch.setenv("MLX_DSPARK_URL", url)
        for key, keys in (("k3y", []), ("wrong", [WARN])):
            monkeypatch.setenv("MLX_DSPARK_API_KEY", key)
            run(["doctor", "--json"])
            checks = json.loads(capsys.readouterr().out)["checks"]
            assert [each["status"] for each in checks if each["name"] == "server"] == [OK]
            assert [each["status"] for each in checks if each["name"] == "key"] == keys


def test_the_command_fails_where_a_named_server_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json", "--url", f"http://127.0.0.1:{closed_port()}"])
    told = json.loads(capsys.readouterr().out)
    failed = {check["name"] for check in told["checks"] if check["status"] == FAIL}
    assert (code, told["ok"], failed) == (2, False, {"server"})
    assert all(check["fix"] for check in told["checks"] if check["status"] in (FAIL, WARN))


def test_an_address_that_is_none_is_refused_as_by_the_agents(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("doctor", "claude"):
        assert run([command, "--url", "nope"]) == 2
        assert "--url is 'nope'" in capsys.readouterr().err
