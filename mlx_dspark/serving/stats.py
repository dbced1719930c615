"""`x_mlx_dspark`: how the answers to one request came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_dspark.session.result import Result


def stats_of(
    results: Sequence[Result], ignored: Sequence[str] = (), prompts: Sequence[int] | None = None
) -> dict[str, Any]:
    """What is told of the answers to one request; of several there is a list, `choices`, besides.

    Counts are sums, with each prompt once: `prompts` has the tokens of each, None where there is one. Times
    and rates are those of the first answer; `ignored` names what was not heeded.
    """
    lengths = [length for result in results for length in result.accept_lengths]
    first = results[0]
    told = _timed(first) | {
        "prompt_tokens": first.prompt_tokens if prompts is None else sum(prompts),
        "context_tokens": max(result.prompt_tokens + result.num_tokens for result in results),
        "accept_len": round(sum(lengths) / len(lengths), 3) if lengths else 0.0,
        "completion_tokens": sum(result.num_tokens for result in results),
        "cached_tokens": sum(result.reused_tokens for result in results),
        **{name: sum(getattr(result, name) for result in results) for name in _SUMS},
        "target_forwards": sum(result.num_rounds for result in results),
        "lookup_rounds": sum(map(_lookup_rounds, results)),
        "cap": max(result.cap for result in results),
        "context_full": any(result.context_full for result in results),
        "troubles": list(dict.fromkeys(trouble for result in results for trouble in result.troubles)),
        "ignored": list(ignored),
    }
    if len(results) > 1:
        told["choices"] = [stats_of([result]) for result in results]
    return told


_SUMS = ("drafted", "accepted", "parked_rounds")


def _lookup_rounds(result: Result) -> int:
    return sum(count.rounds for name, count in result.sources.items() if name.startswith("lookup"))


def _timed(result: Result) -> dict[str, Any]:
    told: dict[str, Any] = {
        "mode": result.mode,
        "tokens_per_sec": round(result.tokens_per_sec, 3),
        "decode_tokens_per_sec": round(result.decode_tokens_per_sec, 3),
        "prefill_seconds": round(result.prefill_seconds, 6),
        "decode_seconds": round(max(0.0, result.seconds - result.prefill_seconds), 6),
        "ttft_seconds": round(result.ttft_seconds, 6),
        "observed_speedup": result.observed_speedup,
        "predicted_speedup": result.predicted_speedup,
    }
    if result.prompt_tokens - result.reused_tokens >= 16:
        told["prefill_tokens_per_sec"] = round(result.prefill_tokens_per_sec, 3)
    return told
