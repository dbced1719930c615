"""Runs a launch as a program under AddressSanitizer and UBSan, or under ThreadSanitizer."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tests.metal_shim.arrays import Bytes
from tests.metal_shim.capture import Launch
from tests.metal_shim.compiling import Mode, folder
from tests.metal_shim.errors import Fault
from tests.metal_shim.structures import Counts, Options

_SETTINGS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=0:detect_leaks=0:halt_on_error=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=0",
    "TSAN_OPTIONS": "halt_on_error=0:report_signal_unsafe=0:exitcode=66:history_size=4:atexit_sleep_ms=0",
}
_FOUND = re.compile(
    r"ERROR: AddressSanitizer: (?P<address>[^\n]*)|runtime error: (?P<undefined>[^\n]*)"
    r"|WARNING: ThreadSanitizer: (?P<thread>[^\n(]*)|FAULT (?P<fault>[^\n]*)"
)


def sanitized(path: Path, launch: Launch, options: Options, mode: Mode) -> tuple[list[Bytes], Counts]:
    """The outputs and counts of a launch. Raises `Fault` with what was found at which lines."""
    with TemporaryDirectory(dir=folder()) as name:
        job, out = Path(name) / "job", Path(name) / "out"
        job.write_bytes(_job(launch, options))
        environment = os.environ | _SETTINGS
        done = subprocess.run(
            [str(path), str(job), str(out)], capture_output=True, text=True, env=environment
        )
        if done.returncode:
            raise Fault(f"{launch.name}: {mode.value} sanitizer: {_told(done.stderr, done.returncode)}")
        return _read(out.read_bytes(), launch)


def _job(launch: Launch, options: Options) -> bytes:
    head = (
        len(launch.buffers),
        options.schedule,
        options.seed & 0xFFFFFFFF,
        options.workers,
        options.threadgroup_limit,
    )
    parts = [struct.pack("<5I", *head), struct.pack("<6I", *launch.grid, *launch.threadgroup)]
    for each in launch.buffers:
        parts += [struct.pack("<QQ", each.data.size, each.written), each.data.tobytes()]
    return b"".join(parts)


def _read(made: bytes, launch: Launch) -> tuple[list[Bytes], Counts]:
    size = ctypes.sizeof(Counts)
    counts, at, outputs = Counts.from_buffer_copy(made[:size]), size, []
    for each in launch.buffers:
        if each.written:
            outputs.append(np.frombuffer(made, np.uint8, each.data.size, at).copy())
            at += each.data.size
    return outputs, counts


def _told(text: str, code: int) -> str:
    found = _FOUND.search(text)
    if found is None:
        return f"exit status {code}\n{text[:2000]}"
    kind = next(each for each in found.groups() if each)
    lines = list(dict.fromkeys(re.findall(r"kernel\.metal:\d+", text)))[:4]
    return " ".join([kind.strip(), *lines])
