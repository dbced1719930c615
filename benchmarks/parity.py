"""What the loop itself costs: plain decoding against stock mlx-lm on one random model, taking turns.

    python benchmarks/parity.py                          # a 135M Llama, 4 bits, on the default device
    python benchmarks/parity.py --layers 16 --hidden 2048 --vocab 128256 --bits 8 --new 256

The model has random weights, so it measures the loop on any machine without a download. Both sides run the
same modules, stock kernels and the same prompt; ids are compared. Also shown: lookup that never hits, a
drafter that is always parked, and verify rounds of several widths in units of a plain step.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

from mlx_dspark.contracts import Logits
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.caps import cap_policy
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of

WIDTHS = (1, 2, 4, 8, 16)


def random_model(args: argparse.Namespace) -> tuple[nn.Module, dict]:
    heads = args.hidden // 64
    config = {
        "model_type": "llama",
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "intermediate_size": args.hidden * 8 // 3 // 128 * 128,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 3) if heads % 3 == 0 else max(1, heads // 4),
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": args.vocab,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    }
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    cpu = mx.default_device().type == mx.DeviceType.cpu
    model.set_dtype(mx.float32 if cpu else mx.float16)
    if args.bits:
        nn.quantize(model, group_size=32, bits=args.bits)
    mx.eval(model.parameters())
    return model, config


def timed(tokens: Iterator[int]) -> tuple[list[int], float]:
    """The ids, and seconds from the first to the last."""
    ids: list[int] = []
    first = last = 0.0
    for token in tokens:
        last = perf_counter()
        first = first or last
        ids.append(token)
    return ids, last - first


def stock(model: nn.Module, prompt: list[int], new: int) -> Iterator[int]:
    return (int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=new))


def ours(engine: Engine, prompt: list[int], new: int) -> Iterator[int]:
    for event in engine.stream(GenerateRequest(tuple(prompt), new)):
        if isinstance(event, Committed):
            yield from event.tokens


def verify_curve(target: DenseTarget, depth: int, trials: int) -> dict[int, float]:
    """Seconds of a forward by width, at `depth` tokens of context."""
    rows = target.new_rows()
    with rows.transaction(depth) as transaction:
        mx.eval(target.forward(mx.zeros((1, depth), mx.int32), rows, logits=Logits.LAST).logits)
        transaction.commit([depth])
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(trials + 2):
        for width in WIDTHS:
            started = perf_counter()
            with rows.transaction(width):
                mx.eval(target.forward(mx.zeros((1, width), mx.int32), rows).logits)
            times[width].append(perf_counter() - started)
    return {width: median(seconds[2:]) for width, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--bits", type=int, default=4, help="0 leaves the weights dense")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--trials", type=int, default=5)
    args = parser.parse_args()

    model, config = random_model(args)
    target = target_of(model, config)
    prompt = random.Random(0).choices(range(args.vocab), k=args.prompt)
    lookup = LookupDrafter(min_n=8, max_n=8)
    lookup.bind(target)
    plain = Engine(target)
    missing = Engine(target, lookup, cap=cap_policy(None, lookup.sources))
    parked = Engine(target, lookup, cap=FixedCaps({}))
    arms: dict[str, Callable[[], Iterator[int]]] = {
        "stock": lambda: stock(model, prompt, args.new),
        "plain": lambda: ours(plain, prompt, args.new),
        "lookup that misses": lambda: ours(missing, prompt, args.new),
        "parked": lambda: ours(parked, prompt, args.new),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    ids: dict[str, list[int]] = {}
    for trial in range(args.trials + 1):
        for name in arms if trial % 2 else reversed(arms):
            ids[name], elapsed = timed(arms[name]())
            if trial:
                seconds[name].append(elapsed)
    base = median(seconds["stock"])
    print(f"{mx.default_device()}, {args.layers} layers of {args.hidden}, {args.bits or 'no'} bits")
    print("| arm | tok/s | x stock | same ids |\n|---|---|---|---|")
    for name, times in seconds.items():
        rate = (args.new - 1) / median(times)
        print(f"| {name} | {rate:.1f} | {base / median(times):.3f} | {ids[name] == ids['stock']} |")
    curve = verify_curve(target, args.prompt, args.trials * 3)
    shape = ", ".join(f"{width}: {curve[width] / curve[1]:.2f}" for width in WIDTHS)
    print(f"verify by width, in plain steps of {1000 * curve[1]:.2f} ms: {shape}")


if __name__ == "__main__":
    main()
