"""Accept length by content and position, the drafter drafting whole blocks.

    python benchmarks/accept_length.py                              # the default model and its drafter
    python benchmarks/accept_length.py FILE.jsonl... --prompts 40 --new 200 --json out.json
    python benchmarks/accept_length.py --model FOLDER --drafter FOLDER --temperatures 0

A FILE holds JSON lines with `prompt`, `messages`, `turns` or `text`; its name is the content's. Many prompts
are answered at once, without a seed, up to --new tokens or the end of sequence. Lookup takes no part.

Accept length is the mean, over all rounds that verified a draft, of the tokens the round committed: the
accepted drafts and the target's own token after them. The first token of an answer comes from reading the
prompt, so it is in no such round. The last round of an answer counts with what was kept: drafts are cut to
the tokens that are still wanted, and an end of sequence drops what follows it. A round with no room for a
draft verifies none and does not count. A position's figure is the share of the rounds that accepted at least
that many drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from mlx_dspark.bench.cases import SHIPPED
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import Parts, load_parts
from mlx_dspark.train.evaluate import Accepted, evaluate
from mlx_dspark.train.prompts import encode, read_prompts

PROMPTS = [SHIPPED / f"{content}.jsonl" for content in ("chat", "code", "math")]


def mean_of(accepted: Sequence[Accepted]) -> Accepted:
    """All contents as one, every round counting the same."""
    rounds = sum(each.rounds for each in accepted)
    columns = zip(*(tuple(share * each.rounds for share in each.reached) for each in accepted), strict=True)
    reached = tuple(sum(column) / rounds if rounds else 0.0 for column in columns)
    tokens, prompts = sum(each.tokens for each in accepted), sum(each.prompts for each in accepted)
    return Accepted("all rounds", accepted[0].temperature, prompts, rounds, tokens, reached)


def measured(parts: Parts, args: argparse.Namespace) -> list[Accepted]:
    assert isinstance(parts.drafter, BlockDrafter)
    contents = {
        path.stem: [encode(parts.tokenizer, prompt) for prompt in read_prompts(path)[: args.prompts]]
        for path in args.files
    }
    rows: list[Accepted] = []
    for temperature in args.temperatures:
        evaluation = evaluate(
            parts.target,
            parts.drafter,
            contents,
            end_ids=parts.end_ids,
            tokens=args.new,
            temperatures=(temperature,),
            timed=0,
        )
        rows += [*evaluation.accepted, mean_of(evaluation.accepted)]
    return rows


def show(rows: Sequence[Accepted]) -> None:
    width = max(len(row.reached) for row in rows)
    heads = ["content", "temperature", "prompts", "rounds", "accept length", *map(str, range(1, width + 1))]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        figures = [
            row.content,
            f"{row.temperature:g}",
            str(row.prompts),
            str(row.rounds),
            f"{row.length:.3f}",
        ]
        print(f"| {' | '.join(figures + [f'{share:.2f}' for share in row.reached])} |")
    contents = [row for row in rows if row.content != "all rounds"]
    for temperature in dict.fromkeys(row.temperature for row in contents):
        lengths = [row.length for row in contents if row.temperature == temperature]
        print(f"mean of the contents at temperature {temperature:g}: {sum(lengths) / len(lengths):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=PROMPTS, metavar="FILE")
    parser.add_argument("--model")
    parser.add_argument("--drafter", help="default: the one shipped with the model")
    parser.add_argument("--prompts", type=int, default=40, help="the first so many of each file (default 40)")
    parser.add_argument("--new", type=int, default=200, help="most tokens in an answer (default 200)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="default 0 and 1")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    wanted = {"model": args.model, "drafter": args.drafter, "mode": "dspark", "lookup_drafts": False}
    try:
        parts = load_parts(LoadSettings.of({k: v for k, v in wanted.items() if v is not None}))
        started = perf_counter()
        rows = measured(parts, args)
    except DsparkError as error:
        raise SystemExit(str(error)) from error
    print(f"{parts.name} on {mx.default_device()}, {perf_counter() - started:.0f} s")
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([{**vars(row), "length": row.length} for row in rows], indent=1))


if __name__ == "__main__":
    main()
