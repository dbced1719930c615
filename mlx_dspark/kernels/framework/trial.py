"""Trials in a process of their own: a launch that never comes back, and one that takes its process with it,
end that process and nothing else.

The parent sends one line of JSON with the jobs and reads one line for every sign of life and every verdict. A
silence of `silence` seconds ends the process; the case it was at has stalled, and no other case of that
kernel is tried. A number says that nothing may be heard for so many seconds while MLX compiles an operation
of its own, of which the budget is the end; where that ends in silence, too, the case stays untried.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from math import inf
from queue import Empty, Queue
from threading import Thread
from time import monotonic
from typing import IO, Any

import mlx.core as mx

from mlx_dspark.kernels.framework.bench import Bench
from mlx_dspark.kernels.framework.kernel import Case, Kernel
from mlx_dspark.kernels.framework.probe import Effort, judge
from mlx_dspark.kernels.framework.verdict import State, Verdict

SILENCE = 20.0
"""Seconds without a sign of life; a kernel of ours is compiled within this."""
OUT_OF_TIME = "no time was left for it; the next load goes on, or `mlx-dspark kernels --check`"
STARTING = 120.0
"""Seconds in which the process must have begun."""
_BEAT = 0.2

_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mlx_dspark.kernels.framework.trial import main; main()"
)


@dataclass(frozen=True)
class Job:
    """A case to try. `made_by` is the function that makes the kernel, as `module:function`."""

    made_by: str
    case: Case


def made(made_by: str) -> Kernel:
    """The kernel of a `module:function`."""
    module, _, function = made_by.partition(":")
    return getattr(import_module(module), function)()


# the parent ---------------------------------------------------------------------------------------


def tried(
    jobs: Sequence[Job],
    *,
    effort: Effort | None = None,
    silence: float = SILENCE,
    starting: float = STARTING,
    budget: float = inf,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Job, Verdict]]:
    """The verdict of every job, as it is found; after `budget` seconds the others stay untried. Never raises
    for what a kernel does, nor where no process can be started: those jobs stay untried, too."""
    left, end = list(jobs), monotonic() + budget
    while left:
        done, verdict = 0, Verdict("untried")
        for job, verdict in _one_process(left, effort or Effort(), silence, starting, end):
            done += 1
            yield job, verdict
            if progress is not None:
                progress(len(jobs) - len(left) + done, len(jobs))
            if monotonic() > end:
                yield from ((each, Verdict("untried", OUT_OF_TIME)) for each in left[done:])
                return
        if done == len(left):
            return
        last = left[done - 1]
        left, dropped = _without(left[done:], last.made_by)
        for job in dropped:
            yield job, replace(verdict, reason=f"not tried after what happened in {last.case}")


def _without(jobs: Sequence[Job], made_by: str) -> tuple[list[Job], list[Job]]:
    others = [job for job in jobs if job.made_by != made_by]
    return others, [job for job in jobs if job.made_by == made_by]


def _one_process(
    jobs: Sequence[Job], effort: Effort, silence: float, starting: float, end: float
) -> Iterator[tuple[Job, Verdict]]:
    """Verdicts until all are there, or the process stalled or died: then the last one says so."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        yield from ((job, Verdict("untried", f"no process for a trial: {error}")) for job in jobs)
        return
    try:
        yield from _heard(process, jobs, effort, silence, starting, end)
    finally:
        _end(process)


def _heard(
    process: subprocess.Popen[str],
    jobs: Sequence[Job],
    effort: Effort,
    silence: float,
    starting: float,
    end: float,
) -> Iterator[tuple[Job, Verdict]]:
    lines: Queue[str] = Queue()
    assert process.stdin is not None
    assert process.stdout is not None
    Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    asked = {
        "device": mx.default_device().type.name,
        "effort": asdict(effort),
        "jobs": [[job.made_by, job.case.shape, job.case.width] for job in jobs],
    }
    with suppress(OSError):
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.close()
    found, patience, begun, at_fault = 0, starting, False, True
    while found < len(jobs):
        try:
            line = lines.get(timeout=patience)
        except Empty:
            state: State = "stalled" if begun and at_fault else "untried"
            silent = f"no sign of life for {patience:.0f} s"
            reason = silent if at_fault else f"{silent} while MLX compiled an operation of its own"
            yield jobs[found], Verdict(state, reason)
            return
        patience, at_fault = silence, True
        if not line:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            state = "failed" if begun else "untried"
            yield jobs[found], Verdict(state, f"the process of the trial ended ({process.returncode})")
            return
        told, begun = json.loads(line), True
        if isinstance(told, float):
            patience, at_fault = max(min(told, end - monotonic()), silence), False
        elif told is not None:
            yield jobs[found], Verdict.of(told)
            found += 1


def _pump(stream: IO[str], lines: Queue[str]) -> None:
    """Lines as they come, and an empty one at the end."""
    with suppress(OSError, ValueError):
        for line in stream:
            lines.put(line)
    lines.put("")


def _end(process: subprocess.Popen[str]) -> None:
    """A process that hangs in the device may take long to go; nobody waits for it."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    if process.stdout is not None and process.returncode is not None:
        process.stdout.close()


# the child ----------------------------------------------------------------------------------------


def main() -> None:
    """Answer the line on standard input. Whatever a kernel prints goes nowhere."""
    out, sys.stdout = sys.stdout, sys.stderr
    asked = json.loads(sys.stdin.readline())
    mx.set_default_device(mx.Device(getattr(mx.DeviceType, asked["device"])))
    alive = _Pulse(partial(_say, out))
    bench = Bench.here(alive, alive.quiet)
    for made_by, shape, width in asked["jobs"]:
        alive()
        verdict = _verdict(made_by, Case(shape, width), bench, Effort(**asked["effort"]))
        _say(out, verdict.to_json())
        mx.clear_cache()


def _verdict(made_by: str, case: Case, bench: Bench, effort: Effort) -> Verdict:
    try:
        kernel = made(made_by)
    except Exception as error:  # noqa: BLE001
        return Verdict("untried", f"{made_by} cannot be had, {type(error).__name__}: {error}")
    return judge(kernel, case, bench, effort)


class _Pulse:
    """Tells that the process is alive, not more often than is of use, or that it may be quiet for a while."""

    def __init__(self, tell: Callable[[float | None], None]) -> None:
        self._tell, self._told = tell, -_BEAT

    def __call__(self) -> None:
        now = monotonic()
        if now - self._told >= _BEAT:
            self._told = now
            self._tell(None)

    def quiet(self, seconds: float) -> None:
        self._told = -_BEAT
        self._tell(float(seconds))


def _say(out: IO[str], told: Any) -> None:
    out.write(json.dumps(told) + "\n")
    out.flush()
