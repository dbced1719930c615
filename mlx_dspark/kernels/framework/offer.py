"""Kernels are offered to a model at load: cases are looked up, those not known yet are tried, what was
admitted is placed. Nothing that a kernel does here makes a load fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.kernels.attention import Attention
from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework.edition import edition
from mlx_dspark.kernels.framework.kernel import (
    AttentionKernel,
    AttentionShape,
    Case,
    ExpertsKernel,
    Kernel,
    MatrixKernel,
)
from mlx_dspark.kernels.framework.live import KernelState, LiveKernels, why_none
from mlx_dspark.kernels.framework.plan import Admitted, QueryPlan, RowPlan
from mlx_dspark.kernels.framework.recheck import wrong_here
from mlx_dspark.kernels.framework.registry import ENTRIES, BackEnd, Entry, back_end_here, entries_of
from mlx_dspark.kernels.framework.store import Verdicts, VerdictStore, device_name
from mlx_dspark.kernels.framework.trial import Job, tried
from mlx_dspark.kernels.framework.verdict import Verdict

TRYING = "trying kernels on this device, once for each"
BUDGET = 90.0
"""Seconds that the trials of one load may take together; the next load goes on."""
SWITCHES = ("small_m", "multirow_attn", "wide_gemm")

Telling = Callable[[str, float], None]
"""Told what is going on, and which part of it is done."""


class Prober(Protocol):
    """Tries cases, as `trial.tried` does."""

    def __call__(
        self, jobs: Sequence[Job], *, budget: float, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[Job, Verdict]]: ...


@dataclass(frozen=True)
class Wanted:
    """The settings of kernels: None where a kernel was admitted, True also where it is off by default or no
    faster, False never."""

    small_m: bool | None = None
    multirow_attn: bool | None = None
    wide_gemm: bool | None = None

    def refuse_where_none(self, where: str) -> None:
        """Raises UsageError for a kernel that is asked for, where there is none."""
        for name in SWITCHES:
            if getattr(self, name):
                raise UsageError(
                    f"{name} is true, and {where} has no such kernel.", "Leave it out.", field=name
                )


@dataclass
class Offer:
    """What is offered to one model; `live` tells what came of it.

    `telling` is told what is going on; `back_end`, `device`, `entries` and `probe` are, where they are not
    given, those of this machine and of the registry, and `tried`. What a `probe` that is given admits is
    taken as it is; else it is looked at once more in this process.
    """

    wanted: Wanted
    cache_dir: Path
    telling: Telling | None = None
    back_end: BackEnd | None = None
    device: str = field(default_factory=device_name)
    entries: Sequence[Entry] | None = None
    probe: Prober | None = None

    def __post_init__(self) -> None:
        back_end = self.back_end or back_end_here()
        self.live = LiveKernels(back_end)
        if back_end == "cpu":
            self.wanted.refuse_where_none("the CPU")
        self._store = VerdictStore(self.cache_dir)
        self._seconds = BUDGET
        self._offered = entries_of(back_end, ENTRIES if self.entries is None else self.entries)

    # matrices ------------------------------------------------------------------------------------

    def place(self, model: nn.Module) -> None:
        """Replace the modules of `model` whose products a kernel was admitted for."""
        if not self._offered:
            return
        from mlx_dspark.kernels.gpu_modules import joined, planned, source_of

        sources = {
            name: source
            for name, module in model.named_modules()
            if (source := source_of(module)) is not None
        }
        by_shape: dict[tuple[str, mx.Dtype], list[str]] = {}
        for name, source in sources.items():
            assert source.scales is not None
            by_shape.setdefault((_form(source), source.scales.dtype), []).append(name)
        chosen: dict[str, list[Admitted[MatrixKernel]]] = {}
        alike = [(sources[names[0]], dtype, names) for (_, dtype), names in by_shape.items()]
        for entry, kernel in self._kernels():
            if isinstance(kernel, MatrixKernel):
                self._settle(entry, kernel, lambda e=entry, k=kernel: self._matrices(e, k, alike, chosen))
        modules = dict(model.named_modules())
        for _, dtype, names in alike:
            admitted = [each for each in chosen.get(names[0], []) if each.placed]
            if admitted:
                plan = RowPlan(admitted, dtype, self.live.board)
                model.update_modules(tree_unflatten([(name, planned(modules[name], plan)) for name in names]))
        joined(model)

    def _matrices(
        self,
        entry: Entry,
        kernel: MatrixKernel,
        alike: Sequence[tuple[Source, mx.Dtype, list[str]]],
        chosen: dict[str, list[Admitted[MatrixKernel]]],
    ) -> KernelState:
        taken: list[tuple[Source, mx.Dtype, list[str], dict[int, Case]]] = []
        refused = ""
        for source, dtype, names in alike:
            if (source.weight.ndim == 3) != isinstance(kernel, ExpertsKernel):
                continue
            why = kernel.refusal(source, dtype)
            refused = refused or why or ""
            if why is None:
                cases = {width: kernel.case(source, dtype, width) for width in kernel.widths}
                taken.append((source, dtype, names, cases))
        asked = [case for _, _, _, cases in taken for case in cases.values()]
        state = self._judged(entry, kernel, asked, refused)
        admitted = [_admitted(state, kernel, cases) for _, _, _, cases in taken]
        for each, (source, dtype, _, _) in zip(admitted, taken, strict=True):
            wrong = self._wrong_here(each, source, dtype)
            if wrong:
                return replace(state, why=wrong)
        for each, (_, _, names, _) in zip(admitted, taken, strict=True):
            chosen.setdefault(names[0], []).append(each)
        return state

    def _wrong_here(self, admitted: Admitted[MatrixKernel], source: Source, dtype: mx.Dtype) -> str:
        looked_at = self.probe is None and admitted.placed and source.weight.ndim == 2
        return wrong_here(admitted, source, dtype) if looked_at else ""

    # attention -----------------------------------------------------------------------------------

    @property
    def wants_shapes(self) -> bool:
        """Whether there is a kernel for attention to be offered here."""
        return any(entry.switch == "multirow_attn" for entry in self._offered)

    def attention(self, shapes: Iterable[AttentionShape], context: int) -> Attention | None:
        """The attention of a model with layers of these shapes and texts of up to `context` tokens; None
        where no kernel serves any of it."""
        if not self._offered:
            return None
        from mlx_dspark.kernels.gpu_modules import planned_attention

        kinds = list(dict.fromkeys(shape.at(0) for shape in shapes))
        chosen: dict[AttentionShape, list[tuple[Sequence[int], list[Admitted[AttentionKernel]]]]] = {}
        for entry, kernel in self._kernels():
            if isinstance(kernel, AttentionKernel):
                self._settle(
                    entry, kernel, lambda e=entry, k=kernel: self._queries(e, k, kinds, context, chosen)
                )
        plans = {
            (kind.heads, kind.kv_heads, kind.head_dim, kind.dtype, kind.sinks): QueryPlan(
                kernels, self.live.board
            )
            for kind, kernels in chosen.items()
        }
        return planned_attention(plans) if plans else None

    def _queries(
        self,
        entry: Entry,
        kernel: AttentionKernel,
        kinds: Sequence[AttentionShape],
        context: int,
        chosen: dict[AttentionShape, list[tuple[Sequence[int], list[Admitted[AttentionKernel]]]]],
    ) -> KernelState:
        lengths = [length for length in kernel.lengths if length <= context]
        taken: list[tuple[AttentionShape, list[dict[int, Case]]]] = []
        refused = ""
        for kind in kinds:
            why = next(filter(None, (kernel.refusal(kind.at(length)) for length in lengths)), None)
            refused = refused or why or ""
            if why is None:
                by_length = [
                    {width: kernel.case(kind.at(length), width) for width in kernel.widths}
                    for length in lengths
                ]
                taken.append((kind, by_length))
        cases = [case for _, lists in taken for each in lists for case in each.values()]
        state = self._judged(entry, kernel, cases, refused)
        for kind, lists in taken:
            admitted = [_admitted(state, kernel, each) for each in lists]
            if any(each.geometries for each in admitted):
                chosen.setdefault(kind, []).append((lengths, admitted))
        return state

    # both ----------------------------------------------------------------------------------------

    def _kernels(self) -> Iterator[tuple[Entry, Kernel]]:
        for entry in self._offered:
            try:
                yield entry, entry.kernel()
            except Exception as error:  # noqa: BLE001
                self._note(KernelState(entry.name, 0, f"it cannot be had, {type(error).__name__}: {error}"))

    def _settle(self, entry: Entry, kernel: Kernel, settle: Callable[[], KernelState]) -> None:
        """Offer one kernel, whatever it does."""
        why = self._off(entry)
        if why:
            self._note(KernelState(entry.name, kernel.version, why))
            return
        try:
            self._note(settle())
        except Exception as error:  # noqa: BLE001
            self._note(KernelState(entry.name, kernel.version, f"{type(error).__name__}: {error}"))

    def _note(self, state: KernelState) -> None:
        self.live.add(state)

    def _off(self, entry: Entry) -> str:
        asked = getattr(self.wanted, entry.switch)
        if asked is False:
            return f"switched off ({entry.switch})"
        return "" if asked else entry.off_here(self.device)

    def _judged(self, entry: Entry, kernel: Kernel, cases: Sequence[Case], refused: str) -> KernelState:
        """The state of a kernel after all its cases are known."""
        known = self._store.recall(kernel)
        missing = [case for case in dict.fromkeys(cases) if case not in known]
        found, remark = self._tried(entry, kernel, missing) if missing else ({}, "")
        verdicts = {case: verdict for case, verdict in {**known, **found}.items() if case in set(cases)}
        forced = bool(getattr(self.wanted, entry.switch))
        made_of = edition(kernel, kernel.back_end)
        state = KernelState(entry.name, kernel.version, "", verdicts, forced, remark, made_of)
        why = why_none(verdicts, state.serving) if verdicts or not refused else refused
        return replace(state, why=why)

    def _tried(self, entry: Entry, kernel: Kernel, cases: Sequence[Case]) -> tuple[Verdicts, str]:
        """Verdicts of new cases, kept as they come, and why they could not be kept."""

        def progress(done: int, all_of_them: int) -> None:
            if self.telling is not None:
                self.telling(f"{TRYING}: {entry.name}", done / all_of_them)

        progress(0, len(cases))
        found: Verdicts = {}
        probe, jobs = self.probe or tried, [Job(entry.made_by, case) for case in cases]
        started = monotonic()
        for job, verdict in probe(jobs, budget=self._seconds, progress=progress):
            found[job.case] = verdict
        self._seconds = max(0.0, self._seconds - (monotonic() - started))
        told = {case: verdict for case, verdict in found.items() if verdict.state != "untried"}
        obstacle = self._store.remember(kernel, told) if told else ""
        return found, f"not remembered: {obstacle}" if obstacle else ""


def _form(source: Source) -> str:
    many = f"{source.weight.shape[0]} x " if source.weight.ndim == 3 else ""
    return f"{many}{source.kind}"


def _admitted(state: KernelState, kernel: Any, cases: Mapping[int, Case]) -> Admitted[Any]:
    """What a kernel serves of one shape, with the launches that the trial chose."""
    alone, beside = {}, {}
    for width, case in cases.items():
        found = state.cases.get(case)
        if found is None or not (state.serves(found) or state.serves_beside(found)):
            continue
        same = [each for each in kernel.geometries(case) if repr(each) == found.geometry]
        if same:
            (alone if state.serves(found) else beside)[width] = same[0]
    return Admitted(kernel, sorted(cases), alone, beside)
