"""Rows of a batch as a list against rows of one padded buffer: the time of a round, side by side.

    python benchmarks/row_layouts.py                     # a Qwen3-8B shape at 8 bits: needs 60 GB
    python benchmarks/row_layouts.py --short             # a slim one, to try the script
    python benchmarks/row_layouts.py --rows 1 4 --depths 1024 8192 --widths 1 4 --json out.json

The model has random weights. Rows stand at `--depths`, once all at the same and once each 37 positions
before the last. Both layouts take turns, and each keeps its median; a round is one forward with every logit
and its commit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter

import mlx.core as mx

from benchmarks.shapes import SHAPES, target_of_shape
from mlx_dspark.state.base import LayerCapture
from mlx_dspark.state.layout import Layout
from mlx_dspark.state.rows import Capture, RowStates
from mlx_dspark.targets.dense.target import DenseTarget

APART = 37
LAYOUTS = {"list": False, "rectangle": True}


def filled(target: DenseTarget, depths: list[int], *, rectangle: bool) -> RowStates:
    """Rows that hold so many positions each, of random keys and values."""
    with (one := target.new_rows()).transaction(1) as transaction:
        mx.eval(target.forward(mx.array([[0]]), one).logits)
        transaction.commit([1])
    like = one.capture(0)
    rows = target.new_rows(len(depths), rectangle=rectangle)
    for row, depth in enumerate(depths):
        layers = []
        for layer in like.layers:
            arrays = tuple(
                mx.random.normal((*a.shape[:2], depth, a.shape[3])).astype(a.dtype) for a in layer.arrays
            )
            layers.append(LayerCapture(arrays, depth))
        rows.restore(row, Capture(tuple(layers), depth))
        mx.eval(rows.arrays())
        mx.clear_cache()
    return rows


def round_seconds(target: DenseTarget, rows: RowStates, width: int) -> float:
    """One round that keeps nothing, so that the next one finds the same depth."""
    tokens = mx.zeros((len(rows), width), mx.int32)
    started = perf_counter()
    with rows.transaction(width) as transaction:
        out = target.forward(tokens, rows)
        assert out.logits is not None
        mx.eval(mx.argmax(out.logits, axis=-1))
        transaction.commit([0] * len(rows))
    return perf_counter() - started


def measure(
    target: DenseTarget, depths: list[int], widths: list[int], trials: int
) -> dict[int, dict[str, float]]:
    """Median seconds by width and layout."""
    states = {name: filled(target, depths, rectangle=padded) for name, padded in LAYOUTS.items()}
    seconds: dict[int, dict[str, list[float]]] = {w: {name: [] for name in LAYOUTS} for w in widths}
    for trial in range(trials + 1):
        for width in widths:
            for name, rows in states.items():
                took = round_seconds(target, rows, width)
                if trial:
                    seconds[width][name].append(took)
    return {width: {name: median(each) for name, each in by.items()} for width, by in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--bits", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--depths", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--short", action="store_true", help="a slim model, two depths, few trials")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.short:
        args.rows, args.depths, args.widths, args.trials = [1, 4], [256, 1024], [1, 4], 3
    target = target_of_shape(args.shape, bits=args.bits, slim=args.short)
    target.layout = Layout.LIST
    found = []
    print(f"{args.shape}, {args.bits} bits, {target.spec.layers} layers; milliseconds a round")
    heads = ("rows", "depth", "rows at", "width", *LAYOUTS, "list/rectangle")
    print(("{:>14}" * len(heads)).format(*heads))
    for depth in args.depths:
        for n in args.rows:
            for ragged in (False, True)[: 1 + (n > 1)]:
                depths = [depth - APART * row * ragged for row in range(n)]
                for width, ms in measure(target, depths, args.widths, args.trials).items():
                    by = {name: 1e3 * seconds for name, seconds in ms.items()}
                    line = {"rows": n, "depth": depth, "ragged": ragged, "width": width, **by}
                    found.append(line)
                    shown = [n, depth, "own depths" if ragged else "one depth", width]
                    shown += [f"{by[name]:.2f}" for name in LAYOUTS]
                    shown += [f"{by['list'] / by['rectangle']:.3f}"]
                    print(("{:>14}" * len(shown)).format(*shown), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
