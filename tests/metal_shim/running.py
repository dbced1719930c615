"""Runs what a call launches, in one of four schedules, and tells what it did."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal_shim.arrays import Bytes, array_of
from tests.metal_shim.capture import Buffer, Change, Factory, Launch
from tests.metal_shim.compiling import Mode, compiled
from tests.metal_shim.errors import Fault
from tests.metal_shim.guarded import guarded
from tests.metal_shim.sanitized import sanitized
from tests.metal_shim.signature import signature
from tests.metal_shim.structures import Counts, Options

SCHEDULES = ("forward", "reverse", "random", "interleaved")
"""Orders of lanes, SIMD-groups and threadgroups; `random` shuffles the first two, `interleaved` also changes
between SIMD-groups at every meeting. No single one shows every missing barrier."""


@dataclass(frozen=True)
class Limits:
    """What a launch may ask for. Metal's own: 1024 threads and 32 KB of threadgroup memory."""

    threads: int = 256
    threadgroup_bytes: int = 32 * 1024


@dataclass(frozen=True)
class Traffic:
    """Bytes of one buffer: its size, loads and stores of all threads, `distinct` bytes loaded at all, and
    `by_threadgroups`, each byte counted once for every threadgroup that loads it."""

    size: int
    loaded: int
    stored: int
    distinct: int
    by_threadgroups: int


@dataclass(frozen=True)
class Ran:
    """One launch that was run. `traffic` is by the name of the kernel's argument; empty in other modes.

    `threadgroup_traffic` is bytes loaded from and stored to threadgroup memory.
    """

    launch: Launch
    threads: int
    threadgroup_bytes: int
    counts: dict[str, int]
    traffic: dict[str, Traffic] = field(default_factory=dict)
    threadgroup_traffic: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Run:
    """What the call returned, and its launches in order."""

    value: Any
    launches: tuple[Ran, ...]


def run(
    call: Callable[[Any], Any],
    schedule: str = "forward",
    *,
    seed: int = 0,
    mode: Mode = Mode.PLAIN,
    limits: Limits | None = None,
    change: Change | None = None,
    portable: bool = False,
) -> Run:
    """Calls `call(metal_kernel)` with a stand-in for `mx.fast.metal_kernel` whose kernels run here at once.

    `change` replaces one piece of the kernels' source, which must occur exactly once. Raises `NotMetal` where
    the source cannot be read or compiled, `Fault` where a kernel does what it must not, `ValueError` where
    `change` does not occur once.
    """
    ran: list[Ran] = []
    order = SCHEDULES.index(schedule)

    def execute(launch: Launch) -> list[mx.array]:
        outputs, done = _executed(launch, order, seed, mode, limits or Limits(), portable)
        ran.append(done)
        return outputs

    factory = Factory(execute, change)
    value = call(factory)
    factory.check()
    return Run(value, tuple(ran))


def _executed(
    launch: Launch, order: int, seed: int, mode: Mode, limits: Limits, portable: bool
) -> tuple[list[mx.array], Ran]:
    if launch.threads > limits.threads:
        raise Fault(f"{launch.name}: {launch.threads} threads in a threadgroup, limit {limits.threads}")
    path = compiled(launch, mode, portable=portable)
    workers = 1 if mode in (Mode.THREAD, Mode.TRAFFIC) else 2
    options = Options(order, seed, workers, limits.threadgroup_bytes)
    if mode.sanitizes:
        data, counts = sanitized(path, launch, options, mode)
        traffic, inner = {}, (0, 0)
    else:
        data, counts, traffic, inner = _in_process(path, launch, options, mode)
    made = [array_of(each, *form) for each, form in zip(data, launch.outputs, strict=True)]
    fields = counts.by_name()
    threads, held = fields.pop("threads"), fields.pop("threadgroup_bytes")
    return made, Ran(launch, threads, held, fields, traffic, inner)


def _in_process(
    path: Path, launch: Launch, options: Options, mode: Mode
) -> tuple[list[Bytes], Counts, dict[str, Traffic], tuple[int, int]]:
    library = _library(path)
    names = [each.name for each in signature(launch.source, launch.name).buffers]
    at_start = bool(options.schedule % 2)
    with guarded([each.data for each in launch.buffers], at_start) as held:
        library.shim_clear_buffers()
        for name, each in zip(names, held, strict=True):
            library.shim_add_buffer(
                name.encode(), ctypes.c_void_p(each.address), ctypes.c_size_t(each.data.size)
            )
        if mode is Mode.TRAFFIC:
            library.traffic_clear()
            for each in held:
                library.traffic_add(ctypes.c_void_p(each.address), ctypes.c_size_t(each.data.size))
        counts = _launched(library, launch, [each.address for each in held], options)
        for name, given, each in zip(names, launch.buffers, held, strict=True):
            if not each.intact():
                raise Fault(f"{launch.name}: write beside buffer '{name}'")
            if not given.written and not np.array_equal(each.data, given.data):
                raise Fault(f"{launch.name}: input '{name}' was written")
        outputs = [
            each.data.copy() for given, each in zip(launch.buffers, held, strict=True) if given.written
        ]
    if mode is not Mode.TRAFFIC:
        return outputs, counts, {}, (0, 0)
    return outputs, counts, *_traffic(library, names, launch.buffers)


def _launched(library: ctypes.CDLL, launch: Launch, addresses: list[int], options: Options) -> Counts:
    counts, error = Counts(), ctypes.create_string_buffer(512)
    places = (ctypes.c_void_p * len(addresses))(*addresses)
    grid, size = ((ctypes.c_uint32 * 3)(*each) for each in (launch.grid, launch.threadgroup))
    asked, told = ctypes.byref(options), ctypes.byref(counts)
    if library.shim_entry(places, grid, size, asked, told, error, ctypes.c_size_t(len(error))):
        raise Fault(f"{launch.name}: {error.value.decode()}")
    return counts


def _traffic(
    library: ctypes.CDLL, names: list[str], buffers: tuple[Buffer, ...]
) -> tuple[dict[str, Traffic], tuple[int, int]]:
    numbers = (ctypes.c_uint64 * 4)()
    found = {}
    for index, (name, each) in enumerate(zip(names, buffers, strict=True)):
        library.traffic_of(index, numbers)
        found[name] = Traffic(each.data.size, *numbers)
    library.traffic_of_threadgroup_memory(numbers)
    return found, (numbers[0], numbers[1])


@cache
def _library(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))
