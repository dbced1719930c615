"""Many clients with random drops on one engine, for as long as asked: nothing leaks, hangs or mixes.

    python benchmarks/soak.py                        # 16 clients for 5 minutes, the default model
    python benchmarks/soak.py --seconds 60 --clients 8 --model FOLDER

Every client asks at random one of a few requests (greedy, drawn, penalised) and reads it whole, cancels it,
closes it or drops it half-way. What it read must be the beginning of what the request gets alone; ids that
differ are shown with their place, since a batch may break ties otherwise than a row alone. Ends with an error
when an event does not come within a minute, or when rows or memory are left over.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import mlx.core as mx

from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import load_parts

DEADLINE = 60.0
SAMPLERS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=2),
)
TEXTS = (
    "Count from one to twenty.",
    "Name five rivers, five towns and five rivers again.",
    "Say hello. " * 20,
)


def read(stream: Stream, most: int | None = None) -> list[int]:
    """The tokens of the first `most` events, or of all."""
    tokens: list[int] = []
    for _ in range(most if most is not None else sys.maxsize):
        try:
            event = stream.next(DEADLINE)
        except StopIteration:
            break
        if isinstance(event, Committed):
            tokens += event.tokens
    return tokens


def client(
    engine: Scheduler,
    requests: list[GenerateRequest],
    alone: list[list[int]],
    number: int,
    until: float,
) -> Counter[str]:
    """What one client saw until the time was up."""
    rng, seen = random.Random(number), Counter[str]()
    while monotonic() < until:
        which = rng.randrange(len(requests))
        stream, fate = engine.submit(requests[which]), rng.choice(("read", "read", "cancel", "close", "drop"))
        tokens = read(stream, None if fate == "read" else rng.randrange(12))
        if fate == "cancel":
            stream.cancel()
            tokens += read(stream)
        elif fate == "close":
            stream.close()
        del stream
        seen[fate] += 1
        expected = alone[which] if fate == "read" else alone[which][: len(tokens)]
        if tokens != expected:
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), -1)
            print(f"client {number}: request {which} differs from its solo run at token {at}")
            seen["different"] += 1
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=24)
    args = parser.parse_args()
    parts = load_parts(LoadSettings.of({"model": args.model, "mode": "baseline"}))
    prompts = [tuple(encode_prompt(parts.tokenizer, text)) for text in TEXTS]
    requests = [GenerateRequest(prompt, args.new, sampling) for prompt in prompts for sampling in SAMPLERS]
    lookup = LookupDrafter()
    lookup.bind(parts.target)
    cap = cap_policy(None, lookup.sources)
    with Scheduler(parts.target, lookup, cap=cap, max_rows=args.rows, prefill_chunk=64) as engine:
        alone = [read(engine.submit(request)) for request in requests]
        assert engine.wait(DEADLINE)
        before, until = mx.get_active_memory(), monotonic() + args.seconds
        with ThreadPoolExecutor(args.clients) as pool:
            jobs = [
                pool.submit(client, engine, requests, alone, number, until) for number in range(args.clients)
            ]
            total = sum((job.result() for job in jobs), Counter[str]())
        idle, after = engine.wait(DEADLINE), mx.get_active_memory()
    print(dict(total))
    print(f"idle afterwards: {idle}; active memory {before / 1e6:.2f} MB before, {after / 1e6:.2f} MB after")
    if not idle or after > before + 1e6:
        sys.exit("rows or memory are left over")


if __name__ == "__main__":
    try:
        main()
    except DsparkError as error:
        raise SystemExit(str(error)) from error
