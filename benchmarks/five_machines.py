"""The cap policy on five invented machines, over contents that stay, drift and alternate.

    python benchmarks/five_machines.py                      8 seeds
    python benchmarks/five_machines.py --seed 300 --seeds 16

Per segment of 500 tokens, what the caps are expected to bring as a share of the best constant cap; and the
gain over plain decoding, after 32 rounds and altogether. Then what a tester reaches that knows all prices and
both contents, and only has to find out when bad content turned good.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

from mlx_dspark.calibration.simulate import Machine, Replay, Segment, Stretch
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint, expected_tokens
from mlx_dspark.foundation.source import Source

BLOCK, TOKENS, NOISE = 7, 500, 0.1
DSPARK = Source("dspark", BLOCK)
BAD, GOOD = 0.2, 0.9


def curves(verify: Callable[[int], float], draft: Callable[[int], float]) -> CostCurves:
    return CostCurves(
        tuple(VerifyPoint(1, width, 0, verify(width), 0.0) for width in range(1, BLOCK + 2)),
        {"dspark": tuple(DraftPoint(1, cap, 0, draft(cap), 0.0) for cap in range(1, BLOCK + 1))},
        0.0002,
        0.0,
    )


MACHINES = {
    "flat": curves(lambda w: 0.010 + 0.0002 * w, lambda _: 0.001),
    "linear": curves(lambda w: 0.008 + 0.002 * w, lambda c: 0.0005 + 0.0002 * c),
    "knee at 6": curves(lambda w: 0.0100 + 0.0002 * min(w - 1, 5) + 0.0045 * max(0, w - 6), lambda _: 0.0008),
    "steep MoE": curves(lambda w: 0.010 * (1 + 0.42 * (w - 1) ** 0.9), lambda _: 0.0006),
    "always loses": curves(lambda w: 0.010 * w, lambda _: 0.002),
}

TRACES: dict[str, tuple[float, ...]] = {
    **{str(chance): (chance,) for chance in (0.2, 0.5, 0.8, 0.97)},
    "drifting": (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 0.8, 0.65, 0.5, 0.35, 0.2),
    "alternating": (BAD, GOOD) * 3,
}


def replay(machine: str, chances: Sequence[float], seed: int) -> Replay:
    """`auto` with the right curves; round times vary by NOISE."""
    drawing, timing = random.Random(seed), random.Random(seed + 5)
    segments = [Segment.drawn(str(chance), [chance] * BLOCK, TOKENS, drawing) for chance in chances]
    run = Machine(MACHINES[machine], "dspark", lambda: 1 + NOISE * timing.uniform(-1, 1))
    return run.run(cap_policy("auto", [DSPARK], curves=MACHINES[machine]), segments)


def of_oracle(truth: CostCurves, stretch: Stretch) -> float:
    """What the caps of a stretch are expected to bring, as a share of what the best constant cap would."""
    chances, machine = [float(stretch.name)], Machine(truth, "dspark")
    tokens = sum(rounds * expected_tokens(chances, cap) for cap, rounds in stretch.caps.items())
    seconds = sum(rounds * machine.seconds(cap) for cap, rounds in stretch.caps.items())
    best = max(truth.speedup(chances, cap, source="dspark") or 0.0 for cap in range(BLOCK + 1))
    return tokens / seconds * machine.seconds(0) / best


def tester(machine: str, needed: int, budget: float, rng: random.Random) -> float:
    """The share of the best cap on a good segment after a bad one, for probes of one draft that start again
    after a failure and turn to the best cap after so many successes, as often as bad content allows."""
    priced = Machine(MACHINES[machine], "dspark")
    times = [priced.seconds(cap) / priced.seconds(0) for cap in range(BLOCK + 1)]
    gain, best = max((expected_tokens([GOOD], cap) / times[cap], cap) for cap in range(1, BLOCK + 1))
    probes = sum(BAD**i for i in range(needed)) * (times[1] - 1 - BAD)
    period = (probes + BAD**needed * (times[best] - expected_tokens([BAD], best))) / budget
    tokens = seconds = 0.0
    wait, found = rng.random() * period, False
    while not found and tokens < TOKENS:
        tokens, seconds, hits = tokens + wait, seconds + wait, 0
        while hits < needed:
            tokens, seconds = tokens + 1 + GOOD, seconds + times[1]
            if rng.random() >= GOOD:
                break
            hits += 1
        found, wait = hits == needed, period
    left = max(0.0, TOKENS - tokens)
    return (tokens + left) / (seconds + left / gain) / gain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    print("| machine | content | segments | < .95 | least | mean | least after 32 rounds | altogether |")
    print("|---|---|---|---|---|---|---|---|")
    for machine, truth in MACHINES.items():
        for name, chances in TRACES.items():
            runs = [replay(machine, chances, args.seed + i) for i in range(args.seeds)]
            shares = [of_oracle(truth, stretch) for run in runs for stretch in run.stretches]
            print(
                f"| {machine} | {name} | {len(shares)} | {sum(share < 0.95 for share in shares)} | "
                f"{min(shares):.3f} | {sum(shares) / len(shares):.3f} | "
                f"{min(run.gain_after(32) for run in runs):.3f} | {min(run.gain for run in runs):.3f} |"
            )
    for machine in ("linear", "steep MoE"):
        for needed in (1, 2, 3):
            rng = random.Random(args.seed)
            shares = [tester(machine, needed, 0.02, rng) for _ in range(5000)]
            below = sum(share < 0.95 for share in shares) / len(shares)
            print(f"tester on {machine}, {needed} successes: {below:.1%} of segments under 0.95")


if __name__ == "__main__":
    main()
