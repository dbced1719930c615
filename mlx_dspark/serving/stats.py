"""`x_mlx_dspark`: how the answers to one request came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_dspark.session.result import Result


def stats_of(results: Sequence[Result], ignored: Sequence[str] = ()) -> dict[str, Any]:
    """What is told of the answers to one request; of several there is a list, `choices`, besides.

    Counts are sums, rates and times those of the first; `ignored` names what the protocol does not know.
    """
    lengths = [length for result in results for length in result.accept_lengths]
    first = results[0]
    told = _timed(first) | {
        "accept_len": round(sum(lengths) / len(lengths), 3) if lengths else 0.0,
        "completion_tokens": sum(result.num_tokens for result in results),
        "cached_tokens": sum(result.reused_tokens for result in results),
        **{name: sum(getattr(result, name) for result in results) for name in _SUMS},
        "target_forwards": sum(result.num_rounds for result in results),
        "cap": max(result.cap for result in results),
        "ignored": list(ignored),
    }
    if len(results) > 1:
        told["choices"] = [stats_of([result]) for result in results]
    return told


_SUMS = ("drafted", "accepted", "parked_rounds")


def _timed(result: Result) -> dict[str, Any]:
    fresh = result.prompt_tokens - result.reused_tokens
    told: dict[str, Any] = {
        "mode": result.mode,
        "prompt_tokens": result.prompt_tokens,
        "context_tokens": result.prompt_tokens + result.num_tokens,
        "tokens_per_sec": round(result.tokens_per_sec, 3),
        "decode_tokens_per_sec": round(result.decode_tokens_per_sec, 3),
        "prefill_seconds": round(result.prefill_seconds, 6),
        "decode_seconds": round(max(0.0, result.seconds - result.prefill_seconds), 6),
        "ttft_seconds": round(result.ttft_seconds, 6),
        "lookup_rounds": sum(
            count.rounds for name, count in result.sources.items() if name.startswith("lookup")
        ),
        "observed_speedup": result.observed_speedup,
        "predicted_speedup": result.predicted_speedup,
        "context_full": result.context_full,
        "troubles": list(result.troubles),
    }
    if fresh >= 16:
        told["prefill_tokens_per_sec"] = round(result.prefill_tokens_per_sec, 3)
    return told
