"""Stock mlx-lm in a process of its own: model folders in, token ids and times out.

    python -m mlx_dspark.bench.stock_worker MODEL [DRAFT_MODEL]

Reads a JSON object a line: `ids`, `new`, `end_ids`, `temperature`, `seed`, `chunk` (prompt tokens read at
once), `kv_bits` and `draft` (whether the draft model drafts). Answers with `tokens`, the ending one included,
`prefill_seconds`, `decode_seconds`, which run from the first token to the last, `peak_bytes` and
`used_bytes`. Of this package only the watching of memory runs here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler

from mlx_dspark.bench.memory import PeakMemory


def generated(model: Any, draft_model: Any, task: dict[str, Any]) -> Iterator[int]:
    """The tokens of a task as mlx-lm generates them."""
    common: dict[str, Any] = {
        "max_tokens": task["new"],
        "sampler": make_sampler(temp=task["temperature"]),
        "prefill_step_size": task["chunk"],
        "kv_bits": task["kv_bits"],
        "quantized_kv_start": 0,
    }
    prompt = mx.array(task["ids"])
    if task["draft"]:
        steps: Iterator[Any] = speculative_generate_step(prompt, model, draft_model, **common)
    else:
        steps = generate_step(prompt, model, **common)
    return (int(step[0]) for step in steps)


def answer(model: Any, draft_model: Any, task: dict[str, Any]) -> dict[str, Any]:
    mx.random.seed(task["seed"])
    memory = PeakMemory()
    ends = set(task["end_ids"])
    tokens: list[int] = []
    started = first = last = perf_counter()
    for token in generated(model, draft_model, task):
        tokens.append(token)
        last = perf_counter()
        first = last if len(tokens) == 1 else first
        if token in ends:
            break
    held = memory.read()
    return {
        "tokens": tokens,
        "prefill_seconds": first - started,
        "decode_seconds": last - first,
        **held,
    }


def main() -> None:
    model, draft_model = [*(mlx_lm.load(folder)[0] for folder in sys.argv[1:]), None][:2]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(model, draft_model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
