"""What taking back part of a round costs on models with recurrent layers, as a share of the round.

    python benchmarks/replay.py                          # real shapes at 8 bits: needs 12 GB each
    python benchmarks/replay.py --short                  # slim ones, to try the script

A round verifies `--width` tokens. It keeps all of them, or refuses some and replays the rest; the share is
what the second takes longer than the first. Weights are random, prompts of `--depth` tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter

import mlx.core as mx

from benchmarks.shapes import SHAPES, target_of_shape
from mlx_dspark.state.rows import RowStates
from mlx_dspark.targets.dense.target import DenseTarget

HYBRIDS = ["qwen3_5-9b", "lfm2-1.2b", "nemotron_h-8b"]


def begun(target: DenseTarget, rows: int, depth: int) -> RowStates:
    states = target.new_rows(rows)
    with states.transaction(depth) as transaction:
        mx.eval(target.forward(mx.zeros((rows, depth), mx.int32), states).features or states.arrays())
        transaction.commit([depth] * rows)
    mx.eval(states.arrays())
    return states


def round_seconds(target: DenseTarget, states: RowStates, width: int, kept: list[int]) -> float:
    """A round, its commit, and what the next round reads of it."""
    tokens = mx.zeros((len(states), width), mx.int32)
    started = perf_counter()
    with states.transaction(width) as transaction:
        out = target.forward(tokens, states)
        assert out.logits is not None
        mx.eval(mx.argmax(out.logits, axis=-1))
        transaction.commit(kept)
    mx.eval(states.arrays())
    return perf_counter() - started


def measure(target: DenseTarget, rows: int, depth: int, width: int, trials: int) -> dict[str, float]:
    """Median seconds of a round: all kept, half kept, and a different number kept by each row."""
    keeps = {
        "all": [width] * rows,
        "half": [width // 2] * rows,
        "apart": [1 + r % (width - 1) for r in range(rows)],
    }
    if rows == 1:
        del keeps["apart"]
    states = {name: begun(target, rows, depth) for name in keeps}
    seconds: dict[str, list[float]] = {name: [] for name in keeps}
    for trial in range(trials + 2):
        for name, kept in keeps.items():
            took = round_seconds(target, states[name], width, kept)
            if trial > 1:
                seconds[name].append(took)
    return {name: median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=HYBRIDS)
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--short", action="store_true", help="slim models, short prompts, few trials")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.short:
        args.depth, args.trials = 32, 3
    found = []
    heads = ("shape", "rows", "all kept ms", "half kept ms", "share", "kept apart ms", "share")
    print(("{:>16}" * len(heads)).format(*heads))
    for name in args.shapes:
        target = target_of_shape(name, bits=args.bits, slim=args.short)
        for rows in args.rows:
            took = measure(target, rows, args.depth, args.width, args.trials)
            found.append({"shape": name, "rows": rows, **took})
            shown = [name, str(rows), f"{1e3 * took['all']:.2f}"]
            for kept in ("half", "apart"):
                if kept in took:
                    shown += [f"{1e3 * took[kept]:.2f}", f"{took[kept] / took['all'] - 1:.1%}"]
            print(("{:>16}" * len(shown)).format(*shown), flush=True)
        del target
        mx.clear_cache()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
