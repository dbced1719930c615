"""Stock mlx-lm in a process of its own: a model folder in, greedy token ids and times out.

Reads one JSON object a line, {"ids": [...], "new": n}; answers with tokens, prefill_seconds, decode_seconds.
Decode time runs from the first token to the last.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step


def answer(model: object, ids: list[int], new: int) -> dict:
    started = first = last = perf_counter()
    tokens: list[int] = []
    for token, _ in generate_step(mx.array(ids), model, max_tokens=new):  # type: ignore[arg-type]
        tokens.append(int(token))
        last = perf_counter()
        if len(tokens) == 1:
            first = last
    return {"tokens": tokens, "prefill_seconds": first - started, "decode_seconds": last - first}


def main() -> None:
    model = mlx_lm.load(sys.argv[1])[0]
    answer(model, [1, 2, 3, 4, 5, 6, 7, 8], 4)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(answer(model, task["ids"], task["new"])), flush=True)


if __name__ == "__main__":
    main()
