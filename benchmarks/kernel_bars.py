"""The bars of the kernels on a GPU, in pieces that take a minute or two each.

    python benchmarks/kernel_bars.py --only forward --bits 4 --json forward4.json
    python benchmarks/kernel_bars.py --only attention
    python benchmarks/kernel_bars.py --only pair pair8b

Kernels are those that a load of the model would use here: the first load tries them, which takes up to 90
seconds more and is remembered; `--no-wide-gemm` leaves out those that no piece here is about. MLX's own
modules run beside them in one process, by turns. A piece ends after `--seconds` of measuring, or at an
interrupt, with what it has; all of it is printed as JSON at the end.

forward    milliseconds of one forward by width after 512 tokens, Qwen3-8B's shape with random weights;
           `floor` is the time in which a copy reads and writes as many bytes as the weights have
attention  microseconds of one attention by queries, 32 heads over 8 of 128, 32,768 keys, or what `--keys`
           says; with `--geometries` of each geometry that the kernel knows for so many queries too, with its
           difference from MLX's own
pair       tokens/s of a pair beside plain decoding of stock mlx-lm; answers that differ, with the gap
pair8b     the same for Qwen3-8B's shape and a drafter that is right with a chance of 0.8 a draft
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.argument_types import at_least
from benchmarks.scripted_drafter import ScriptedDrafter
from benchmarks.shapes import model_of_shape
from benchmarks.sides import Sides, placed
from mlx_dspark.bench.cases import CONTENTS, shipped_prompts
from mlx_dspark.bench.gap import logit_gap
from mlx_dspark.bench.stock import stock_folder
from mlx_dspark.bench.verdict import first_difference
from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.contracts import Target
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.kernels.attention import stock_attention
from mlx_dspark.kernels.cuda_attention.attend import attend
from mlx_dspark.kernels.cuda_attention.geometry import Geometry, streaming
from mlx_dspark.kernels.framework.offer import Wanted
from mlx_dspark.session.calibrate import Insist, calibrated
from mlx_dspark.session.pair import load_parts
from mlx_dspark.targets.dense.target import DenseTarget

PIECES = ("forward", "attention", "pair", "pair8b")
FIRST = (1, 8, 16, 2, 4, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15)
"""Widths, those that bars name first."""
QUERIES = (1, 8, 2, 4, 16)
CHAIN = 100
REPEATS = 3
CAPS = (7, 3, 5)
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}
ACCEPTANCE = 0.8
CHUNK = 512
WARM = 24

Row = dict[str, Any]


class Run:
    """What is kept of a run, and when a piece has to end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []
        self.begin()

    def begin(self) -> None:
        self._until = perf_counter() + self.options.seconds

    @property
    def over(self) -> bool:
        return perf_counter() > self._until

    def row(self, piece: str, **facts: Any) -> Row:
        """A row of the result, which may be filled in later."""
        self.rows.append({"piece": piece, **facts})
        return self.rows[-1]

    def write(self) -> None:
        if self.options.json is not None:
            self.options.json.write_text(json.dumps(self.rows, indent=1))


def on_cuda() -> bool:
    return mx.cuda.is_available()


def tell(*words: object) -> None:
    print(*words, flush=True)


def shaped(run: Run, bits: int) -> tuple[DenseTarget, Sides]:
    """Qwen3-8B's shape with its kernels placed."""
    tiny, wanted = run.options.tiny, Wanted(wide_gemm=run.options.wide_gemm)
    model, config = model_of_shape("qwen3-8b", bits=bits, slim=tiny, **(TINY if tiny else {}))
    return placed(model, config, wanted, tell)


def ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one and other else None


# -- a whole forward ----------------------------------------------------------------------------------------


def forward(run: Run) -> None:
    for bits in run.options.bits:
        _forward(run, bits)
        mx.clear_cache()


def _forward(run: Run, bits: int) -> None:
    tiny = run.options.tiny
    target, sides = shaped(run, bits)
    run.begin()
    model: Any = target.model
    weights: Any = tree_flatten(model.parameters())
    read = sum(array.nbytes for name, array in weights if "embed_tokens" not in name)
    floor = 1e3 * read / copied_per_second(tiny)
    row = run.row("forward", bits=bits, floor_ms=round(floor, 3), kernels=str(target.kernels) or "no kernels")
    tell(f"forward {bits}b floor {floor:.2f} ms; {row['kernels']}; {sides.replaced} modules replaced")
    context = 16 if tiny else 512
    prompt = mx.ones((1, context), mx.int32)
    rows = target.new_rows()
    with rows.transaction(context) as transaction:
        mx.eval(target.forward(prompt, rows, logits=_last(context)).logits)
        transaction.commit([context])
    sides.use_stock()
    cache: list[Any] = make_prompt_cache(model)
    mx.eval(model(prompt, cache=cache))

    def ours(tokens: mx.array) -> None:
        with rows.transaction(tokens.shape[1]):
            logits = target.forward(tokens, rows).logits
            assert logits is not None
            mx.eval(mx.argmax(logits, axis=-1))

    def stock(tokens: mx.array) -> None:
        mx.eval(mx.argmax(model(tokens, cache=cache), axis=-1))
        for each in cache:
            each.trim(tokens.shape[1])

    calls = {"stock": (sides.use_stock, stock), "ours": (sides.use_ours, ours)}
    times: dict[str, dict[int, list[float]]] = {name: {} for name in calls}
    for turn, width in product(range(run.options.turns), FIRST):
        for name in calls if turn % 2 else reversed(calls):
            take, call = calls[name]
            take()
            tokens = mx.ones((1, width), mx.int32)
            for _ in range(REPEATS):
                call(tokens)
            times[name].setdefault(width, []).extend(_ms(call, tokens) for _ in range(REPEATS))
        _summary(row, times)
        if turn == 0:
            tell(f"  w{width:<2}", *(f"{name} {row[name + '_ms'][width]:.2f}" for name in calls))
        run.write()
        if run.over:
            break
    tell("  ours ", *(f"w{width}={ms:.2f}" for width, ms in sorted(row["ours_ms"].items())))
    tell("  stock", *(f"w{width}={ms:.2f}" for width, ms in sorted(row["stock_ms"].items())))
    tell("  bars ", json.dumps(row["bars"]))


def _last(context: int) -> mx.array:
    return mx.array([[context - 1]], mx.int32)


def _ms(call: Callable[[mx.array], None], tokens: mx.array) -> float:
    started = perf_counter()
    call(tokens)
    return 1e3 * (perf_counter() - started)


def _summary(row: Row, times: dict[str, dict[int, list[float]]]) -> None:
    ours, stock = ({w: round(median(each), 3) for w, each in times[n].items()} for n in ("ours", "stock"))
    row["ours_ms"], row["stock_ms"] = ours, stock
    worst = max((ms for width, ms in ours.items() if width > 1), default=None)
    row["bars"] = {
        "w8 over stock w1 (<= 0.8)": ratio(ours.get(8), stock.get(1)),
        "widest of w2-16 over w1 (<= 1.2)": ratio(worst, ours.get(1)),
        "w1 over stock w1 (< 1)": ratio(ours.get(1), stock.get(1)),
        "w1 over floor": ratio(ours.get(1), row["floor_ms"]),
        "w8 over floor": ratio(ours.get(8), row["floor_ms"]),
        "stock w8 over stock w1": ratio(stock.get(8), stock.get(1)),
    }


def copied_per_second(tiny: bool) -> float:
    """Bytes a second, read and written, of x + 1 on 2 GB."""
    x = mx.zeros((1 << (20 if tiny else 29),), mx.float32)
    mx.eval(x)
    best = 0.0
    for _ in range(6):
        started = perf_counter()
        mx.eval(x + 1)
        best = max(best, 2 * x.nbytes / (perf_counter() - started))
    return best


# -- attention ----------------------------------------------------------------------------------------------


def attention(run: Run) -> None:
    """One after another, each on what the last one made: a chain's time less that of half of it, so that
    neither the start nor the end of a chain counts."""
    for length in run.options.keys:
        run.begin()
        _attention(run, 64 if run.options.tiny else length)


def _attention(run: Run, length: int) -> None:
    dtype = mx.float32 if run.options.tiny else mx.bfloat16
    keys, values = (mx.random.normal((1, 8, length, 128), dtype=dtype) for _ in range(2))
    calls: dict[str, Callable[..., mx.array]] = {
        "ours": lambda q, mask: stock_attention(q, keys, values, 128**-0.5, mask, None),
        "stock": lambda q, mask: mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=128**-0.5, mask=mask
        ),
    }
    floor = 1e6 * (keys.nbytes + values.nbytes) / copied_per_second(run.options.tiny)
    row = run.row("attention", keys=length, floor_us=round(floor, 1))
    if run.options.geometries:
        _geometries(run, row, keys, values)
    times: dict[str, dict[int, list[float]]] = {name: {} for name in calls}
    for _, width in product(range(run.options.turns), QUERIES):
        queries = mx.random.normal((1, 32, width, 128), dtype=dtype)
        mx.eval(queries, keys, values)
        for name, call in calls.items():
            us, host = _chained_us(call, queries)
            times[name].setdefault(width, []).append(us)
            row.setdefault(f"{name}_host_us", {})[width] = host
            row[f"{name}_us"] = {width: round(median(found), 1) for width, found in times[name].items()}
        ours, stock = row["ours_us"], row["stock_us"]
        row["bars"] = {
            "8 over 1 (<= 1.3)": ratio(ours.get(8), ours.get(1)),
            "stock 8 over 1": ratio(stock.get(8), stock.get(1)),
            "8 over stock 8": ratio(ours.get(8), stock.get(8)),
            "8 over floor": ratio(ours.get(8), floor),
        }
        run.write()
        if run.over:
            break
    tell(f"attention of {length} keys, us: floor {row['floor_us']} ours {row['ours_us']}")
    tell(f"  stock {row['stock_us']}")
    tell(f"  of these the host's: ours {row['ours_host_us']} stock {row['stock_host_us']}")
    tell(f"  {json.dumps(row['bars'])}")


def _geometries(run: Run, row: Row, keys: mx.array, values: mx.array) -> None:
    """By turns, so that a device that gets slower does so for all."""
    calls: list[tuple[Row, mx.array, Callable[..., mx.array], list[float]]] = []
    for width in (each for each in QUERIES if each > 1):
        queries = mx.random.normal((1, 32, width, 128), dtype=keys.dtype)
        wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=128**-0.5, mask="causal")
        for geometry in streaming(128, 32 // 8 * width):

            def call(q: mx.array, mask: Any, geometry: Geometry = geometry) -> mx.array:
                return attend(q, keys, values, 128**-0.5, mask, None, geometry)

            away = mx.abs(call(queries, "causal") - wanted).max().item()
            calls.append(({"queries": width, "away": away, **geometry._asdict()}, queries, call, []))
    row["geometries"] = [found for found, *_ in calls]
    for _ in range(run.options.turns):
        for found, queries, call, times in calls:
            times.append(_chained_us(call, queries)[0])
            found["us"] = round(median(times), 1)
        run.write()
        if run.over:
            break
    for found, *_ in calls:
        tell("  ", *(f"{name} {value}" for name, value in found.items()))


def _chained_us(call: Callable[..., mx.array], queries: mx.array) -> tuple[float, float]:
    """A call of a chain, and what of it is the host's before anything runs."""
    _chain(call, queries, CHAIN)
    half, whole = _chain(call, queries, CHAIN), _chain(call, queries, 2 * CHAIN)
    return 1e6 * (whole[0] - half[0]) / CHAIN, round(1e6 * whole[1] / CHAIN / 2, 1)


def _chain(call: Callable[..., mx.array], queries: mx.array, times: int) -> tuple[float, float]:
    mask = "causal" if queries.shape[2] > 1 else None
    started = perf_counter()
    for _ in range(times):
        queries = call(queries, mask)
    built = perf_counter() - started
    mx.eval(queries)
    return perf_counter() - started, built


# -- end to end ---------------------------------------------------------------------------------------------


def pair(run: Run) -> None:
    from mlx_lm import load

    options = run.options
    named = {"model": options.model, "drafter": options.drafter, "wide_gemm": options.wide_gemm}
    parts = load_parts(LoadSettings.of({key: value for key, value in named.items() if value is not None}))
    with tempfile.TemporaryDirectory() as scratch:
        stock_model: Any = load(str(stock_folder(options.model, Path(scratch))))[0]
    if not options.tiny:
        parts = calibrated(parts, Insist.ONCE)
    session = parts.session(own_thread=False)
    engines = {"ours": session.engine, "ours plain": Engine(parts.target)}
    tell(f"pair {parts.name}; {str(parts.kernels or '') or 'no kernels'}")
    arms: dict[str, Arm] = {"stock": partial(stock_ids, stock_model)}
    for name, engine in engines.items():
        arms[name] = partial(our_ids, engine)
    prompts = {
        f"{content} {number}": list(encode_prompt(parts.tokenizer, text))
        for number in range(1 if options.tiny else 4)
        for content in (CONTENTS[:1] if options.tiny else CONTENTS)
        for text in shipped_prompts(content)[number : number + 1]
    }
    compare(run, run.row("pair", model=parts.name), arms, prompts, parts.target)


def pair8b(run: Run) -> None:
    for bits in run.options.bits:
        _pair8b(run, bits)
        mx.clear_cache()


def _pair8b(run: Run, bits: int) -> None:
    tiny, new = run.options.tiny, run.options.new
    target, sides = shaped(run, bits)
    run.begin()
    tell(f"pair8b {bits}b; {str(target.kernels) or 'no kernels'}")
    plain = Engine(target)
    prompt = np.random.default_rng(1).integers(target.spec.vocab, size=32 if tiny else CHUNK).tolist()
    drafter = ScriptedDrafter([*prompt, *timed(our_ids(plain, prompt, new))[0]], ACCEPTANCE)
    drafter.bind(target)

    def stock(ids: list[int], new: int) -> Iterator[Sequence[int]]:
        sides.use_stock()
        yield from stock_ids(target.model, ids, new)
        sides.use_ours()

    arms: dict[str, Arm] = {"stock": stock, "ours plain": partial(our_ids, plain)}
    for cap in CAPS:
        arms[f"cap {cap}"] = partial(our_ids, Engine(target, drafter, cap=FixedCaps({drafter.name: cap})))
    compare(run, run.row("pair8b", bits=bits), arms, {"random": prompt}, target)


Arm = Callable[[list[int], int], Iterable[Sequence[int]]]
"""From a prompt's ids and a number of tokens to that many, in the parts in which they come."""


def compare(run: Run, row: Row, arms: dict[str, Arm], prompts: dict[str, list[int]], target: Target) -> None:
    """Tokens a second after the first token, the best turn of each prompt, and whether ids are stock's."""
    new = run.options.new
    tokens, seconds, rounds = (dict.fromkeys(arms, 0.0) for _ in range(3))
    row.update(prompts=0, differ=[])
    for name, arm in arms.items():
        timed(arm(next(iter(prompts.values())), min(new, WARM)))
        tell("  warm", name)
    for label, ids in prompts.items():
        best: dict[str, tuple[list[int], float, int]] = {}
        for turn in range(2):
            for name in arms if turn else reversed(arms):
                found = timed(arms[name](ids, new))
                best[name] = min(found, best.get(name, found), key=lambda each: each[1])
        for name, (said, took, parts) in best.items():
            tokens[name] += len(said) - 1
            seconds[name] += took
            rounds[name] += parts
            parted = difference(target, ids, best["stock"][0], said)
            if parted is not None:
                row["differ"].append({"prompt": label, "arm": name, **parted})
        row["prompts"] += 1
        row["tokens_per_second"] = {name: round(tokens[name] / seconds[name], 1) for name in arms}
        row["of_stock"] = {
            name: ratio(rate, row["tokens_per_second"]["stock"])
            for name, rate in row["tokens_per_second"].items()
        }
        row["tokens_a_round"] = {name: round(tokens[name] / rounds[name], 2) for name in arms}
        run.write()
        tell(f"  {label}: {row['tokens_per_second']} of stock {row['of_stock']}")
        if run.over:
            break
    tell(f"  tokens a round {row['tokens_a_round']}; ids that differ: {row['differ'] or 'none'}")


def timed(parts: Iterable[Sequence[int]]) -> tuple[list[int], float, int]:
    """The ids, the seconds from their first part to the last, and how many parts came after the first."""
    ids: list[int] = []
    at: list[float] = []
    for part in parts:
        at.append(perf_counter())
        ids += part
    return ids, at[-1] - at[0], len(at) - 1


def stock_ids(model: nn.Module, ids: list[int], new: int) -> Iterator[Sequence[int]]:
    steps = generate_step(mx.array(ids), model, max_tokens=new, prefill_step_size=CHUNK)
    return ([int(token)] for token, _ in steps)


def our_ids(engine: Any, ids: list[int], new: int) -> Iterator[Sequence[int]]:
    for event in engine.stream(GenerateRequest(tuple(ids), new)):
        if isinstance(event, Committed):
            yield event.tokens


def difference(
    target: Target, prompt: Sequence[int], stock: Sequence[int], ours: Sequence[int]
) -> Row | None:
    """Where two answers part, and how far the target holds the two tokens apart; None where they are one."""
    at = first_difference(ours, stock)
    if at is None:
        return None
    if at >= min(len(ours), len(stock)):
        return {"at": at, "tie": False, "why": "one answer is shorter"}
    gap = logit_gap(target, [*prompt, *stock[:at]], stock[at], ours[at])
    return {
        "at": at,
        "tie": gap.tie,
        "gap": round(abs(gap.token_gap), 5),
        "rounding": round(gap.rounding, 5),
    }


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PIECES, default=PIECES)
    parser.add_argument("--bits", type=int, nargs="+", choices=(4, 8), default=[4, 8])
    parser.add_argument("--seconds", type=float, default=100.0, help="of a piece and number of bits or keys")
    parser.add_argument("--turns", type=at_least(1), default=5)
    parser.add_argument("--new", type=at_least(2), default=128, help="tokens of an answer")
    parser.add_argument("--keys", type=at_least(1), nargs="+", default=[32768], help="of `attention`")
    parser.add_argument("--geometries", action="store_true", help="of `attention`: each by itself")
    parser.add_argument("--model", help="of `pair`")
    parser.add_argument("--drafter", help="of `pair`")
    parser.add_argument("--no-wide-gemm", dest="wide_gemm", action="store_const", const=False)
    parser.add_argument("--tiny", action="store_true", help="to try the script anywhere: times say nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.keys != [32768] and "attention" not in options.only:
        parser.error("--keys is of `attention`")
    if options.geometries and ("attention" not in options.only or not on_cuda()):
        parser.error("--geometries is of `attention`, on CUDA")
    run = Run(options)
    pieces = {"forward": forward, "attention": attention, "pair": pair, "pair8b": pair8b}
    ended = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name in run.options.only:
            run.begin()
            pieces[name](run)
    except KeyboardInterrupt:
        tell("interrupted")
    finally:
        signal.signal(signal.SIGTERM, ended)
        run.write()
        tell(json.dumps(run.rows))
    return run.rows


if __name__ == "__main__":
    main()
