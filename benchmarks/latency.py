"""One request through a Scheduler against the same request through an Engine, by turns.

    python benchmarks/latency.py                     # the default model with what drafts for it
    python benchmarks/latency.py --mode baseline --pairs 40 --new 48

Prints, for the time to the first token and for the time of a token after it, the median over pairs of
Scheduler / Engine, and its quartiles. The first turn of each only warms up.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import median, quantiles
from time import perf_counter

from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.events import Committed, EngineEvent
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import load_parts


def timed(events: Iterable[EngineEvent], started: float) -> tuple[float, float]:
    """Seconds to the first token, and for each token after it, as their reader sees them."""
    first = last = 0.0
    later = 0
    for event in events:
        if isinstance(event, Committed):
            last = perf_counter()
            later += len(event.tokens) if first else 0
            first = first or last
    return first - started, (last - first) / max(1, later)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--prompt", default="Name five rivers and five towns.")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--new", type=int, default=32)
    arguments = parser.parse_args()
    parts = load_parts(LoadSettings.of({"model": arguments.model, "mode": arguments.mode}))
    request = GenerateRequest(tuple(encode_prompt(parts.tokenizer, arguments.prompt)), arguments.new)
    cap = FixedCaps({s.name: min(3, s.max_draft) for s in parts.drafter.sources} if parts.drafter else {})
    ratios: list[tuple[float, float]] = []
    with Scheduler(parts.target, parts.drafter, cap=cap, max_rows=8) as scheduler:
        engine = Engine(parts.target, parts.drafter, cap=cap)
        for pair in range(arguments.pairs + 1):
            took = {}
            for way in (engine, scheduler) if pair % 2 else (scheduler, engine):
                started = perf_counter()
                took[way] = timed(way.stream(request), started)
            if pair:
                (first, each), (plain_first, plain_each) = took[scheduler], took[engine]
                ratios.append((first / plain_first, each / plain_each))
    for name, values in zip(("first token", "token after it"), zip(*ratios, strict=True), strict=True):
        low, _, high = quantiles(values, n=4)
        print(f"{name}: Scheduler / Engine {median(values):.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    try:
        main()
    except DsparkError as error:
        raise SystemExit(str(error)) from error
