"""`benchmark`: what each way to draft gains over plain decoding on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress, note, states_line, weights_line
from mlx_dspark.cli.streams import require_output
from mlx_dspark.foundation.bench_settings import BASELINE, MLX_LM, TERMINAL, BenchmarkSettings
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.lists import Drafting
from mlx_dspark.foundation.pictures import check_picture
from mlx_dspark.foundation.settings import LoadSettings

if TYPE_CHECKING:
    from mlx_dspark.bench.arms import Arm
    from mlx_dspark.bench.report import Decode
    from mlx_dspark.bench.suite import Judged, Measurement
    from mlx_dspark.bench.summary import Line
    from mlx_dspark.session.pair import Parts

INTERRUPTED = 130
LOW_ADVICE = (
    "A wrong slot, rope, tap or head looks like this: check with `mlx-dspark inspect` that the drafter was "
    "made for this very model."
)
CHART_WIDTH = 100


def benchmark(settings: BenchmarkSettings, loading: LoadSettings) -> int:
    """Measure every way to draft against plain decoding."""
    from mlx_dspark.bench.acceptance import expected_here, guard_measured
    from mlx_dspark.bench.cases import cases_of, contents_of
    from mlx_dspark.bench.gap import logit_gap
    from mlx_dspark.bench.machine import about_machine, state_now
    from mlx_dspark.bench.suite import judge, measure
    from mlx_dspark.bench.summary import lines
    from mlx_dspark.session.calibrate import calibrated
    from mlx_dspark.session.pair import load_parts

    refuse_ranks("benchmark")
    check_picture(settings.plot, stem="rates", besides=TERMINAL)
    _refuse_unused(settings)
    contents = contents_of(settings)
    require_output()
    progress = Progress()
    parts = calibrated(load_parts(loading, progress), loading.calibrate, progress)
    cases = cases_of(settings, contents, parts.tokenizer, parts.target.spec.context)
    before = state_now()
    with _arms(settings, loading, parts, progress) as arms:
        progress.clear()
        note(loaded_line(parts, loading))
        found = measure(arms, cases, trials=settings.trials, seed=settings.order_seed, tell=progress.tell)
    progress.tell("judging")
    judged = judge(found, 0, lambda tokens, expected, got: logit_gap(parts.target, tokens, expected, got))
    progress.clear()
    told = Told(settings, found, lines(found, judged, 0), judged, decoder(parts))
    recorded = {} if parts.pair is None else parts.pair.expectations(parts.mode)
    verdicts = guard_measured(parts, found, recorded)
    here = guard_measured(parts, found, expected_here(parts))
    _remember(parts, told)
    about = {
        "model": parts.name,
        "drafting": parts.mode,
        "weights": weights_line(parts.weights),
        "calibration": str(parts.calibration or ""),
        "settings": _values(settings) | _values(loading),
        "acceptance": {arm: dataclasses.asdict(verdict) for arm, verdict in verdicts.items()},
        "acceptance_here": {arm: dataclasses.asdict(verdict) for arm, verdict in here.items()},
        "machine": about_machine() | {"before": before, "after": state_now()},
    }
    told.show(about)
    for arm, verdict in verdicts.items():
        if verdict.kind in ("low", "open"):
            note(f"mlx-dspark: {arm}: {verdict}." + (f" {LOW_ADVICE}" if verdict.kind == "low" else ""))
    for arm, verdict in here.items():
        if verdict.kind == "low":
            note(f"mlx-dspark: {arm}: against what was measured here before, {verdict}. {LOW_ADVICE}")
    return INTERRUPTED if found.interrupted else 0


def _remember(parts: Parts, told: Told) -> None:
    """Keep which mode of a registered pair gained how much, where the run compared all contents.

    Without the row's own mode among them they tell nothing, and would take the place of gains that do.
    """
    from mlx_dspark.bench.acceptance import gains
    from mlx_dspark.foundation.paths import default_cache_dir
    from mlx_dspark.session.measured import remember_gains

    found = gains(told.lines, parts)
    if parts.pair is None or told.settings.prompts is not None or told.found.interrupted:
        return
    if not {"lookup", parts.pair.mode} <= found.keys():
        return
    if obstacle := remember_gains(default_cache_dir(), parts.fingerprint, found):
        note(f"mlx-dspark: the gains are not remembered: {obstacle}")


def _refuse_unused(settings: BenchmarkSettings) -> None:
    """What can be refused before a model is loaded. Raises UsageError."""
    if settings.against_draft_model is not None and settings.against is None:
        raise UsageError(
            "against_draft_model is set, and nothing here would use it.",
            f"Leave it out, or add --against {MLX_LM}.",
            field="against_draft_model",
        )
    if settings.json and settings.plot == TERMINAL:
        raise UsageError(
            f"plot is {TERMINAL!r}, and --json prints nothing but JSON.",
            "Leave one of them out.",
            field="plot",
        )


@contextmanager
def _arms(
    settings: BenchmarkSettings, loading: LoadSettings, parts: Parts, progress: Progress
) -> Iterator[list[Arm]]:
    """Plain decoding first, then every mode with every cap, then stock mlx-lm."""
    from mlx_dspark.bench.arms import OwnArm, distinct
    from mlx_dspark.bench.stock import Stock, StockArm, stock_folder

    modes = settings.modes or dict.fromkeys((parts.mode, "lookup"))
    named = [Drafting(mode, cap) for mode in modes for cap in settings.caps or (None,)]
    draftings, remarks = distinct(named, parts.mode)
    for remark in remarks:
        note(f"mlx-dspark: {remark}.")
    arms: list[Arm] = [OwnArm(parts, loading, each) for each in (Drafting(BASELINE), *draftings)]
    with ExitStack() as open_things:
        if settings.against is not None:
            scratch = Path(open_things.enter_context(TemporaryDirectory()))
            models = [loading.model]
            if settings.against_draft_model is not None:
                models.append(settings.against_draft_model)
            folders = [
                stock_folder(
                    None if model is None else str(model),
                    scratch / str(number),
                    trust_remote_code=loading.trust_remote_code,
                    progress=progress,
                )
                for number, model in enumerate(models)
            ]
            progress.tell(f"starting {MLX_LM}")
            stock = open_things.enter_context(Stock(folders))
            for draft in (False, True)[: len(folders)]:
                arms.append(StockArm(stock, loading, parts.end_ids, draft=draft))
        yield arms


@dataclasses.dataclass(frozen=True)
class Told:
    """What was measured, and how to show it."""

    settings: BenchmarkSettings
    found: Measurement
    lines: list[Line]
    judged: list[Judged]
    decode: Decode

    def show(self, about: dict[str, Any]) -> None:
        """Standard output gets JSON, or tables and bars; a picture goes to its file."""
        from mlx_dspark.bench.report import bars, figures

        if self.found.interrupted:
            turns = "this is what was measured until then" if self.found.turns else "no turn was complete"
            note(f"Interrupted: {turns}.")
        if self.settings.json:
            values = about | figures(self.found, self.lines, self.judged, self.decode)
            print(json.dumps(values, ensure_ascii=False))
        else:
            self._print()
        plot = self.settings.plot
        if plot == TERMINAL:
            from mlx_dspark.bench.chart import chart

            print("\n".join(["decoding, tokens a second", *chart(bars(self.lines), _width())]))
        elif plot is not None:
            from mlx_dspark.bench.picture import save_chart

            save_chart(
                bars(self.lines), Path(plot), title=str(about["model"]), unit="tokens a second, decoding"
            )
            note(f"Wrote {plot}.")

    def _print(self) -> None:
        from mlx_dspark.bench.report import TIE_RULE, tables, told
        from mlx_dspark.bench.summary import noisy

        console = console_of(sys.stdout)
        for table in tables(self.lines):
            if table.row_count:
                console.print(table)
        parted = [each for each in self.judged if not each.verdict.same]
        for each in parted:
            case = self.found.cases[each.case]
            row = f", row {each.row}" if case.rows > 1 else ""
            print(f"{case.name}{row}, {self.found.arms[each.arm]}: {told(each.verdict, self.decode)}.")
        if any(each.verdict.kind == "tie" for each in parted):
            print(TIE_RULE)
        for group, width in noisy(self.lines, BASELINE).items():
            moved = f"plain decoding's own rate moved by {width:.0%} between trials"
            print(f"{group}: {moved}, so ratios may be as far off.")
        for line in self.lines:
            for trouble in line.troubles:
                print(f"{line.group}, {line.arm}: {trouble}")


def loaded_line(parts: Parts, loading: LoadSettings) -> str:
    """What was loaded, and how its weights, keys and values are held."""
    about = [parts.name, f"drafting: {parts.mode}", weights_line(parts.weights), states_line(loading)]
    about.append(str(parts.calibration or ""))
    line = " · ".join(part for part in about if part)
    return f"{line}\n{parts.pairing}" if parts.pairing else line


def decoder(parts: Parts) -> Decode:
    """The text of a token."""
    return lambda token: parts.tokenizer.decode([token])


def console_of(stream: Any) -> Any:
    """A rich console on a stream; elsewhere than on a terminal, wide enough that no line is broken."""
    from rich.console import Console

    return Console(file=stream, width=None if stream.isatty() else max(160, _width()), highlight=False)


def _width() -> int:
    try:
        return min(CHART_WIDTH, os.get_terminal_size(sys.stdout.fileno()).columns)
    except (OSError, ValueError):
        return CHART_WIDTH


def _values(settings: Any) -> dict[str, Any]:
    """The settings as JSON values."""
    return cast("dict[str, Any]", json.loads(json.dumps(dataclasses.asdict(settings), default=str)))
