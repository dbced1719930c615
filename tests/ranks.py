"""Several processes on this machine, started by `mlx.launch`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

_LAUNCHER = "from mlx._distributed_utils.launch import main; main()"
_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Launched:
    out: str
    err: str


def launch(command: Sequence[str], home: Path, *, ranks: int = 2, timeout: float = 120) -> Launched:
    """Run `python COMMAND` as so many ranks of a ring and wait for their end; what they wrote, together.

    Standard input stays open, as a terminal's does. Raises TimeoutExpired when they do not end.
    """
    port = _free_ports(ranks)
    line = [sys.executable, "-c", _LAUNCHER, "--backend", "ring", "-n", str(ranks), "-p", str(port)]
    environment = {**os.environ, "MLX_DSPARK_CACHE_DIR": str(home / "cache"), "PYTHONPATH": str(_ROOT)}
    with (home / "out").open("wb") as out, (home / "err").open("wb") as err:
        process = subprocess.Popen(
            [*line, "--", sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=_ROOT,
            start_new_session=True,
        )
    with process:
        try:
            process.wait(timeout)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return Launched(*((home / name).read_text(errors="replace") for name in ("out", "err")))


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    for first in range(42000 + os.getpid() % 5000, 60000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError("no free ports")
