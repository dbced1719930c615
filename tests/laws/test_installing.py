"""Where MLX has no back end, every command says so in one line, with the command that installs one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_dspark.foundation import installing

ROOT = Path(__file__).parents[2]
WITHOUT = """
raise ImportError("libmlx.so: cannot open shared object file: No such file or directory", name="mlx.core")
"""


def told(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "mlx").mkdir(exist_ok=True)
    (folder / "mlx" / "core.py").write_text(WITHOUT)
    variables = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "MLX_DSPARK_CACHE_DIR": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "mlx_dspark", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["serve", "--no-model", "--port", "0"], ["--prompt", "Hi"], ["demo"]])
def test_a_command_says_it_in_one_line(tmp_path: Path, arguments: list[str]) -> None:
    done = told(tmp_path, *arguments)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "MLX has no back end here" in lines[0]
    assert f"{ROOT}[cpu,serve]" in lines[0]


def test_the_doctor_makes_its_other_checks(tmp_path: Path) -> None:
    done = told(tmp_path, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 2
    assert "no back end" in checks["compute"]["found"]
    assert "pip install" in checks["compute"]["fix"]
    assert checks["system"]["status"] == "ok"


def test_an_import_that_fails_for_another_reason_is_not_taken_for_that() -> None:
    for error in (ImportError("no x"), ModuleNotFoundError("No module named 'mlx'", name="mlx")):
        assert installing.no_back_end(error) is None


@pytest.mark.parametrize(
    ("system", "backs", "extras"),
    [("Linux", (), "cpu,serve"), ("Linux", ("mlx-cpu",), "serve"), ("Darwin", (), "serve")],
)
def test_a_back_end_is_named_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, system: str, backs: tuple[str, ...], extras: str
) -> None:
    monkeypatch.setattr(installing.platform, "system", lambda: system)
    monkeypatch.setattr(installing, "_installed", lambda name: name in backs)
    assert installing.pip_install("serve").endswith(f"[{extras}]'")
