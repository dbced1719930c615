"""The trial of one case: right in every draw, faster than MLX in a race, and steady in a run of some length.

Nothing here ends a launch that does not come back; `trial.py` runs this in a process that can be ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_dspark.kernels.framework.kernel import Case, Exact, Geometry, Inputs, Kernel
from mlx_dspark.kernels.framework.verdict import State, Verdict

_MOST_ERROR = 1e30
"""Stands for an error that has no number."""
_TIMING = 0.02
"""Seconds that a timing should take at the most."""
_LONG_DRAW = 1.0
"""Seconds for inputs and their reference, beyond which no more are drawn."""
_LEAST_TURNS, _STALLED = 5, 10.0


@dataclass(frozen=True)
class Effort:
    """How much is done for one case.

    draws      inputs that are checked, and raced in turn; fewer where one takes long
    races      most turns of the race, in each of which both are timed; 5 at the least
    seconds    after which the race ends
    launches   most launches of one timing, which are evaluated together; fewer where that takes long
    sustained  seconds of the run after the race
    win        how many times as fast as MLX it must be at the median; it must be faster in 3 of 4 turns, too
    stall      seconds that no timing of the sustained run may take, unless it took as long in the race
    slump      how many times slower than in the race it may get in that run, unless it still beats MLX
    """

    draws: int = 2
    races: int = 15
    seconds: float = 0.6
    launches: int = 8
    sustained: float = 0.4
    win: float = 1.05
    stall: float = 1.0
    slump: float = 2.0


@dataclass(frozen=True)
class Bench:
    """What a trial runs on: a clock in seconds, MLX's evaluation, and who is told that it is alive."""

    now: Callable[[], float] = perf_counter
    evaluate: Callable[[list[mx.array]], None] = lambda arrays: mx.eval(arrays)
    alive: Callable[[], None] = lambda: None


class _End(Exception):
    """The verdict is known."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


def judge(kernel: Kernel, case: Case, bench: Bench | None = None, effort: Effort | None = None) -> Verdict:
    """Try a kernel in a case. Raises nothing that a kernel raises: that is a verdict too."""
    trial = _Trial(kernel, case, bench or Bench(), effort or Effort())
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
        self.launches = 1

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
        geometry, error = self._right_and_fastest()
        found = Verdict("live", "", repr(geometry), error=error, refusals=tuple(self.refusals))
        mine = [lambda each=each: kernel.launch(each, geometry) for each in self.inputs]
        theirs = [lambda each=each: kernel.stock(each) for each in self.inputs]
        found = self._race(found, mine, theirs)
        self._run_on(found, mine)
        return found

    # right ---------------------------------------------------------------------------------------

    def _right_and_fastest(self) -> tuple[Geometry, float]:
        """The fastest geometry that the device takes and that is right in all draws, and its error."""
        known: list[tuple[float, Geometry, float]] = []
        wrong = ""
        for geometry in self.kernel.geometries(self.case):
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
            known.append((self._quickly(self._launches(geometry)), geometry, worst))
        if not known:
            state: State = "wrong" if wrong else "refused"
            reason = wrong or "the device takes no geometry of it"
            raise _End(Verdict(state, reason, refusals=tuple(self.refusals)))
        seconds, geometry, error = min(known, key=lambda each: each[0])
        theirs = self._time([lambda: self.kernel.stock(self.inputs[0])])
        self.launches = self._together(max(seconds, theirs))
        return geometry, error

    def _quickly(self, makers: list[Callable[[], mx.array]]) -> float:
        """Seconds of one launch, the least of three timings."""
        self.launches = 1
        self.launches = self._together(self._time(makers))
        least = min(self._time(makers) for _ in range(3))
        self.launches = 1
        return least

    def _together(self, seconds: float) -> int:
        """How many launches of so many seconds are one timing."""
        return max(1, min(self.effort.launches, int(_TIMING / max(seconds, 1e-9))))

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

    def _race(
        self, found: Verdict, mine: list[Callable[[], mx.array]], theirs: list[Callable[[], mx.array]]
    ) -> Verdict:
        """Both by turns, after a turn that counts for nothing; who begins changes every turn."""
        pairs: list[tuple[float, float]] = []
        end = self.bench.now() + self.effort.seconds
        for turn in range(self.effort.races + 1):
            if len(pairs) >= _LEAST_TURNS and self.bench.now() > end:
                break
            if turn % 2:
                stock, kernel = self._time(theirs), self._time(mine)
            else:
                kernel, stock = self._time(mine), self._time(theirs)
            if turn:
                pairs.append((kernel, stock))
        kernel, stock = (median(each) for each in zip(*pairs, strict=True))
        found = replace(found, kernel_us=round(1e6 * kernel, 3), stock_us=round(1e6 * stock, 3))
        ahead = sorted(theirs / max(mine, 1e-12) for mine, theirs in pairs)
        usual = ahead[len(ahead) // 2]
        if usual >= self.effort.win and ahead[len(ahead) // 4] > 1:
            return found
        reason = f"{usual:.2f} times as fast as MLX"
        if usual >= self.effort.win:
            reason += f", and slower in {sum(each <= 1 for each in ahead)} of {len(ahead)} turns"
        return replace(found, state="slower", reason=reason)

    def _launches(self, geometry: Geometry) -> list[Callable[[], mx.array]]:
        return [lambda each=each: self.kernel.launch(each, geometry) for each in self.inputs]

    def _time(self, makers: list[Callable[[], mx.array]]) -> float:
        """Seconds of one launch."""
        started = self.bench.now()
        arrays = [makers[number % len(makers)]() for number in range(self.launches)]
        self.bench.evaluate(arrays)
        seconds = self.bench.now() - started
        self.bench.alive()
        return seconds / len(arrays)

    # steady --------------------------------------------------------------------------------------

    def _run_on(self, found: Verdict, mine: list[Callable[[], mx.array]]) -> None:
        """Launch after launch for a while; then its results must be what they were. Raises _End."""
        effort, end = self.effort, self.bench.now() + self.effort.sustained
        taken: list[float] = []
        while self.bench.now() < end or not taken:
            taken.append(self._time(mine))
            seconds, known = taken[-1] * self.launches, 1e-6 * found.kernel_us * self.launches
            if seconds > max(effort.stall, _STALLED * known):
                slow = f"{self.launches} launches took {seconds:.2f} s in a sustained run"
                raise _End(replace(found, state="stalled", reason=slow))
        usual = 1e6 * median(taken)
        if usual > max(effort.slump * found.kernel_us, found.stock_us):
            slow = (
                f"{usual / max(found.kernel_us, 1e-6):.1f} times slower in a sustained run than in the race"
            )
            raise _End(replace(found, state="slower", reason=slow))
        for number, launch in enumerate(mine):
            if (error := self._off(launch(), number)) > self.kernel.tolerance(self.case):
                reason = f"an error of {error:.1e} of the largest output after a sustained run"
                raise _End(replace(found, state="wrong", reason=reason, error=error))


def largest_error(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The largest difference as a share of the largest number wanted; enormous for what is not finite."""
    if not np.isfinite(got).all():
        return _MOST_ERROR
    most = float(np.abs(wanted).max(initial=0.0))
    difference = float(np.abs(got - wanted).max(initial=0.0))
    return difference / most if most else difference


def _said(error: Exception) -> str:
    line: Any = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
