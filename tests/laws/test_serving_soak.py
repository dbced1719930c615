"""A short run of `benchmarks/serving.py`: survivors equal their solo runs, nothing is left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving import main
from tests.tiny import save_tiny


def test_many_clients_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    folder = save_tiny(tmp_path / "tiny")
    flags = ["--clients", "12", "--seconds", "5", "--tokens", "16", "--cancel-seconds", "5"]
    code = main([*flags, "--model", str(folder), "--", "--mode", "lookup", "--queue", "6"])
    told = capsys.readouterr().out
    assert code == 0, told
    assert all(outcome in told for outcome in ("equal", "refused", "left a stream")), told
