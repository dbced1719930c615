"""A measurement as JSON values, as tables and as bars."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlx_dspark.bench.chart import Bar
from mlx_dspark.bench.stats import Spread
from mlx_dspark.bench.suite import Judged, Measurement
from mlx_dspark.bench.summary import Line, noisy
from mlx_dspark.bench.verdict import TIE_FACTOR, Verdict
from mlx_dspark.foundation.bench_settings import BASELINE

if TYPE_CHECKING:
    from rich.table import Table

SHOWN_POSITIONS = 8
Decode = Callable[[int], str]
"""The text of one token."""


def figures(
    found: Measurement, lines: Sequence[Line], judged: Sequence[Judged], decode: Decode
) -> dict[str, Any]:
    """All figures as JSON values: `lines`, a `verdicts` entry for each prompt and arm, and every turn."""
    return {
        "interrupted": found.interrupted,
        "trials": found.trials,
        "arms": list(found.arms),
        "noisy": noisy(lines, found.arms[0]),
        "lines": [dataclasses.asdict(line) for line in lines],
        "verdicts": [
            {
                "case": found.cases[each.case].name,
                "row": each.row,
                "arm": found.arms[each.arm],
                **verdict_values(each.verdict, decode),
            }
            for each in judged
        ],
        "turns": list(_turns(found)),
    }


def _turns(found: Measurement) -> list[dict[str, Any]]:
    return [
        {
            "case": found.cases[i].name,
            "group": found.cases[i].group,
            "arm": found.arms[arm],
            "trial": trial,
            "prefill": dataclasses.asdict(taken.prefill),
            "first_token_seconds": taken.first_token_seconds,
            "decode": dataclasses.asdict(taken.decode),
            "peak_bytes": taken.peak_bytes,
            "token_ids": [list(answer.tokens) for answer in taken.answers],
        }
        for (i, arm), all_taken in found.turns.items()
        for trial, taken in enumerate(all_taken)
    ]


def verdict_values(verdict: Verdict, decode: Decode) -> dict[str, Any]:
    """A verdict as JSON values, tokens with their text."""
    gap = verdict.gap
    return {
        "verdict": verdict.kind,
        "first_difference": verdict.at,
        "expected": _token(verdict.expected, decode),
        "got": _token(verdict.got, decode),
        "gap": None if gap is None else dataclasses.asdict(gap) | {"tie": gap.tie},
    }


def _token(token: int | None, decode: Decode) -> dict[str, Any] | None:
    return None if token is None else {"id": token, "text": decode(token)}


def told(verdict: Verdict, decode: Decode) -> str:
    """A verdict in words."""
    if verdict.same:
        return "identical"
    tokens = [
        "the end" if token is None else f"{decode(token)!r} ({token})"
        for token in (verdict.expected, verdict.got)
    ]
    where = f"differs at token {verdict.at}: {tokens[1]}, where plain decoding has {tokens[0]}"
    gap = verdict.gap
    if verdict.reason:
        return f"{where}; no fault: {verdict.reason}"
    if gap is None:
        return f"{where}; the target was not asked"
    kind = "a floating-point tie" if gap.tie else "not a floating-point tie"
    return (
        f"{where}; the two logits are {abs(gap.token_gap):.2g} apart, the top two {gap.top_gap:.2g}, and "
        f"rounding moves a logit by {gap.rounding:.1g}: {kind}"
    )


def tables(lines: Sequence[Line]) -> list[Table]:
    """Rates and losslessness by group and arm; then how drafts fared."""
    return [_rates(lines), _drafts(lines)]


def _rates(lines: Sequence[Line]) -> Table:
    from rich.table import Table
    from rich.text import Text

    heads = ("prompts", "arm", "decode tok/s", "x plain", "prefill tok/s", "first token", "peak", "lossless")
    title = Text("median [lowest, highest] of the trials")
    table = Table(*heads, title=title, title_justify="left")
    group = None
    for line in lines:
        if group not in (None, line.group):
            table.add_section()
        table.add_row(
            line.group if line.group != group else "",
            line.arm,
            spread(line.decode, ".1f"),
            spread(line.against_plain, ".2f"),
            spread(line.prefill, ".0f"),
            seconds(line.first_token_seconds),
            f"{line.peak_bytes / 1e6:,.0f} MB",
            lossless(line.verdicts),
        )
        group = line.group
    return table


def _drafts(lines: Sequence[Line]) -> Table:
    from rich.table import Table

    heads = ("prompts", "arm", "accept length", "accepted", "cap", "parked", "reached: 1, 2, ... drafts")
    table = Table(*heads, title="drafts", title_justify="left")
    for line in lines:
        if line.rounds and (line.drafted or line.arm != BASELINE):
            table.add_row(
                line.group,
                line.arm,
                "-" if line.accept_length is None else f"{line.accept_length:.2f}",
                f"{line.accepted}/{line.drafted}" if line.drafted else "drafted nothing",
                str(line.cap),
                f"{line.parked_rounds}/{line.rounds}",
                " ".join(f"{share:.2f}" for share in line.reached[:SHOWN_POSITIONS]),
            )
    return table


def spread(figure: Spread | None, form: str) -> str:
    """`median [low, high]`, or a dash; without a second figure there is no spread."""
    if figure is None:
        return "-"
    middle = format(figure.median, form)
    if figure.count == 1:
        return middle
    return f"{middle} [{format(figure.low, form)}, {format(figure.high, form)}]"


def seconds(figure: Spread | None) -> str:
    return "-" if figure is None else f"{1000 * figure.median:.0f} ms"


def lossless(verdicts: dict[str, int]) -> str:
    """`7/8, 1 tie`: how many prompts have plain decoding's tokens, and what the others are."""
    total = sum(verdicts.values())
    if not total:
        return "-"
    others = [f"{count} {kind}" for kind, count in verdicts.items() if kind != "identical"]
    return ", ".join([f"{verdicts.get('identical', 0)}/{total}", *others])


def bars(lines: Sequence[Line]) -> list[Bar]:
    """The decoding rates."""
    return [
        Bar(line.group, line.arm, line.decode.median, line.decode.low, line.decode.high, _against(line))
        for line in lines
        if line.decode is not None
    ]


def _against(line: Line) -> str:
    return "" if line.against_plain is None else f"{line.against_plain.median:.2f}x"


TIE_RULE = (
    f"A tie: the two logits are at most {TIE_FACTOR:g} times as far apart as rounding moves one when the "
    "same tokens are read in another width."
)
