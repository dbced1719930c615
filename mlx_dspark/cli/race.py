"""`race`: ways to draft side by side on one prompt, and whether they wrote the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlx_dspark.chat.template import check_prompt
from mlx_dspark.cli.benchmark import INTERRUPTED, console_of, loaded_line
from mlx_dspark.cli.demo import COPYING, TASK
from mlx_dspark.cli.generate import read_prompt
from mlx_dspark.cli.ranks import refuse_ranks
from mlx_dspark.cli.show import Progress, accept_length, note
from mlx_dspark.cli.streams import require_output
from mlx_dspark.foundation.bench_settings import BASELINE, CONTROL, RaceSettings
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.lists import Drafting
from mlx_dspark.foundation.settings import GenerateSettings, LoadSettings

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mlx_dspark.bench.race import Lane, Outcome
    from mlx_dspark.bench.report import Decode
    from mlx_dspark.session import Session

DEFAULT_ARMS = (Drafting(BASELINE), Drafting("auto"))
FRAMES_PER_SECOND = 8
FEWEST_LINES, MOST_LINES = 4, 24
BESIDE_THE_TEXT = 8
"""Lines of a terminal that the lanes' text leaves for everything else."""


def race(settings: RaceSettings, loading: LoadSettings) -> int:
    """Race ways to draft against each other on one prompt."""
    import mlx.core as mx

    from mlx_dspark.bench.arms import label_of, session_of
    from mlx_dspark.bench.gap import logit_gap
    from mlx_dspark.bench.race import run_race
    from mlx_dspark.session.calibrate import calibrated
    from mlx_dspark.session.pair import load_parts

    refuse_ranks("race")
    asked = None if settings.prompt is None else read_prompt(settings.prompt)
    if asked is not None:
        check_prompt(asked, settings.system)
    require_output()
    progress = Progress()
    parts = calibrated(load_parts(loading, progress), loading.calibrate, progress)
    progress.clear()
    prompt = asked or (COPYING if parts.mode == "lookup" else TASK)
    named = _racing(settings, parts.mode)
    arms = {label_of(arm): session_of(parts, loading, arm) for arm in named}
    note(f"{loaded_line(parts, loading)}\n\n{prompt}\n")
    with _shown(settings, progress) as show:
        outcome = run_race(
            arms,
            session_of(parts, loading, Drafting(CONTROL)),
            prompt,
            GenerateSettings(max_new_tokens=settings.max_new_tokens, system=settings.system),
            ask=lambda tokens, expected, got: logit_gap(parts.target, tokens, expected, got),
            show=show,
            tell=progress.tell,
            settle=mx.synchronize,
        )
    progress.clear()
    lines = [_values(lane, arms[lane.label]) for lane in outcome.lanes]
    _tell(
        settings,
        {"model": parts.name, "prompt": prompt},
        outcome,
        lines,
        lambda id_: parts.tokenizer.decode([id_]),
    )
    return INTERRUPTED if outcome.interrupted else 0


def _racing(settings: RaceSettings, mode: str) -> list[Drafting]:
    """The arms, each once. Raises UsageError where fewer than two are left."""
    from mlx_dspark.bench.arms import distinct

    named, remarks = distinct(settings.arms or DEFAULT_ARMS, mode)
    if len(named) < 2:
        raise UsageError(
            f"arms leaves one arm to race: {', '.join(remarks)}.", "Name two that differ.", field="arms"
        )
    for remark in remarks:
        note(f"mlx-dspark: {remark}.")
    return named


@contextmanager
def _shown(settings: RaceSettings, progress: Progress) -> Iterator[Callable[[Sequence[Lane]], None]]:
    """What to call after every lap: it draws the lanes side by side on a terminal, and nothing elsewhere."""
    if settings.json or not sys.stdout.isatty():
        yield lambda lanes: progress.tell("racing")
        return
    from rich.live import Live

    console = console_of(sys.stdout)
    live = Live(console=console, refresh_per_second=FRAMES_PER_SECOND)

    def show(lanes: Sequence[Lane]) -> None:
        if not live.is_started:
            progress.clear()
            live.start()
        live.update(side_by_side(lanes, console))

    try:
        yield show
    finally:
        live.stop()


def side_by_side(lanes: Sequence[Lane], console: Console) -> RenderableType:
    """The end of each lane's text in a panel of its own, and below it how fast it is."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    width = max(8, console.width // len(lanes) - 4)
    texts = [Text(lane.text).wrap(console, width) for lane in lanes]
    most = max(FEWEST_LINES, min(MOST_LINES, console.height - BESIDE_THE_TEXT))
    height = min(most, max(FEWEST_LINES, *map(len, texts)))
    grid = Table.grid(expand=True)
    for _ in lanes:
        grid.add_column(ratio=1)
    grid.add_row(
        *(
            Panel(
                Text("\n").join(lines[-height:]),
                title=f"{lane.label}{' · done' if lane.done else ''}",
                subtitle=f"{lane.tokens} tokens · {lane.rate:.1f} tok/s · {lane.seconds:.1f} s",
                height=height + 2,
            )
            for lane, lines in zip(lanes, texts, strict=True)
        )
    )
    return grid


def _values(lane: Lane, session: Session) -> dict[str, Any]:
    """A lane's figures. Its times are those of its laps."""
    result = session.fold(lane.seen)
    return {
        "arm": lane.label,
        "finished": lane.done,
        "tokens": lane.tokens,
        "seconds": lane.seconds,
        "first_token_seconds": lane.first_at,
        "decode_tokens_per_sec": lane.rate,
        "accept_lengths": list(result.accept_lengths),
        "num_rounds": result.num_rounds,
        "parked_rounds": result.parked_rounds,
        "troubles": list(result.troubles),
        "text": lane.text,
        "token_ids": list(lane.answer.tokens),
    }


def _tell(
    settings: RaceSettings,
    about: dict[str, Any],
    outcome: Outcome,
    lines: list[dict[str, Any]],
    decode: Decode,
) -> None:
    from mlx_dspark.bench.report import verdict_values

    if outcome.interrupted:
        note("Interrupted: this is how far the arms came.")
    if not settings.json:
        _print(outcome, lines, decode)
        return
    verdicts = [verdict_values(each, decode) for each in outcome.verdicts] or [
        {"verdict": "unjudged"} for _ in lines
    ]
    values = {
        "interrupted": outcome.interrupted,
        "identical": outcome.identical,
        "same_reading": outcome.same_reading,
        "lanes": [line | verdict for line, verdict in zip(lines, verdicts, strict=True)],
    }
    print(json.dumps(about | values, ensure_ascii=False))


def _print(outcome: Outcome, lines: list[dict[str, Any]], decode: Decode) -> None:
    from rich.table import Table

    from mlx_dspark.bench.report import TIE_RULE, told

    table = Table("arm", "tokens", "seconds", "first token", "decode tok/s", "accept length", "rounds")
    for line in sorted(lines, key=lambda each: each["seconds"]):
        first = line["first_token_seconds"]
        table.add_row(
            line["arm"],
            str(line["tokens"]),
            f"{line['seconds']:.2f}",
            "-" if first is None else f"{1000 * first:.0f} ms",
            f"{line['decode_tokens_per_sec']:.1f}",
            accept_length(line["accept_lengths"]),
            str(line["num_rounds"]),
        )
    console_of(sys.stdout).print(table)
    for line in lines:
        for trouble in line["troubles"]:
            print(f"{line['arm']}: {trouble}")
    if outcome.identical:
        far = ", as far as they came" if outcome.interrupted else ""
        print(f"All arms wrote the tokens of plain decoding at a cap of 0{far}.")
    for lane, verdict in zip(outcome.lanes, outcome.verdicts, strict=False):
        if not verdict.same:
            print(f"{lane.label} {told(verdict, decode)}.")
    if any(verdict.kind == "tie" for verdict in outcome.verdicts):
        print(TIE_RULE)
    if not outcome.same_reading:
        print("The arms read the prompt in different chunks, so their answers need not be the same.")
