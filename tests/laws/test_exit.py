"""However a program ends while answers are being made: it ends at once, with its own exit code, uncrashed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest

DEADLINE = 120.0

BEFORE = """
import atexit, os, signal, sys, threading, time
from tests.tiny import tiny_config, tiny_llama, tiny_tokenizer
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.events import Finished
from mlx_dspark.foundation.request import GenerateRequest

def last_words():
    try:
        list(engine.submit(GenerateRequest((9, 8), 5)))
        print("answered")
    except RequestError as error:
        print(error.sentence)

if {early}:
    atexit.register(last_words)

from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.session import Session
from mlx_dspark.session.functions import greedy_generate
from mlx_dspark.session.pair import Parts
from mlx_dspark.targets.load import target_of

target = target_of(tiny_llama(), tiny_config("llama"), context=10**6)
long = [GenerateRequest((5 + i, 6), 10**5) for i in range(3)]
engine = {engine}
streams = [engine.stream(each) for each in long]
for stream in streams:
    for _ in range(5):
        next(stream)

def read(stream):
    for _ in stream:
        pass

def consume(stream, daemon):
    reader = threading.Thread(target=read, args=(stream,), daemon=daemon)
    reader.start()
    time.sleep(0.2)
"""

SCHEDULER, ENGINE = "Scheduler(target, max_rows=4)", "Engine(target)"

ENDINGS: dict[str, tuple[str, str, int, str]] = {
    "the end of the program": (SCHEDULER, "", 0, ""),
    "sys.exit": (SCHEDULER, "sys.exit(3)", 3, ""),
    "an unhandled exception": (SCHEDULER, "raise ValueError('unhandled')", 1, ""),
    "an unhandled exception in a with block": (
        SCHEDULER,
        "with engine: raise ValueError('unhandled')",
        1,
        "",
    ),
    "an interrupt while waiting for an event": (
        SCHEDULER,
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start(); read(streams[0])",
        -signal.SIGINT,
        "",
    ),
    "a handled interrupt": (
        SCHEDULER,
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try: read(streams[0])\n"
        "except KeyboardInterrupt: sys.exit(130)",
        130,
        "",
    ),
    "a daemon thread still reads": (SCHEDULER, "consume(streams[0], daemon=True)", 0, ""),
    "daemon threads still read, and sys.exit": (
        SCHEDULER,
        "for stream in streams: consume(stream, daemon=True)\nsys.exit(4)",
        4,
        "",
    ),
    "another thread reads to the end": (
        SCHEDULER,
        "consume(engine.submit(GenerateRequest((9,), 300)), daemon=False); print('read')",
        0,
        "read",
    ),
    "a thread that waits for a closed engine": (
        SCHEDULER,
        "consume(streams[0], daemon=False); atexit.register(print, 'over'); engine.close()",
        0,
        "over",
    ),
    "an exit function that still asks": (SCHEDULER, "atexit.register(last_words)", 0, "answered"),
    "an exit function that asks too late": (SCHEDULER, "", 0, "The engine is closed."),
    "everything is dropped": (SCHEDULER, "del engine, streams, stream", 0, ""),
    "the engine is dropped, not the streams": (SCHEDULER, "del engine; sys.exit(5)", 5, ""),
    "a stop check is at work": (
        SCHEDULER,
        "streams.append(engine.submit(GenerateRequest((9,), 50, stop_check=lambda t: time.sleep(0.05))))",
        0,
        "",
    ),
    "a session that is not closed": (
        SCHEDULER,
        "session = Session(engine, tiny_tokenizer(), end_ids=(), mode='baseline')\n"
        "answer = session.stream('hello', max_new_tokens=10**5); next(answer); next(answer); sys.exit(6)",
        6,
        "",
    ),
    "threads that shared a session have ended": (
        SCHEDULER,
        "session = Parts(target, tiny_tokenizer(), None, {}, frozenset(), 'baseline').session()\n"
        "for _ in range(8):\n"
        "    asking = threading.Thread(target=session.generate, args=('hello',))\n"
        "    asking.start(); asking.join()",
        0,
        "",
    ),
    "threads that called a function have ended": (
        SCHEDULER,
        "for _ in range(8):\n"
        "    asking = threading.Thread(target=greedy_generate, args=(target, tiny_tokenizer(), 'hello'))\n"
        "    asking.start(); asking.join()",
        0,
        "",
    ),
    "without a thread: the end of the program": (ENGINE, "", 0, ""),
    "without a thread: an unhandled exception": (ENGINE, "raise ValueError('unhandled')", 1, ""),
    "without a thread: a daemon thread still reads": (
        ENGINE,
        "consume(engine.stream(long[0]), daemon=True); sys.exit(7)",
        7,
        "",
    ),
}


def _run(name: str) -> subprocess.CompletedProcess[str]:
    engine, ending, _, _ = ENDINGS[name]
    code = BEFORE.format(engine=engine, early="too late" in name) + ending
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE, check=False
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """All programs, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(partial(_run, name)) for name in ENDINGS}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_program_ends_as_it_should(
    name: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    _, _, code, said = ENDINGS[name]
    done = runs[name].result()
    assert done.returncode == code, done.stderr
    assert done.stdout.strip() == said
    for crash in ("terminate called", "Fatal Python error", "Segmentation fault", "Exception ignored"):
        assert crash not in done.stderr
    expected = "ValueError: unhandled" if code == 1 else "KeyboardInterrupt" if code < 0 else ""
    assert expected in done.stderr
    assert expected or "Traceback" not in done.stderr
