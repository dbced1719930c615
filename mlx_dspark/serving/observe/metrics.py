"""`/metrics`: the figures of a server as JSON, or in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import time
from typing import Any

import mlx.core as mx
import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from mlx_dspark._version import __version__
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.observe.folds import Histogram

_PREFIX = "mlx_dspark_"


def metrics_json(host: Host) -> dict[str, Any]:
    """As JSON takes them; figures of a model are None where none is loaded."""
    answers, rounds, model = host.board.answers, host.board.rounds, host.model
    return {
        "model": None if model is None else model.session.name,
        "mode": None if model is None else model.session.mode,
        "uptime_seconds": round(time() - host.board.started_at, 3),
        "requests": answers.endings.total(),
        "endings": dict(answers.endings),
        "under_way": host.gate.under_way,
        "waiting": host.gate.waiting,
        "prompt_tokens": answers.prompt_tokens,
        "cached_tokens": answers.cached_tokens,
        "completion_tokens": answers.completion_tokens,
        "mean_accept_len": round(rounds.lengths.mean, 4),
        "mean_tokens_per_sec": round(answers.rates.mean, 3),
        "mean_decode_tokens_per_sec": round(answers.decode_rates.mean, 3),
        "mean_ttft_seconds": round(answers.first_token.mean, 6),
        "rounds": rounds.as_dict(),
        "batching": {
            "max_batch": None if model is None else model.engine.max_rows,
            "max_batch_seen": rounds.most_rows,
        },
        "events": {"subscribers": host.board.bus.subscribers, "dropped": host.board.bus.dropped},
        "memory": _memory(),
        "system": {"available_bytes": psutil.virtual_memory().available, "swap_bytes": _swapped()},
    }


def metrics_text(host: Host) -> bytes:
    """As Prometheus reads them (https://prometheus.io/docs/instrumenting/exposition_formats/)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(host))
    return generate_latest(registry)


def wants_json(accept: str) -> bool:
    """Whether an Accept header prefers JSON to text; without a preference text it is."""
    weights = {"json": 0.0, "text": 0.0}
    for part in accept.split(","):
        kind, *parameters = (each.strip().lower() for each in part.split(";"))
        weight = next((_weight(each[2:]) for each in parameters if each.startswith("q=")), 1.0)
        if kind in ("application/json", "application/*"):
            weights["json"] = max(weights["json"], weight)
        elif kind in ("text/plain", "text/*", "application/openmetrics-text"):
            weights["text"] = max(weights["text"], weight)
    return weights["json"] > weights["text"]


def _weight(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 0.0


def _memory() -> dict[str, int]:
    return {
        "active_bytes": mx.get_active_memory(),
        "peak_bytes": mx.get_peak_memory(),
        "cache_bytes": mx.get_cache_memory(),
        "process_bytes": psutil.Process().memory_info().rss,
    }


def _swapped() -> int | None:
    try:
        return psutil.swap_memory().used
    except (OSError, RuntimeError):
        return None


class _Collector:
    """Reads a host each time it is asked."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        yield from self._answers()
        yield from self._rounds()

    def _server(self) -> Iterator[Metric]:
        host, model = self._host, self._host.model
        info = GaugeMetricFamily(f"{_PREFIX}info", "The version, and the model that is loaded.", labels=_INFO)
        named = ("", "") if model is None else (model.session.name, model.session.mode)
        info.add_metric([__version__, *named], 1)
        yield info
        vitals = host.vitals()
        yield _gauge("up", "1 where requests are answered.", vitals.well and not host.closed)
        yield _gauge("loading", "1 while the model is being changed.", host.stage is not None)
        yield _gauge("silent_seconds", "How long the engine has owed somebody something.", vitals.silent)
        yield _gauge("requests_under_way", "Answers admitted and not over.", host.gate.under_way)
        yield _gauge("requests_waiting", "Those of them that wait for their turn.", host.gate.waiting)
        yield _gauge("max_batch", "Answers made at once.", 0 if model is None else model.engine.max_rows)
        yield _gauge("start_time_seconds", "When the server was started, unix time.", host.board.started_at)
        memory = GaugeMetricFamily(f"{_PREFIX}memory_bytes", "Memory by kind.", labels=["kind"])
        for name, size in _memory().items():
            memory.add_metric([name.removesuffix("_bytes")], size)
        yield memory
        bus = host.board.bus
        yield _gauge("event_subscribers", "Readers of /events.", bus.subscribers)
        yield _count("events_dropped", "Events that readers were too slow for.", {(): bus.dropped}, [])

    def _answers(self) -> Iterator[Metric]:
        answers = self._host.board.answers
        ended = {(ending,): n for ending, n in answers.endings.items()}
        yield _count("answers", "Answers that are over, by how they ended.", ended, ["ending"])
        yield _count("prompt_tokens", "Tokens of prompts.", {(): answers.prompt_tokens}, [])
        yield _count("cached_prompt_tokens", "Those not read again.", {(): answers.cached_tokens}, [])
        yield _count("completion_tokens", "Tokens of answers.", {(): answers.completion_tokens}, [])
        yield _histogram("answer_seconds", "From admission to the last token.", answers.seconds)
        yield _histogram("first_token_seconds", "From admission to the first token.", answers.first_token)

    def _rounds(self) -> Iterator[Metric]:
        rounds = self._host.board.rounds
        kinds = {(kind,): n for kind, n in rounds.kinds.items()}
        yield _count("rounds", "Rounds by kind, once for each answer in them.", kinds, ["kind"])
        for name, about, counts in (
            ("drafted_tokens", "Drafts that were verified.", rounds.drafted),
            ("accepted_tokens", "Drafts that the target agreed to.", rounds.accepted),
            ("verify_rounds", "Rounds that verified drafts.", rounds.sources),
        ):
            yield _count(name, about, {(source,): n for source, n in counts.items()}, ["source"])
        yield _count("committed_tokens", "Tokens that decoding rounds added.", {(): rounds.committed}, [])
        yield _histogram("accept_length", "Tokens committed by a round that verified drafts.", rounds.lengths)
        yield _histogram("round_seconds", "How long a decoding round took.", rounds.seconds)


_INFO = ["version", "model", "mode"]


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}{name}", about, value=float(value))


def _count(name: str, about: str, counts: Mapping[Any, float], labels: Iterable[str]) -> Metric:
    family = CounterMetricFamily(f"{_PREFIX}{name}", about, labels=list(labels))
    for values, n in counts.items():
        family.add_metric(list(values), n)
    return family


def _histogram(name: str, about: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(f"{_PREFIX}{name}", about, buckets=values.cumulated(), sum_value=values.sum)
