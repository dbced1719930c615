"""Many clients with random drops on one engine, for as long as asked: nothing leaks, hangs or mixes.

    python benchmarks/soak.py                        # 16 clients for 5 minutes, the default model
    python benchmarks/soak.py --seconds 60 --clients 8 --model FOLDER
    python -m benchmarks.soak --tiny gemma3_text     # a tiny random model of a family, with a DSpark drafter

Every client asks at random one of a few requests (greedy, drawn, penalised) and reads it whole, cancels it,
closes it, drops it half-way, or has a stop check that raises. What it read must be the beginning of what the
request gets alone. Where greedy ids part, the model is asked how far its two likeliest tokens are apart
there: a batch may break ties otherwise than a row alone. Drawn ids are compared only where no drafter draws.

Ends with an error when an event does not come within a minute, when ids differ, or when rows, memory or
threads are left over.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Any

import mlx.core as mx
import psutil

from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.contracts import Drafter, Target
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.caps import MaxDraft, cap_policy
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.engine.stream import Stream
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.events import Committed, Trouble
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.pair import load_parts
from mlx_dspark.targets.load import target_of

DEADLINE = 60.0
TIE = 2e-3
SAMPLERS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=2),
    SamplingParams(repetition_penalty=1.2),
)
TEXTS = (
    "Count from one to twenty.",
    "Name five rivers, five towns and five rivers again.",
    "Say hello. " * 20,
)
FATES = ("read", "read", "read", "cancel", "close", "drop", "raise")


class Broken(Exception):
    """What a stop check raises on purpose."""


@dataclass
class Subject:
    """What is under test, and what is asked of it."""

    target: Target
    drafter: Drafter | None
    max_draft: MaxDraft
    prompts: Sequence[tuple[int, ...]]
    new: int
    alone: list[list[int]] = field(default_factory=list)

    @property
    def requests(self) -> list[GenerateRequest]:
        return [
            GenerateRequest(prompt, self.new, sampling) for prompt in self.prompts for sampling in SAMPLERS
        ]

    @property
    def draws(self) -> bool:
        """Whether a drafter draws its drafts, so that drawn ids depend on their number."""
        return self.drafter is not None and any(not s.sporadic for s in self.drafter.sources)


@dataclass(frozen=True)
class Difference:
    """Where a request's ids left those of its solo run."""

    which: int
    at: int


@dataclass
class Seen:
    """What one client saw."""

    fates: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    at: float = field(default_factory=monotonic)

    def read(self, stream: Stream, most: int = sys.maxsize) -> list[int]:
        """The tokens of the next `most` events, or of all."""
        tokens: list[int] = []
        for _ in range(most):
            try:
                event = stream.next(DEADLINE)
            except StopIteration:
                break
            self.at = monotonic()
            if isinstance(event, Committed):
                tokens += event.tokens
                self.counts["tokens"] += len(event.tokens)
                self.counts["accepted"] += event.report.accepted
                self.counts["in company"] += event.report.rows > 1
                self.counts["drafted in company"] += event.report.drafted > 0 and event.report.rows > 1
            self.counts["troubles"] += isinstance(event, Trouble)
        return tokens


def client(engine: Scheduler, subject: Subject, number: int, until: float, seen: Seen) -> None:
    """Ask, and read or not, until the time is up."""
    rng, requests = random.Random(number), subject.requests
    while monotonic() < until:
        which, fate = rng.randrange(len(requests)), rng.choice(FATES)
        tokens = once(engine, requests[which], fate, rng.randrange(12), seen)
        seen.fates[fate] += 1
        if subject.draws and not requests[which].sampling.greedy:
            continue
        expected = subject.alone[which]
        expected = expected if fate == "read" else expected[: len(tokens)]
        if tokens != expected:
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), -1)
            seen.differences.append(Difference(which, at))


def once(engine: Scheduler, request: GenerateRequest, fate: str, most: int, seen: Seen) -> list[int]:
    """One request, and what was read of it."""
    if fate == "raise":
        left = iter(range(most))

        def check(token: int) -> bool:
            if next(left, None) is None:
                raise Broken
            return False

        try:
            seen.read(engine.submit(replace(request, stop_check=check)))
        except Broken:
            return []
        raise AssertionError("a stop check raised, and its request did not")
    stream = engine.submit(request)
    tokens = seen.read(stream, sys.maxsize if fate == "read" else most)
    if fate == "cancel":
        stream.cancel()
        tokens += seen.read(stream)
    elif fate == "close":
        stream.close()
    return tokens


@dataclass(frozen=True)
class Memory:
    """Megabytes, and threads of the operating system."""

    resident: float
    active: float
    cached: float
    threads: int

    @classmethod
    def now(cls) -> Memory:
        process = psutil.Process()
        resident = process.memory_info().rss / 1e6
        return cls(resident, mx.get_active_memory() / 1e6, mx.get_cache_memory() / 1e6, process.num_threads())


def watched(jobs: list[Future[None]], clients: list[Seen]) -> list[Memory]:
    """Samples of memory until all clients are done; ends the program where one hears nothing for long."""
    samples: list[Memory] = []
    while not all(job.done() for job in jobs):
        sleep(1.0)
        samples.append(Memory.now())
        unheard = [monotonic() - each.at for each, job in zip(clients, jobs, strict=True) if not job.done()]
        longest = max(unheard, default=0.0)
        if longest > 2 * DEADLINE:
            faulthandler.dump_traceback(all_threads=True)
            sys.exit(f"a client has heard nothing for {longest:.0f} s")
    return samples


def soak(subject: Subject, seconds: float, clients: int, rows: int) -> bool:
    """Whether all went well."""
    drafter = subject.drafter
    cap = cap_policy(subject.max_draft, drafter.sources if drafter is not None else ())
    with Scheduler(subject.target, drafter, cap=cap, max_rows=rows, prefill_chunk=64) as engine:
        subject.alone = [Seen().read(engine.submit(request)) for request in subject.requests]
        assert engine.wait(DEADLINE)
        before, until = Memory.now(), monotonic() + seconds
        seen = [Seen() for _ in range(clients)]
        with ThreadPoolExecutor(clients) as pool:
            jobs = [pool.submit(client, engine, subject, n, until, seen[n]) for n in range(clients)]
            samples = watched(jobs, seen)
        for job in jobs:
            job.result()
        idle = engine.wait(DEADLINE)
        mx.clear_cache()
        after = Memory.now()
    tell(seen, [before, *samples, after], seconds)
    differences = set(explained(subject, [each for one in seen for each in one.differences]))
    for difference in differences:
        print(f"request {difference.which} differs from its solo run at token {difference.at}")
    leak = after.active > before.active + 1
    if not idle or leak:
        print("rows or memory are left over")
    return idle and not leak and not differences


def tell(seen: Sequence[Seen], samples: Sequence[Memory], seconds: float) -> None:
    """What happened, and memory at five moments."""
    fates, counts = Counter[str](), Counter[str]()
    for each in seen:
        fates += each.fates
        counts += each.counts
    print(f"{fates.total()} requests: {dict(fates)}")
    print(f"{counts['tokens'] / seconds:.0f} tokens/s read; {dict(counts)}")
    last = len(samples) - 1
    for share in (0, 0.25, 0.5, 0.75, 1):
        m = samples[round(share * last)]
        print(
            f"at {share:4.0%}: resident {m.resident:.0f} MB, active {m.active:.2f} MB, "
            f"cached {m.cached:.1f} MB, {m.threads} threads"
        )


def explained(subject: Subject, differences: Sequence[Difference]) -> Iterator[Difference]:
    """The differences that no tie explains."""
    engine = Engine(subject.target)
    for difference in set(differences):
        request = subject.requests[difference.which]
        prefix = subject.alone[difference.which][: max(0, difference.at)]
        asked = GenerateRequest((*request.prompt, *prefix), 1, replace(request.sampling, logprobs=2))
        best = next(p.top for e in engine.stream(asked) if isinstance(e, Committed) for p in e.logprobs)
        gap = best[0][1] - best[1][1]
        print(f"request {difference.which}, token {difference.at}: the likeliest two are {gap:.5f} apart")
        if not request.sampling.greedy or gap >= TIE:
            yield difference


def loaded(arguments: argparse.Namespace) -> Subject:
    """A real model with what drafts for it."""
    parts = load_parts(LoadSettings.of({"model": arguments.model, "mode": arguments.mode}))
    prompts = [tuple(encode_prompt(parts.tokenizer, text)) for text in TEXTS]
    return Subject(parts.target, parts.drafter, parts.max_draft, prompts, arguments.new)


def tiny(family: str, folder: Path, new: int) -> Subject:
    """A tiny random model, lookup, and a random DSpark drafter that now and then is right."""
    from tests import tiny as models
    from tests.tiny_drafters import save_tiny_dspark
    from tests.tiny_hybrids import HYBRIDS, hybrid_config, tiny_hybrid

    config: dict[str, Any]
    if family in HYBRIDS:
        model, config = tiny_hybrid(family, seed=1), hybrid_config(family)
    else:
        model, config = models.tiny_family(family, seed=1), models.tiny_config(family)
    target = target_of(model, config, context=512)
    lookup = LookupDrafter(min_n=1, max_n=3)
    spec = target.spec
    save_tiny_dspark(folder, hidden=spec.hidden, vocab=spec.vocab, target_layers=spec.layers, taps=(0, 1))
    drafter = FirstHit([lookup, load_drafter(folder)])
    drafter.bind(target)
    prompts = [(5,), tuple(range(7, 20)), tuple(range(30, 60)) * 3, (41, 42, 43, 41, 42, 43, 41, 42)]
    return Subject(target, drafter, 3, prompts, new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--tiny", metavar="FAMILY")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=24)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        subject = tiny(arguments.tiny, Path(folder), arguments.new) if arguments.tiny else loaded(arguments)
        well = soak(subject, arguments.seconds, arguments.clients, arguments.rows)
    if not well:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except DsparkError as error:
        raise SystemExit(str(error)) from error
