"""Every mode against plain decoding and stock mlx-lm, side by side in one run.

    python benchmarks/modes.py                      # the default model, all contents
    python benchmarks/modes.py --short              # a minute or two, for CI
    python benchmarks/modes.py --model FOLDER --drafter FOLDER --json out.json

Without --drafter, the one shipped with the model drafts. What drafts cost is measured first, as a session
does, unless it is known. Stock mlx-lm runs in a process of its own over an export of the model, once per
prompt. On each prompt the arms take turns, as often as --trials says, and each keeps its best time; a ratio
is one of summed times, against plain decoding at the same temperature. "by rounds" is the same ratio over all
turns with each round at the median time of its kind on that prompt (benchmarks/by_rounds.py), which a busy
machine disturbs less. Rates count decoding only. Greedy ids are compared with plain decoding's. Arms named
T=1 draw at temperature 1 without a seed.

Accept length is that of benchmarks/accept_length.py. "reached" is the share of verify rounds that accepted at
least 1, 2, ... drafts; drafts that a round was not allowed count as not accepted.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.argument_types import at_least
from benchmarks.by_rounds import Kind, Round, rate_by_rounds, rounds_of, usual
from mlx_dspark.bench.arms import Answer, Measured, answer_of, measured
from mlx_dspark.bench.cases import CONTENTS, shipped_prompts
from mlx_dspark.bench.stats import VerifyRound, Work, accept_length, rate, reached
from mlx_dspark.bench.stock import Stock, stock_folder
from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.contracts import Drafter
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.caps import MaxDraft, cap_policy
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.calibrate import Insist, calibrated
from mlx_dspark.session.pair import Parts, load_parts
from mlx_dspark.session.result import Result


@dataclass
class Tally:
    """One arm on one content: the best run of each prompt, and the rounds of all turns with what is usual
    on the prompt."""

    runs: list[Measured] = field(default_factory=list)
    turns: list[tuple[list[Round], dict[Kind, float]]] = field(default_factory=list)

    @property
    def answers(self) -> list[Answer]:
        return [answer for run in self.runs for answer in run.answers]

    @property
    def rate(self) -> float:
        return rate([run.decode for run in self.runs]) or 0.0

    @property
    def by_rounds(self) -> float:
        return rate_by_rounds(self.turns)

    @property
    def rounds(self) -> list[VerifyRound]:
        return [each for answer in self.answers for each in answer.rounds]

    @property
    def parked(self) -> int:
        return sum(answer.result.parked_rounds for answer in self.answers if answer.result is not None)


POLICIES: dict[str, MaxDraft] = {"derived": None, "auto": "auto", "whole block": 0}
STOCK = "stock mlx-lm"
PLAIN, SAMPLED = "plain", ", T=1"
Arm = Callable[[list[int], int], tuple[Measured, list[Round]]]


def stock_arm(stock: Stock) -> Arm:
    """Stock mlx-lm."""

    def run(ids: list[int], new: int) -> tuple[Measured, list[Round]]:
        found = stock.generate(ids, new)
        tokens = tuple(found["tokens"])
        prefill = Work(len(ids), found["prefill_seconds"])
        decode = Work(len(tokens) - 1, found["decode_seconds"])
        return Measured((Answer(tokens),), prefill, prefill.seconds, decode, 0, 0), []

    return run


def arm_of(
    parts: Parts, drafter: Drafter | None, max_draft: MaxDraft = None, temperature: float = 0.0
) -> Arm:
    """An arm of ours, with what a session knows of costs and acceptance. Its policy lives on from prompt to
    prompt, as it does there."""
    sampling = SamplingParams(temperature=temperature)
    if drafter is not None:
        drafter.bind(parts.target)
    curves = None if parts.calibration is None else parts.calibration.usable
    sources = drafter.sources if drafter is not None else ()
    cap = cap_policy(max_draft, sources, curves=curves, acceptance=parts.acceptance)
    engine = Engine(parts.target, drafter, cap=cap)

    def run(ids: list[int], new: int) -> tuple[Measured, list[Round]]:
        events = list(engine.stream(GenerateRequest(tuple(ids), new, sampling)))
        return measured([answer_of(events, Result.fold(events))], [events]), rounds_of(events)

    return run


def arms_of(args: argparse.Namespace, parts: Parts, drafter: Drafter | None) -> dict[str, Arm]:
    arms = {PLAIN: arm_of(parts, None)}
    policies = {**POLICIES, **{f"cap {cap}": cap for cap in args.caps}}
    for label, max_draft in policies.items():
        arms[f"lookup, {label}"] = arm_of(parts, LookupDrafter(), max_draft)
    if drafter is not None:
        for label, max_draft in policies.items():
            arms[f"{drafter.name}, {label}"] = arm_of(parts, drafter, max_draft)
        both = FirstHit([LookupDrafter(min_n=4, max_n=5), drafter])
        arms[f"lookup+{drafter.name}, auto"] = arm_of(parts, both, "auto")
        arms[PLAIN + SAMPLED] = arm_of(parts, None, temperature=1.0)
        for label in ("auto", "whole block"):
            arms[f"{drafter.name}, {label}{SAMPLED}"] = arm_of(parts, drafter, POLICIES[label], 1.0)
    if args.arms:
        kept = [name for name in arms if any(wanted in name for wanted in args.arms)]
        needed = {PLAIN} | {PLAIN + SAMPLED for name in kept if name.endswith(SAMPLED)}
        arms = {name: arm for name, arm in arms.items() if name in needed or name in kept}
    return arms


def model_drafter(drafter: Drafter | None) -> BlockDrafter | None:
    """The drafter with weights, which may stand behind lookup; None where there is none."""
    parts = drafter.parts if isinstance(drafter, FirstHit) else (drafter,)
    return next((part for part in parts if isinstance(part, BlockDrafter)), None)


def contents(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    yield "edit", shipped_prompts("edit")[:1]
    for name in CONTENTS:
        if name != "edit":
            yield name, shipped_prompts(name)[: args.prompts]


def measure(arms: dict[str, Arm], prompts: list[list[int]], new: int, trials: int) -> dict[str, Tally]:
    tallies = {name: Tally() for name in arms}
    for ids in prompts:
        best: dict[str, Measured] = {}
        turns: list[tuple[str, list[Round]]] = []
        for trial in range(trials):
            order = list(arms) if trial % 2 == 0 else list(reversed(arms))
            for name in order:
                if trial and name == STOCK:
                    continue
                run, rounds = arms[name](ids, new)
                turns.append((name, rounds))
                if name not in best or run.decode.seconds < best[name].decode.seconds:
                    best[name] = run
        for drawn in (False, True):  # drawing a token makes a round of its kind longer
            alike = [turn for turn in turns if turn[0].endswith(SAMPLED) == drawn]
            known = usual(each for _, rounds in alike for each in rounds)
            for name, rounds in alike:
                tallies[name].turns.append((rounds, known))
        for name, run in best.items():
            tallies[name].runs.append(run)
    return tallies


def show(content: str, tallies: dict[str, Tally]) -> list[dict[str, Any]]:
    rows = []
    for name, tally in tallies.items():
        sampled = name.endswith(SAMPLED)
        plain = tallies[PLAIN + SAMPLED if sampled else PLAIN]
        pairs = list(zip(tally.answers, plain.answers, strict=True))
        shares = reached(tally.rounds)
        row = {
            "content": content,
            "arm": name,
            "tokens_per_sec": round(tally.rate, 2),
            "against_plain": round(tally.rate / plain.rate, 3),
            "by_rounds": round(tally.by_rounds / plain.by_rounds, 3) if name != STOCK else None,
            "accept_length": round(accept_length(tally.rounds) or 0.0, 3),
            "reached": [round(share, 3) for share in shares],
            "drafted": sum(each.drafted for each in tally.rounds),
            "accepted": sum(each.accepted for each in tally.rounds),
            "parked_rounds": tally.parked,
            "prefill_seconds": round(sum(run.prefill.seconds for run in tally.runs), 2),
            "same_ids_as_plain": None if sampled else sum(a.tokens == b.tokens for a, b in pairs),
            "prompts": len(pairs),
        }
        rows.append(row)
        same = "" if sampled else f"{row['same_ids_as_plain']}/{row['prompts']}"
        first = " ".join(f"{share:.2f}" for share in shares[:8])
        print(
            f"| {content} | {name} | {row['tokens_per_sec']:.1f} | {row['against_plain']:.2f} | "
            f"{'' if name == STOCK else format(row['by_rounds'], '.2f')} | "
            f"{row['accept_length']:.2f} | {first} | {row['accepted']}/{row['drafted']} | "
            f"{row['parked_rounds']} | {row['prefill_seconds']:.1f} | {same} |",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--drafter")
    parser.add_argument("--cpu-weights", help="pin the CPU weight layout, such as stock")
    parser.add_argument("--prompts", type=at_least(1), default=8, help="prompts of each content (default 8)")
    parser.add_argument("--new", type=at_least(2), default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--trials", type=at_least(1), default=2, help="turns of each arm (default 2)")
    parser.add_argument("--caps", type=int, nargs="*", default=[], help="pinned caps, an arm each")
    parser.add_argument("--arms", nargs="*", help="only arms whose name contains one of these, and plain")
    parser.add_argument("--no-stock", action="store_true", help="leave stock mlx-lm out")
    parser.add_argument(
        "--short", action="store_true", help="one prompt of each content, 48 tokens, one turn"
    )
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    args = parser.parse_args()
    if args.short:
        args.prompts, args.new, args.trials = 1, 48, 1

    wanted = {"model": args.model, "drafter": args.drafter, "cpu_weights": args.cpu_weights}
    parts = load_parts(LoadSettings.of({k: v for k, v in wanted.items() if v is not None}))
    parts = calibrated(parts, Insist.ONCE)
    print(f"{parts.name} on {platform.machine()}, {platform.processor() or platform.system()}")
    print(getattr(parts.target, "report", ""))
    print(f"costs: {parts.calibration.reason if parts.calibration is not None else 'not measured'}")
    arms = arms_of(args, parts, model_drafter(parts.drafter))
    with tempfile.TemporaryDirectory() as scratch:
        stock = None
        if not args.no_stock:
            stock = Stock([stock_folder(args.model, Path(scratch))])
            arms[STOCK] = stock_arm(stock)
        heads = (
            "content",
            "arm",
            "tok/s",
            "x plain",
            "by rounds",
            "accept length",
            "reached",
            "accepted",
            "parked",
        )
        heads += ("prefill s", "same ids")
        print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
        rows: list[dict[str, Any]] = []
        for arm in arms.values():
            arm(list(range(20, 40)), 8)
        for content, prompts in contents(args):
            ids = [list(encode_prompt(parts.tokenizer, prompt)) for prompt in prompts]
            rows += show(content, measure(arms, ids, args.new, args.trials))
        if stock is not None:
            stock.close()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
