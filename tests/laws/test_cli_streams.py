"""Standard streams that are closed, full or no longer read: a sentence, or quiet, and never a traceback."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny import save_tiny

ASK = "--model {model} --prompt hi --max-new-tokens 3"
FULL = [full for full in (Path("/dev/full"),) if full.exists()]
"""A device that is always full, which not every system has."""
Shell = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Runs the program with redirections as a shell would; `{model}` stands for a tiny model's folder."""
    home = tmp_path_factory.mktemp("home")
    model = save_tiny(home / "tiny")
    environment = {**os.environ, "MLX_DSPARK_CACHE_DIR": str(home / "cache")}

    def invoke(words: str) -> subprocess.CompletedProcess[str]:
        line = f"{shlex.quote(sys.executable)} -m mlx_dspark {words.format(model=shlex.quote(str(model)))}"
        return subprocess.run(
            ["sh", "-c", line], capture_output=True, text=True, env=environment, timeout=120
        )

    return invoke


@pytest.mark.parametrize("words", ["--version", "--help", "chat", ASK, f"{ASK} --json", "demo"])
def test_a_closed_output_is_refused_before_loading(shell: Shell, words: str) -> None:
    done = shell(f"{words} >&-")
    assert done.returncode == 2
    assert done.stderr.startswith("mlx-dspark: Standard output is closed.")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("words", ["--version", "--help", ASK, f"{ASK} --no-stream", f"{ASK} --json"])
def test_a_full_output_is_one_sentence(shell: Shell, words: str, full: Path) -> None:
    done = shell(f"{words} > {full}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("mlx-dspark: Standard output cannot be written: No space")
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("words", ["--model {model} --prompt -", "chat --model {model}"])
def test_a_closed_input_is_refused_before_loading(shell: Shell, words: str) -> None:
    done = shell(f"{words} <&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mlx-dspark: Standard input is closed")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [">&-", *(f"> {full}" for full in FULL)])
def test_the_answer_needs_no_standard_error(shell: Shell, error: str) -> None:
    answer = shell(ASK).stdout
    done = shell(f"{ASK} 2{error}")
    assert (done.returncode, done.stdout) == (0, answer)


@pytest.mark.parametrize("words", ["--help", "generate --help", "--version"])
def test_help_is_quiet_when_nobody_reads_it(words: str) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "mlx_dspark", *words.split()]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_input_that_is_not_text_is_refused_before_loading(shell: Shell) -> None:
    done = shell("--model {model} --prompt - < " + shlex.quote(str(Path(sys.executable).resolve())))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mlx-dspark: The prompt holds bytes that are not valid UTF-8.")
