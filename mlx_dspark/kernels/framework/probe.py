"""The trial of one case: right in every draw, faster than MLX in a race, and steady in a run of some length.

Nothing here ends a launch that does not come back; `trial.py` runs this in a process that can be ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.framework.bench import Bench
from mlx_dspark.kernels.framework.kernel import Case, Exact, Geometry, Inputs, Kernel
from mlx_dspark.kernels.framework.timing import Chain, Make, Stopwatch, Timed, Together, copies, usual
from mlx_dspark.kernels.framework.verdict import State, Verdict

_MOST_ERROR = 1e30
"""Stands for an error that has no number."""
_LONG_DRAW = 1.0
"""Seconds for inputs and their reference, beyond which no more are drawn."""
_LEAST_TURNS, _STALLED = 5, 10.0
_TRIES = 4
"""Times as many turns as are wanted, where some do not count."""
_TIMED_EVERY = 5
"""Of the sustained run; what is between keeps the device busy with nothing else."""


@dataclass(frozen=True)
class Effort:
    """How much is done for one case.

    draws      inputs that are checked, and raced in turn; fewer where one takes long
    choosing   seconds for checking and timing other geometries after the first that is right; what was begun
               is ended, so that with one that has to be compiled they may be that much more
    races      most turns of the race, in each of which both are timed; 5 at the least
    seconds    after which the race ends
    launches   most launches of one timing, which are evaluated together; fewer where that takes long
    chain      the same where launches depend on each other and the device alone is timed
    sustained  seconds of the run after the race
    win        how many times as fast as MLX it must be at the median; it must be faster in 3 of 4 turns, too
    stall      seconds that no timing of the sustained run may take, unless it took as long in the race
    slump      how many times slower than in the race it may get in that run, unless it still beats MLX
    compiling  seconds in which MLX may compile its own operation, at its first use on a machine, which takes
               it up to a minute
    """

    draws: int = 2
    choosing: float = 0.3
    races: int = 15
    seconds: float = 0.6
    launches: int = 8
    chain: int = 96
    sustained: float = 0.4
    win: float = 1.05
    stall: float = 1.0
    slump: float = 2.0
    compiling: float = 300.0


class _End(Exception):
    """The verdict is known."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


def judge(kernel: Kernel, case: Case, bench: Bench | None = None, effort: Effort | None = None) -> Verdict:
    """Try a kernel in a case. Raises nothing that a kernel raises: that is a verdict too."""
    trial = _Trial(kernel, case, bench or Bench.here(), effort or Effort())
    try:
        return trial.run()
    except _End as end:
        return end.verdict
    except Exception as error:  # noqa: BLE001
        return Verdict("failed", _said(error), refusals=tuple(trial.refusals))


class _Trial:
    def __init__(self, kernel: Kernel, case: Case, bench: Bench, effort: Effort) -> None:
        self.kernel, self.case, self.bench, self.effort = kernel, case, bench, effort
        self.inputs: list[Inputs] = []
        self.wanted: list[NDArray[np.float32]] = []
        self.refusals: list[str] = []

    def run(self) -> Verdict:
        kernel = self.kernel
        started = self.bench.now()
        for seed in range(self.effort.draws):
            if seed and self.bench.now() - started > _LONG_DRAW:
                break
            self.inputs.append(kernel.draw(self.case, seed))
            self.bench.alive()
            self.wanted.append(kernel.reference(self.inputs[-1]))
            self.bench.alive()
        self._first_of_mlx()
        self.watch = self._stopwatch()
        geometry, error = self._right_and_fastest()
        found = Verdict("live", "", repr(geometry), error=error, refusals=tuple(self.refusals))
        mine = self._launch(geometry)
        self._settle(mine, kernel.stock)
        found = self._race(found, mine)
        self._run_on(found, mine)
        return found

    def _first_of_mlx(self) -> None:
        """MLX's own operation, before anything is timed: to compile it is no fault of a kernel's."""
        self.bench.quiet(self.effort.compiling)
        self.bench.evaluate([self.kernel.stock(self.inputs[0])])
        self.bench.alive()

    def _stopwatch(self) -> Stopwatch:
        bench, effort = self.bench, self.effort
        if bench.queue is None:
            return Together(self.inputs, bench, effort.launches)
        held = copies(self.kernel, self.case, self.inputs, bench)
        return Chain(self.kernel, held, bench, bench.queue, effort.chain)

    def _settle(self, *makes: Make) -> None:
        """Where the host cannot keep up with a device, evaluations are timed as on the CPU."""
        if not self.watch.settle(makes):
            self._leave_the_device()
            self.watch.settle(makes)

    def _leave_the_device(self) -> None:
        self.watch = Together(self.inputs, self.bench, self.effort.launches)

    def _launch(self, geometry: Geometry) -> Make:
        return lambda inputs: self.kernel.launch(inputs, geometry)

    # right ---------------------------------------------------------------------------------------

    def _right_and_fastest(self) -> tuple[Geometry, float]:
        """The fastest geometry that the device takes and that is right in all draws, and its error. After the
        first that is right, others are tried for a while only."""
        known: list[tuple[float, Geometry, float]] = []
        wrong, end = "", float("inf")
        for geometry in self.kernel.geometries(self.case):
            if self.bench.now() > end:
                break
            try:
                errors = [self._error(number, geometry) for number in range(len(self.inputs))]
            except ValueError as error:
                self.refusals.append(f"{geometry!r}: {_said(error)}")
                continue
            worst = max(errors)
            if worst > self.kernel.tolerance(self.case):
                wrong = wrong or f"an error of {worst:.1e} of the largest output, laid out as {geometry!r}"
                continue
            if self._other_bits(geometry):
                wrong = wrong or "other bits than MLX gives"
                continue
            self._settle(self._launch(geometry))
            known.append((usual(self.watch, self._launch(geometry)), geometry, worst))
            end = min(end, self.bench.now() + self.effort.choosing)
        if not known:
            state: State = "wrong" if wrong else "refused"
            reason = wrong or "the device takes no geometry of it"
            raise _End(Verdict(state, reason, refusals=tuple(self.refusals)))
        _, geometry, error = min(known, key=lambda each: each[0])
        return geometry, error

    def _error(self, number: int, geometry: Geometry) -> float:
        return self._off(self.kernel.launch(self.inputs[number], geometry), number)

    def _off(self, out: mx.array, number: int) -> float:
        wanted = self.wanted[number]
        self.bench.evaluate([out])
        self.bench.alive()
        got = np.array(out.astype(mx.float32))
        if got.shape != wanted.shape:
            raise TypeError(f"the result is of shape {got.shape} and not {wanted.shape}")
        return largest_error(got, wanted)

    def _other_bits(self, geometry: Geometry) -> bool:
        """Whether the results differ from MLX's in a bit, where they must not."""
        kernel = self.kernel
        if not (isinstance(kernel, Exact) and kernel.same_bits):
            return False
        pairs = [(kernel.launch(each, geometry), kernel.stock(each)) for each in self.inputs]
        self.bench.evaluate([array for pair in pairs for array in pair])
        return not all(mx.array_equal(mine, theirs).item() for mine, theirs in pairs)

    # fast ----------------------------------------------------------------------------------------

    def _race(self, found: Verdict, mine: Make) -> Verdict:
        pairs = self._turns(mine)
        if len(pairs) < min(_LEAST_TURNS, self.effort.races):
            self._leave_the_device()
            self.watch.settle([mine, self.kernel.stock])
            pairs = self._turns(mine)
        kernel, stock = (_median(each) for each in zip(*pairs, strict=True))
        found = replace(
            found,
            kernel_us=_us(kernel.device),
            stock_us=_us(stock.device),
            kernel_host_us=_us(kernel.host),
            stock_host_us=_us(stock.host),
        )
        if reason := self._slower(pairs):
            return replace(found, state="slower", reason=reason)
        more = found.kernel_host_us - found.stock_host_us
        if more > found.stock_us:
            reason = (
                f"a launch costs the host {more:.0f} us more than MLX's, which takes {found.stock_us:.0f}"
            )
            return replace(found, state="costly", reason=reason)
        return found

    def _turns(self, mine: Make) -> list[tuple[Timed, Timed]]:
        """Both by turns, after a turn that counts for nothing; who begins changes every turn."""
        effort, time, stock = self.effort, self.watch.time, self.kernel.stock
        pairs: list[tuple[Timed, Timed]] = []
        end = self.bench.now() + effort.seconds
        for turn in range(_TRIES * effort.races + 1):
            enough = len(pairs) >= _LEAST_TURNS and self.bench.now() > end
            if enough or len(pairs) == effort.races:
                break
            if turn % 2:
                theirs, ours = time(stock), time(mine)
            else:
                ours, theirs = time(mine), time(stock)
            if turn and ours is not None and theirs is not None:
                pairs.append((ours, theirs))
        return pairs

    def _slower(self, pairs: list[tuple[Timed, Timed]]) -> str:
        """Why MLX is no slower; empty where it is."""
        ahead = sorted(theirs.device / max(ours.device, 1e-12) for ours, theirs in pairs)
        usual_one = ahead[len(ahead) // 2]
        if usual_one < self.effort.win:
            return f"{usual_one:.2f} times as fast as MLX"
        if ahead[len(ahead) // 4] <= 1:
            behind = sum(each <= 1 for each in ahead)
            return f"{usual_one:.2f} times as fast as MLX, and slower in {behind} of {len(ahead)} turns"
        return ""

    # steady --------------------------------------------------------------------------------------

    def _run_on(self, found: Verdict, mine: Make) -> None:
        """Launch after launch for a while; then its results must be what they were. Raises _End."""
        effort, now = self.effort, self.bench.now
        taken = 1e-6 * max(found.kernel_us, found.kernel_host_us) * self.watch.launches
        timed: list[float] = []
        end, step = now() + effort.sustained, 0
        while now() < end or not step:
            started = now()
            if step % _TIMED_EVERY:
                self.watch.run(mine)
            elif (each := self.watch.time(mine)) is not None:
                timed.append(each.device)
            if (seconds := now() - started) > max(effort.stall, _STALLED * taken):
                slow = f"{self.watch.launches} launches took {seconds:.2f} s in a sustained run"
                raise _End(replace(found, state="stalled", reason=slow))
            step += 1
        usual_us = 1e6 * median(timed or [0.0])
        if usual_us > max(effort.slump * found.kernel_us, found.stock_us):
            times = usual_us / max(found.kernel_us, 1e-6)
            slow = f"{times:.1f} times slower in a sustained run than in the race"
            raise _End(replace(found, state="slower", reason=slow))
        for number, inputs in enumerate(self.inputs):
            if (error := self._off(mine(inputs), number)) > self.kernel.tolerance(self.case):
                reason = f"an error of {error:.1e} of the largest output after a sustained run"
                raise _End(replace(found, state="wrong", reason=reason, error=error))


def largest_error(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The largest difference as a share of the largest number wanted; enormous for what is not finite."""
    if not np.isfinite(got).all():
        return _MOST_ERROR
    most = float(np.abs(wanted).max(initial=0.0))
    difference = float(np.abs(got - wanted).max(initial=0.0))
    return difference / most if most else difference


def _median(timings: Iterable[Timed]) -> Timed:
    return Timed(*(median(each) for each in zip(*timings, strict=True)))


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _said(error: Exception) -> str:
    line: Any = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
