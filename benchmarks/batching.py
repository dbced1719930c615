"""Rates of 1, 2, 4 and 8 rows in one batch, plain and with drafts, side by side in one run.

    python benchmarks/batching.py                         # the default model: lookup, and what it ships with
    python benchmarks/batching.py --rows 1 4 --new 48 --turns 1
    python benchmarks/batching.py --model FOLDER --json out.json

Every arm answers --requests times as many requests as it has rows; requests wait until a row is free. The
arms take turns, --turns times after --warm-up turns that do not count, and as many more as it takes until
what rounds of so many rows cost has been measured between them, as in a session. A rate is that of all rows
together, decoding only: tokens committed by rounds of so many rows that read no prompt, over the time of
these rounds. Rounds of fewer rows, while the last requests end, do not count: rows that draft end one after
the other, plain ones of the same length at once.
Speculation in a batch is compared, turn by turn, with the better of the plain batch and the same speculation
one row at a time; a ratio is the median over the turns, and "of turns" the lowest and highest quarter. "by
rounds" is the ratio with every round at the median time of its kind (benchmarks/by_rounds.py), and the JSON
tells how many rounds of each kind an arm made, and what they took. Rounds of one kind share their median, so
what it costs a plain round that something could draft is in "x better" alone; "its plain" is what such rounds
took, as a multiple of the plain arm's. "plain again" is what a second plain arm makes of the first, turn by
turn: what no arm's doing is, but the machine's.
"differ" counts answers whose ids are not those of the plain arm of one row, which ties explain: a width
rounds in its own way.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.argument_types import at_least
from benchmarks.by_rounds import Kind, Round, rate_by_rounds, usual
from mlx_dspark.bench.cases import shipped_prompts
from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.errors import DsparkError, UsageError
from mlx_dspark.foundation.events import Committed, RoundReport
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.calibrate import Insist, calibrated
from mlx_dspark.session.pair import Parts, load_parts

CONTENTS = {
    "chat": [
        "Explain in two sentences how a rainbow forms.",
        "Write a short story about a lighthouse keeper.",
        "What should I pack for a week in the mountains?",
        "Describe how bread is made.",
    ],
    "edit": [
        shipped_prompts("edit")[0].replace("area", name) for name in ("area", "surface", "extent", "region")
    ],
}
MAX_WAIT = 600.0
MOST_TURNS = 8
PLAIN, AGAIN = "baseline", "plain again"


@dataclass
class Rate:
    """One turn of one arm."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    answers: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)
    """Prompts and what was said to them."""
    rounds: list[Round] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Arm:
    """An engine of some rows, kept over all trials, as a session keeps it."""

    engine: Scheduler
    rows: int
    requests: int
    rates: list[Rate] = field(default_factory=list)

    @property
    def by_prompt(self) -> dict[tuple[int, ...], list[int]]:
        """The answers of the last turn."""
        return dict(self.rates[-1].answers)

    @property
    def plain_round(self) -> float:
        """Seconds of its usual round in which nothing was drafted, launched as most of them were; 0 without
        any."""
        ahead: dict[bool, list[float]] = {}
        for rate in self.rates:
            for each in rate.rounds:
                _, width, _, launched_ahead = each.kind
                if width == 1:
                    ahead.setdefault(bool(launched_ahead), []).append(each.seconds)
        return median(max(ahead.values(), key=len)) if ahead else 0.0

    def by_rounds(self, known: dict[Kind, float]) -> float:
        return rate_by_rounds((rate.rounds, known) for rate in self.rates)

    @property
    def usual(self) -> float:
        return median(rate.per_second for rate in self.rates)

    def over(self, other: Arm) -> list[float]:
        """Turn by turn, this rate as a multiple of that."""
        return [a.per_second / b.per_second for a, b in zip(self.rates, other.rates, strict=True)]

    def run(self, requests: list[GenerateRequest]) -> None:
        requests = requests[: max(len({request.prompt for request in requests}), self.requests)]
        streams = [self.engine.submit(request) for request in requests]
        rate, decoding, reading = Rate(), [], []
        for request, stream in zip(requests, streams, strict=True):
            ids: list[int] = []
            while not self._ended(event := stream.next(MAX_WAIT)):
                if isinstance(event, Committed):
                    ids += event.tokens
                report = getattr(event, "report", None)
                if report is not None:
                    (decoding if isinstance(event, Committed) and report.certain == 1 else reading).append(
                        report
                    )
            rate.answers.append((request.prompt, ids))
        rate.rounds = [each for each in _rounds(decoding, reading) if each.kind[0] == self.rows]
        if not rate.rounds:
            raise UsageError(
                f"no round had {self.rows} rows: {len(requests)} requests end before as many decode at once.",
                "Ask for more with --requests, for longer answers with --new, or for fewer --rows.",
                field="requests",
            )
        rate.tokens = sum(each.tokens for each in rate.rounds)
        rate.seconds = sum(each.seconds for each in rate.rounds)
        full = [report for report in decoding if report.rows == self.rows]
        rate.drafted = sum(report.drafted for report in full)
        rate.accepted = sum(report.accepted for report in full)
        self.rates.append(rate)

    def kinds(self) -> list[dict[str, Any]]:
        """What rounds it made, the most usual first."""
        found: dict[Kind, list[Round]] = {}
        for rate in self.rates:
            for each in rate.rounds:
                found.setdefault(each.kind, []).append(each)
        return [
            {
                "width": width,
                "drafted_by": drafted_by,
                "launched_ahead": ahead,
                "rounds": len(each),
                "tokens": sum(one.tokens for one in each),
                "median_ms": 1e3 * median(one.seconds for one in each),
            }
            for (_, width, drafted_by, ahead), each in sorted(found.items(), key=lambda pair: -len(pair[1]))
        ]

    def settle(self, requests: list[GenerateRequest], rows: int) -> None:
        """Forget the turns so far, after more where costs are still being measured."""
        for _ in range(MOST_TURNS):
            if self.engine.costs_known(rows):
                break
            self.run(requests)
        self.rates.clear()

    @staticmethod
    def _ended(event: object) -> bool:
        return type(event).__name__ == "Finished"


def _rounds(decoding: list[RoundReport], reading: list[RoundReport]) -> list[Round]:
    """The rounds that decode; one launched ahead counts from its predecessor's landing on."""
    rows: dict[float, list[RoundReport]] = {}
    for report in decoding:
        rows.setdefault(report.landed_at, []).append(report)
    found, before = [], 0.0
    for landed, launched in sorted(
        {(report.landed_at, report.launched_at) for report in [*decoding, *reading]}
    ):
        if landed in rows:
            reports = rows[landed]
            sources = tuple(sorted({report.source for report in reports if report.drafted}))
            kind = reports[0].rows, reports[0].width, sources, launched < before
            seconds = landed - max(launched, before)
            found.append(Round(kind, seconds, sum(report.committed for report in reports)))
        before = landed
    return found


@dataclass(frozen=True)
class Drafting:
    """A way to draft, as a session would be loaded with it."""

    parts: Parts

    @classmethod
    def of(cls, model: str | None, drafter: str | None, mode: str) -> Drafting:
        asked = {"model": model, "mode": mode}
        if drafter is not None and mode not in ("baseline", "lookup"):
            asked["drafter"] = drafter
        parts = load_parts(LoadSettings.of(asked))
        return cls(calibrated(parts, Insist.ONCE) if parts.facts is not None else parts)

    def arm(self, rows: int, requests: int) -> Arm:
        engine = replace(self.parts, max_batch=rows).session().engine
        assert isinstance(engine, Scheduler)
        return Arm(engine, rows, requests)


def show(content: str, arms: dict[tuple[str, int], Arm], rows: list[int]) -> dict[str, dict[str, Any]]:
    """Print a line for each way to draft and each number of rows; returns the same as numbers."""
    one = arms[PLAIN, 1]
    table = {}
    known = usual(each for arm in arms.values() for rate in arm.rates for each in rate.rounds)
    alone = one.by_prompt
    print(f"\n{content}")
    heads = ("drafts", "rows", "plain", "x one", "drafting", "x better", "of turns", "by rounds")
    heads += ("its plain", "plain again", "accepted", "differ")
    print(("{:>12}" * len(heads)).format(*heads))
    for (mode, n), arm in arms.items():
        if mode in (PLAIN, AGAIN):
            continue
        plain = arms[PLAIN, n]
        over = arm.over(max(plain, arms[mode, 1], key=lambda arm: arm.usual))
        better = max(each.by_rounds(known) for each in (plain, arms[mode, 1]))
        low, middle, high = quartiles(over)
        least, again, most = quartiles(arms[AGAIN, n].over(plain))
        differ = sum(ids != alone[prompt] for each in (plain, arm) for prompt, ids in each.rates[-1].answers)
        its_plain = arm.plain_round / plain.plain_round if arm.plain_round else 0.0
        accepted = sum(r.accepted for r in arm.rates) / max(sum(r.drafted for r in arm.rates), 1)
        table[f"{mode} {n}"] = {
            "plain": plain.usual,
            "over_one_row": median(plain.over(one)),
            "drafting": arm.usual,
            "over_better": middle,
            "over_better_by_rounds": arm.by_rounds(known) / better,
            "its_plain_rounds": its_plain,
            "plain_again": {"lowest_quarter": least, "median": again, "highest_quarter": most},
            "answers_that_differ": differ,
            "rounds": arm.kinds(),
            "plain_rounds": plain.kinds(),
        }
        print(
            f"{mode:>12}{n:>12}{plain.usual:>12.1f}{median(plain.over(one)):>12.2f}{arm.usual:>12.1f}"
            f"{middle:>12.3f}{f'{low:.2f}-{high:.2f}':>12}"
            f"{arm.by_rounds(known) / better:>12.3f}{its_plain:>12.3f}{f'{least:.2f}-{most:.2f}':>12}"
            f"{accepted:>12.2f}{differ:>12}"
        )
    return table


def quartiles(values: list[float]) -> list[float]:
    return quantiles(values, n=4) if len(values) > 1 else values * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--drafter", help="for the modes that take one; without it, the shipped one")
    parser.add_argument("--modes", nargs="+", default=["lookup", "auto"])
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=at_least(1), default=2, help="for each row")
    parser.add_argument("--new", type=at_least(2), default=96)
    parser.add_argument("--turns", type=at_least(1), default=5)
    parser.add_argument("--warm-up", type=at_least(0), default=1)
    parser.add_argument("--contents", nargs="+", choices=CONTENTS, default=list(CONTENTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = sorted({1, *args.rows})
    ways = {mode: Drafting.of(args.model, args.drafter, mode) for mode in (PLAIN, *args.modes)}
    print(ways[PLAIN].parts.weights)
    for mode, way in ways.items():
        known = way.parts.calibration
        print(f"{mode}: costs {known.reason if known is not None else 'not measured'}")
    result = {}
    for content in args.contents:
        prompts = [tuple(encode_prompt(ways[PLAIN].parts.tokenizer, text)) for text in CONTENTS[content]]
        most = max(len(prompts), args.requests * rows[-1])
        requests = [GenerateRequest(prompts[i % len(prompts)], args.new) for i in range(most)]
        named = {**ways, AGAIN: ways[PLAIN]}
        arms = {(mode, n): way.arm(n, args.requests * n) for n in rows for mode, way in named.items()}
        order = list(arms)
        for turn in range(args.warm_up + args.turns):
            for key in order if turn % 2 else reversed(order):
                arms[key].run(requests)
            if turn < args.warm_up:
                for (_, n), arm in arms.items():
                    arm.settle(requests, n)
        result[content] = show(content, arms, rows)
        for arm in arms.values():
            arm.engine.close()
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    try:
        main()
    except DsparkError as error:
        raise SystemExit(str(error)) from error
