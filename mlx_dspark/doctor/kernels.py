"""Which kernels a model runs on here, and what a check of all of them finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_dspark.bench.machine import about_machine
from mlx_dspark.catalog.progress import LoadProgress, Progress
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.kernels.framework.check import cases_to_check, checkable, cpu_cases
from mlx_dspark.kernels.framework.cpu_live import cpu_states
from mlx_dspark.kernels.framework.kernel import AttentionShape, Case, Kernel
from mlx_dspark.kernels.framework.live import KernelState, case_json, why_none
from mlx_dspark.kernels.framework.probe import Effort
from mlx_dspark.kernels.framework.registry import BackEnd, back_end_here
from mlx_dspark.kernels.framework.store import VerdictStore, machine_here
from mlx_dspark.kernels.framework.trial import Job, made, tried
from mlx_dspark.kernels.framework.verdict import Verdict
from mlx_dspark.session.pair import load_parts
from mlx_dspark.targets.dense.replay import MOST_WIDTH
from mlx_dspark.targets.dense.target import DenseTarget

FAULTS = ("wrong", "stalled", "failed", "untried")
"""States of a checked case that are faults; that a kernel is no faster, or that a device takes no geometry of
it, is none."""


@dataclass(frozen=True)
class KernelReport:
    """The kernels of one model on this machine. `live` are the names of those it runs on; `remarks` tell of
    kernels that are checked where they are used, and what could not be kept."""

    model: str
    machine: str
    back_end: str
    states: tuple[KernelState, ...]
    live: frozenset[str]
    remarks: tuple[str, ...] = ()
    checked: bool = False

    @property
    def sound(self) -> bool:
        """Whether no case is at fault."""
        return not any(found.state in FAULTS for state in self.states for found in state.cases.values())

    def to_json(self) -> dict[str, Any]:
        kernels = [
            {
                "name": state.name,
                "version": state.version,
                "live": state.name in self.live,
                "why_off": "" if state.name in self.live else state.why,
                "remark": state.remark,
                "cases": [case_json(case, found) for case, found in sorted(state.cases.items())],
            }
            for state in self.states
        ]
        return {
            "model": self.model,
            "back_end": self.back_end,
            "checked": self.checked,
            "sound": self.sound,
            "kernels": kernels,
            "remarks": list(self.remarks),
            "machine": about_machine(),
        }


def kernel_report(
    settings: LoadSettings, progress: Progress, *, check: bool, effort: Effort | None = None
) -> KernelReport:
    """Load the target that `settings` name and tell its kernels; with `check` try all of them, which replaces
    what is remembered. Raises what loading raises."""
    parts = load_parts(replace(settings, mode="baseline"), progress)
    assert isinstance(parts.target, DenseTarget)
    standing = _standing(parts.target)
    live = frozenset(state.name for state in standing if not state.why)
    states, remarks = standing, []
    if check:
        states, remarks = _Check(parts.target, standing, progress, effort).run()
    remarks = [*_remarks(parts.target), *remarks]
    return KernelReport(
        parts.name, machine_here(), back_end_here(), tuple(states), live, tuple(remarks), check
    )


def _standing(target: DenseTarget) -> list[KernelState]:
    """The kernels as they stand after loading."""
    live = target.kernels
    if live is None or live.back_end == "cpu":
        return cpu_states(target.report, target.model)
    return [replace(state, why=live.why_off(state)) for state in live.states]


def _remarks(target: DenseTarget) -> list[str]:
    if back_end_here() != "cuda":
        return []
    from mlx_dspark.kernels.framework.standing import remarks_on

    why = target.why_not_replayed()
    forwards = f"not replayed: {why}" if why else "compiled once and replayed"
    return [*remarks_on(target.attended()), f"forwards of up to {MOST_WIDTH} tokens: {forwards}"]


class _Check:
    """Every kernel of this back end, tried in its own cases and in those of the model."""

    def __init__(
        self, target: DenseTarget, standing: list[KernelState], progress: Progress, effort: Effort | None
    ) -> None:
        self._target, self._progress, self._effort = target, progress, effort
        self._standing = {state.name: state for state in standing}
        self._back_end: BackEnd = back_end_here()

    def run(self) -> tuple[list[KernelState], list[str]]:
        """The states with what was found, and what could not be kept."""
        kernels, states = checkable(self._back_end)
        jobs = {name: self._jobs(name, made_by) for name, made_by in kernels.items()}
        total, done, remarks = max(1, sum(map(len, jobs.values()))), 0, []
        for name, mine in jobs.items():
            found: dict[Case, Verdict] = {}
            for job, verdict in tried(mine, effort=self._effort):
                found[job.case] = verdict
                done += 1
                self._progress(LoadProgress(f"checking {name}", done / total))
            kernel = made(kernels[name])
            if self._back_end != "cpu" and (obstacle := _remember(kernel, found)):
                remarks.append(f"{name}: {obstacle}")
            states.append(self._state(kernel, found))
        places = list(self._standing)
        states.sort(key=lambda state: places.index(state.name) if state.name in places else len(places))
        return states, remarks

    def _state(self, kernel: Kernel, found: Mapping[Case, Verdict]) -> KernelState:
        old = self._standing.get(kernel.name)
        served = [case for case, verdict in found.items() if verdict.admitted]
        why = old.why if old is not None else why_none(found, served)
        return KernelState(kernel.name, kernel.version, why, found)

    def _jobs(self, name: str, made_by: str) -> list[Job]:
        kernel = made(made_by)
        if self._back_end == "cpu":
            asked = self._on_cpu(kernel)
        else:
            state = self._standing.get(name)
            asked = [] if state is None else list(state.cases)
        return [Job(made_by, case) for case in cases_to_check(kernel, asked)]

    def _on_cpu(self, kernel: Kernel) -> list[Case]:
        target = self._target
        shapes = () if target.report is None else target.report.shapes
        return cpu_cases(kernel, shapes, self._attended(), _inner(target), target.spec.context)

    def _attended(self) -> list[AttentionShape]:
        return self._target.attended()


def _inner(target: DenseTarget) -> list[int]:
    """The widths of the feed-forwards that run as one step."""
    gates = (getattr(module, "gate_proj", None) for module in target.model.modules())
    matrices = (getattr(gate, "matrix", None) for gate in gates)
    return [matrix.outputs for matrix in matrices if matrix is not None]


def _remember(kernel: Kernel, found: Mapping[Case, Verdict]) -> str:
    told = {case: verdict for case, verdict in found.items() if verdict.state != "untried"}
    return VerdictStore(default_cache_dir()).remember(kernel, told) if told else ""
