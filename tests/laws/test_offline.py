"""Without a network, what is on this machine works, and what is not is named, within seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlx_dspark.catalog.fit import Memory
from mlx_dspark.catalog.pairs import Pair
from mlx_dspark.cli import models as command
from mlx_dspark.cli.main import run
from tests.laws.test_catalog_resolve import put_into_hub_cache
from tests.tiny import save_tiny

SECONDS = 20

_RUN = """
import json, socket, sys, time, io, contextlib

def refused(*_, **__):
    raise OSError(101, "Network is unreachable")

socket.socket.connect = socket.socket.connect_ex = refused
socket.create_connection = socket.getaddrinfo = refused

from mlx_dspark.cli.main import run

told = []
for line in json.loads(sys.argv[1]):
    out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(line)
    told.append([code, out.getvalue(), err.getvalue(), time.monotonic() - began])
print(json.dumps(told), file=sys.__stdout__)
"""

WORK = [
    ["generate", "--model", "{folder}", "--max-new-tokens", "3", "--prompt", "the"],
    ["generate", "--model", "owner/cached", "--max-new-tokens", "3", "--prompt", "the"],
    ["generate", "--model", "placed", "--max-new-tokens", "3", "--mode", "baseline", "--prompt", "the"],
    ["export", "owner/cached", "{home}/exported"],
    ["demo", "--model", "{folder}"],
    ["race", "--model", "{folder}", "--max-new-tokens", "4", "--no-calibrate", "--prompt", "the"],
    ["models"],
    ["models", "--local"],
    ["models", "--local", "--json"],
    ["pull", "owner/cached"],
    ["pull", "studio/placed"],
    ["rm", "owner/unwanted", "--yes"],
]
NAMED = [
    (["generate", "--model", "owner/absent", "--prompt", "x"], "owner/absent"),
    (["generate", "--model", "{folder}", "--drafter", "owner/drafter", "--prompt", "x"], "owner/drafter"),
    (["pull", "owner/absent"], "owner/absent"),
    (["pull", "gguf:owner/absent/m.gguf"], "owner/absent"),
    (["export", "owner/absent", "{home}/x"], "owner/absent"),
    (["generate", "--prompt", "x"], "smollm2-135m"),
]


@pytest.mark.parametrize("offline", ["0", "1"])
def test_commands_on_local_models_need_no_network(tmp_path: Path, offline: str) -> None:
    folder = save_tiny(tmp_path / "model")
    for name in ("owner/cached", "owner/unwanted"):
        put_into_hub_cache(tmp_path / "hub", name)
    save_tiny(tmp_path / ".lmstudio" / "models" / "studio" / "placed")
    lines = [*WORK, *(line for line, _ in NAMED)] if offline == "0" else [WORK[0], *(n for n, _ in NAMED)]
    places = {"{folder}": str(folder), "{home}": str(tmp_path)}
    written = [[_placed(word, places) for word in line] for line in lines]
    environment = os.environ | {
        "HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": offline,
        "MLX_DSPARK_CACHE_DIR": str(tmp_path / "own"),
        "MLX_DSPARK_CALIBRATE": "off",
        "PIP_NO_INDEX": "1",
    }
    command = [sys.executable, "-c", _RUN, json.dumps(written)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wanted = dict.fromkeys(map(tuple, lines), "") | {tuple(line): name for line, name in NAMED}
    for line, (code, out, err, seconds) in zip(lines, json.loads(done.stdout), strict=True):
        assert seconds < SECONDS, line
        assert "Traceback" not in err
        if name := wanted[tuple(line)]:
            assert (code, name in err) == (2, True), (line, err)
        else:
            assert code == 0, (line, out, err)


def _placed(word: str, places: Mapping[str, str]) -> str:
    for name, path in places.items():
        word = word.replace(name, path)
    return word


# models --------------------------------------------------------------------------------------------------


def row(name: str, target: str, drafters: Mapping[str, str], **known: Any) -> Pair:
    return Pair(name, target, drafters, "lookup", "a page", licence={"target": "MIT"}, **known)


ROWS = (
    row("here", "owner/here", {"dspark": "a/b"}, weights_bytes=5, kv_bytes_per_token=7, speedup=1.5),
    row("here-too", "owner/here", {"dflash": "a/c"}, weights_bytes=5, kv_bytes_per_token=7, speedup=2.0),
    row("large", "owner/large", {}, weights_bytes=9_000_000_000),
    row("seen", "owner/seen", {}, peak_bytes=500_000_000),
    row("unknown", "owner/unknown", {}),
)


def test_models_tells_what_is_here_what_fits_and_what_it_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("mlx_dspark.catalog.memory.memory_here", lambda: Memory(1_000_000_000, "a test"))
    monkeypatch.setattr(command, "_registry", lambda: ROWS)
    path = put_into_hub_cache(tmp_path / "hub", "owner/here")
    assert run(["models", "--json"]) == 0
    here, large, seen, unknown = json.loads(capsys.readouterr().out)
    assert here["drafters"] == {"dspark": "a/b", "dflash": "a/c"}
    assert (here["installed"], here["path"], here["speedup"]) == (True, str(path), 2.0)
    assert here["bytes"] == (path / "model.safetensors").stat().st_size
    assert [each["installed"] for each in (large, seen, unknown)] == [False] * 3
    assert [here["fit"]["fits"], large["fit"]["fits"], seen["fit"]["fits"]] == [True, False, True]
    assert unknown["fit"] is None
    assert run(["models"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["model", *dict.fromkeys(row.target for row in ROWS)]
    assert "needs 9.0 GB, has 1.0 GB" in table[2]


def test_a_folder_with_code_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLX_DSPARK_MODEL_DIRS", str(tmp_path / "mine"))
    (save_tiny(tmp_path / "mine" / "coded") / "modeling.py").write_text("raise SystemExit")
    assert run(["models", "--local", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert "carries Python code" in found["trouble"]
