"""What cap policies would have cost on machines that are not at hand.

python benchmarks/simulate.py                         all machines, drawn acceptance
python benchmarks/simulate.py --machine "H200, 8-bit 8B" --content code --content chat
python benchmarks/simulate.py --trace answer.json     acceptance of a recorded run instead
python benchmarks/simulate.py --curves curves.json    recorded prices instead (CostCurves.to_json)

A trace is the output of `mlx-dspark generate --max-draft full --no-lookup-drafts --json`. Every content is a
request by itself; "by turns" has all of them in one answer. Figures are multiples of plain decoding.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulated_machines import CHANCES, MACHINES
from mlx_dspark.calibration.simulate import Machine, Segment, oracle
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.foundation.caps import CapPolicy, FixedCaps
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.foundation.source import Source

SOURCE, LIMIT = "dspark", 7
PINNED = (2, 4, 7)


def main() -> None:
    asked = _arguments()
    answers = _answers(asked)
    machines = (
        {asked.curves: CostCurves.from_json(json.loads(Path(asked.curves).read_text()))}
        if asked.curves
        else {name: MACHINES[name].curves(SOURCE, LIMIT) for name in asked.machine or MACHINES}
    )
    names = ["derived", "auto", *(f"cap {cap}" for cap in PINNED), "oracle"]
    for machine, truth in machines.items():
        about = f": {MACHINES[machine].source}" if machine in MACHINES else ""
        print(
            f"\n## {machine}{about}\n\n| content | {' | '.join(names)} | parked, auto |\n"
            f"|{'---|' * (len(names) + 2)}"
        )
        for content, segments in answers.items():
            gains, parked = compared(truth, segments, asked.noise)
            row = " | ".join(f"{gain:.2f}" for gain in gains)
            print(f"| {content} | {row} | {parked:.0%} |")


def compared(truth: CostCurves, segments: Sequence[Segment], noise: float) -> tuple[list[float], float]:
    """The gain of each policy, and the share of rounds that `auto` decoded plainly."""
    source = Source(SOURCE, LIMIT)
    policies: list[CapPolicy] = [cap_policy(asked, [source], curves=truth) for asked in (None, "auto")]
    policies += [FixedCaps({SOURCE: cap}) for cap in PINNED]
    replays = [_machine(truth, noise).run(policy, segments) for policy in policies]
    best = oracle(truth, SOURCE, segments, LIMIT)
    most = sum(s.plain_seconds for s in best) / sum(s.seconds for s in best)
    auto = replays[1].stretches
    parked = sum(s.parked for s in auto) / sum(s.rounds for s in auto)
    return [*(replay.gain for replay in replays), most], parked


def _machine(truth: CostCurves, noise: float) -> Machine:
    rng = random.Random(1)
    return Machine(truth, SOURCE, lambda: 1 + noise * rng.uniform(-1, 1))


def _answers(asked: argparse.Namespace) -> dict[str, list[Segment]]:
    if asked.trace:
        return {path: [_recorded(Path(path))] for path in asked.trace}
    rng = random.Random(asked.seed)
    contents = asked.content or list(CHANCES)
    drawn = {name: [Segment.drawn(name, CHANCES[name], asked.tokens, rng)] for name in contents}
    return drawn | {"by turns": [segment for segments in drawn.values() for segment in segments]}


def _recorded(path: Path) -> Segment:
    lengths = json.loads(path.read_text(encoding="utf-8"))["accept_lengths"]
    return Segment.of_rounds(path.stem, [length - 1 for length in lengths])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", action="append", choices=list(MACHINES))
    parser.add_argument("--content", action="append", choices=list(CHANCES))
    parser.add_argument("--trace", action="append", help="JSON of a run at the full block")
    parser.add_argument("--curves", help="JSON of recorded curves")
    parser.add_argument("--tokens", type=int, default=800, help="of each content")
    parser.add_argument("--noise", type=float, default=0.05, help="of round times, relative")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
