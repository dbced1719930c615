"""Ways of holding weights on the CPU back end: decoding rate, verify curve and prompt reading, side by side.

    python benchmarks/cpu_weights.py                    # the default model
    python benchmarks/cpu_weights.py --model FOLDER --trials 9 --json out.json

Every way runs in a process of its own, and so does stock mlx-lm ("mlx": its own modules, cache and
attention); they take turns, and each keeps its best time. A step is one forward over `--depth` tokens of
context.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Literal

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlx_dspark.catalog.checkpoint import Checkpoint, load_checkpoint
from mlx_dspark.catalog.resolve import resolve_model
from mlx_dspark.contracts import Logits
from mlx_dspark.foundation.paths import default_cache_dir
from mlx_dspark.kernels.dispatch import CHOICES
from mlx_dspark.kernels.race import processor_name
from mlx_dspark.kernels.threads import usable_cores
from mlx_dspark.targets.load import load_target

STOCK_MLX = "mlx"
WIDTHS = (1, 2, 4, 8, 16)
_FIRST_ID = 100

Step = Callable[[int], None]
Task = Literal["step", "read"]


def tokens(count: int) -> mx.array:
    """Any `count` token ids, [1, count]."""
    return mx.arange(_FIRST_ID, _FIRST_ID + count)[None]


# -- one way, in its own process ---------------------------------------------------------------------------


def stock_steps(checkpoint: Checkpoint, depth: int) -> tuple[Step, Step]:
    """Functions that feed `width` tokens after the context, and read a prompt of that many."""
    model = checkpoint.model
    context = make_prompt_cache(model)
    mx.eval(model(tokens(depth), cache=context))

    def step(width: int) -> None:
        mx.eval(model(tokens(width), cache=context))
        trim_prompt_cache(context, width)

    def read(count: int) -> None:
        mx.eval(model(tokens(count), cache=make_prompt_cache(model))[:, -1])

    return step, read


def our_steps(checkpoint: Checkpoint, way: str, depth: int) -> tuple[Step, Step]:
    """The same through our target, its weights held as `way`."""
    target = load_target(checkpoint, cpu_weights=way, cache_dir=default_cache_dir())
    context = target.new_rows()
    with context.transaction(depth) as transaction:
        mx.eval(target.forward(tokens(depth), context).logits)
        transaction.commit([depth])

    def step(width: int) -> None:
        with context.transaction(width):
            mx.eval(target.forward(tokens(width), context).logits)

    def read(count: int) -> None:
        rows = target.new_rows()
        with rows.transaction(count):
            mx.eval(target.forward(tokens(count), rows, logits=Logits.LAST).logits)

    return step, read


def serve(way: str, model: str | None, depth: int) -> None:
    """Answer lines `step WIDTH` and `read COUNT` with milliseconds, one JSON number a line."""
    mx.set_default_device(mx.cpu)
    found = resolve_model(model, cache_dir=default_cache_dir(), trust_remote_code=False)
    checkpoint = load_checkpoint(found)
    made = stock_steps(checkpoint, depth) if way == STOCK_MLX else our_steps(checkpoint, way, depth)
    tasks: dict[str, Step] = {"step": made[0], "read": made[1]}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, size = line.split()
        started = perf_counter()
        tasks[name](int(size))
        print(json.dumps((perf_counter() - started) * 1e3), flush=True)


# -- the parent --------------------------------------------------------------------------------------------


class Worker:
    """A way in its own process."""

    def __init__(self, way: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--serve", way, "--depth", str(arguments.depth)]
        command += ["--model", arguments.model] if arguments.model else []
        self.way = way
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._answer()

    def milliseconds(self, task: Task, size: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{task} {size}\n")
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.way} ended early")
        return json.loads(line)


def measure(workers: Sequence[Worker], depth: int, trials: int, reads: int) -> dict[str, dict[str, float]]:
    """Best milliseconds per way: "1".."16" for steps of that width, "read" for a prompt of `depth`."""
    best = {worker.way: {} for worker in workers}

    def race(task: Task, size: int, name: str) -> None:
        for worker in workers:
            taken = worker.milliseconds(task, size)
            best[worker.way][name] = min(taken, best[worker.way].get(name, taken))

    for _ in range(trials):
        for width in WIDTHS:
            race("step", width, str(width))
    for _ in range(reads):
        race("read", depth, "read")
    return best


def table(best: dict[str, dict[str, float]], depth: int) -> str:
    """Markdown: rate, the curve verify(w) / verify(1), and seconds to read the prompt."""
    wide = WIDTHS[1:]
    head = ["way", "tok/s", *(f"{width}x" for width in wide), f"read {depth}, s"]
    lines = [head, ["---"] * len(head)]
    for way, times in best.items():
        curve = [f"{times[str(width)] / times['1']:.2f}" for width in wide]
        lines.append([way, f"{1e3 / times['1']:.1f}", *curve, f"{times['read'] / 1e3:.2f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a model name or folder; the default model when absent")
    parser.add_argument("--ways", nargs="+", default=[STOCK_MLX, *CHOICES], choices=[STOCK_MLX, *CHOICES])
    parser.add_argument("--depth", type=int, default=200, help="tokens of context, and of the prompt read")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--reads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the best milliseconds here")
    parser.add_argument("--serve", metavar="WAY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.model, arguments.depth)
        return
    workers = [Worker(way, arguments) for way in arguments.ways]
    best = measure(workers, arguments.depth, arguments.trials, arguments.reads)
    for worker in workers:
        worker.close()
    print(f"{processor_name()}, {usable_cores()} cores, {platform.system()}\n")
    print(table(best, arguments.depth))
    if arguments.json:
        arguments.json.write_text(json.dumps(best, indent=1))


if __name__ == "__main__":
    main()
