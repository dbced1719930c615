"""Records what lookup would have drafted, token by token, in answers of the default model.

    python benchmarks/lookup_traces.py                       writes benchmarks/traces/lookup.json
    python benchmarks/lookup_traces.py --new 600 --prompts 4
    python benchmarks/lookup_traces.py --show                what caps make of it on machines not at hand

Drafts follow from the tokens alone, so a trace serves on any machine. For each token of an answer the file
has two numbers: how many tokens match before it, 0 where lookup finds nothing, and how many drafts would have
been accepted from there on.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import mlx_dspark
from benchmarks.simulated_machines import MACHINES
from mlx_dspark.bench.cases import CONTENTS, shipped_prompts
from mlx_dspark.calibration.simulate import Machine, Offers, Replay, Segment
from mlx_dspark.drafters.lookup import LONGEST_DRAFT, LOOKUP, LOOKUP_LONG, LookupDrafter
from mlx_dspark.drafters.lookup.drafter import LONG_MATCH
from mlx_dspark.drafters.lookup.index import NgramIndex
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.foundation.caps import CapPolicy
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.train.prompts import encode

TRACES = Path(__file__).parent / "traces" / "lookup.json"


def trace(prompt: Sequence[int], answer: Sequence[int], min_n: int = 3, max_n: int = 4) -> list[list[int]]:
    """Per token of the answer: the length of the match, and the accepted drafts."""
    index, found = NgramIndex(min_n, max_n), []
    index.extend(prompt)
    for at in range(len(answer)):
        match = index.match(answer[at - 1]) if at else None
        found.append([0, 0] if match is None else [match[1], _run(index.tokens, answer, at, match[0])])
        index.extend(answer[at - 1 : at] if at else ())
    return found


def _run(tokens: Sequence[int], answer: Sequence[int], at: int, start: int) -> int:
    drafts = [*tokens[start : start + LONGEST_DRAFT], answer[at - 1]]
    pairs = zip(drafts, answer[at : at + LONGEST_DRAFT], strict=False)
    parted = (i for i, (draft, token) in enumerate(pairs) if draft != token)
    return next(parted, min(len(drafts), len(answer) - at))


def recorded_segments(path: Path = TRACES) -> dict[str, list[Segment]]:
    """By content, its answers as segments that lookup drafts for."""
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return {
        content: [
            Segment(content, tuple(run for _, run in each), tuple(_offers(length) for length, _ in each))
            for each in answers
        ]
        for content, answers in recorded.items()
    }


def _offers(length: int) -> Offers:
    most = {source.name: source.max_draft for source in LookupDrafter().sources}
    scaled = ((LOOKUP_LONG, min(2 * length, most[LOOKUP_LONG])),) if length >= LONG_MATCH else ()
    return (*scaled, (LOOKUP, most[LOOKUP])) if length else ()


PINNED = (1, 2, 3, 4, 6)


def replayed(policy: CapPolicy, truth: CostCurves, segments: Sequence[Segment]) -> Replay:
    """A policy on these answers, one after another; round times vary by 8 %."""
    rng = random.Random(7)
    return Machine(truth, "", lambda: max(0.2, rng.gauss(1, 0.08))).run(policy, segments)


def gain(policy: CapPolicy, truth: CostCurves, segments: Sequence[Segment]) -> float:
    """What it gains there, as a multiple of plain decoding."""
    return replayed(policy, truth, segments).gain


def policies(truth: CostCurves) -> dict[str, CapPolicy]:
    """Those that choose, with curves and without, and pins as a user would set them."""
    sources = LookupDrafter().sources
    chosen = {
        "auto": cap_policy("auto", sources, curves=truth),
        "derived": cap_policy(None, sources, curves=truth),
        "auto, no curves": cap_policy("auto", sources),
    }
    return (
        chosen
        | {f"cap {cap}": cap_policy(cap, sources) for cap in PINNED}
        | {"whole": cap_policy(0, sources)}
    )


def show(path: Path) -> None:
    for name, figures in MACHINES.items():
        truth = figures.curves()
        print(f"\n## {name}\n\n| content | {' | '.join(policies(truth))} |")
        print(f"|{'---|' * (len(policies(truth)) + 1)}")
        for content, segments in recorded_segments(path).items():
            gains = [gain(policy, truth, segments) for policy in policies(truth).values()]
            print(f"| {content} | {' | '.join(f'{each:.2f}' for each in gains)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="another model than the default one")
    parser.add_argument("--prompts", type=int, default=2, help="of each content")
    parser.add_argument("--new", type=int, default=400, help="most tokens in an answer")
    parser.add_argument("--out", type=Path, default=TRACES)
    parser.add_argument("--show", action="store_true", help="record nothing")
    args = parser.parse_args()
    if args.show:
        show(args.out)
        return
    recorded: dict[str, list[list[list[int]]]] = {}
    with mlx_dspark.load(args.model, calibrate=False) as session:
        for content in CONTENTS:
            for prompt in shipped_prompts(content)[: args.prompts]:
                ids = encode(session.tokenizer, prompt)
                answer = session.generate(prompt, max_new_tokens=args.new).token_ids
                recorded.setdefault(content, []).append(trace(ids, answer))
    args.out.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
