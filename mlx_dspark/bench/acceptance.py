"""The acceptance guard of a loaded pair: of what `benchmark` measured, and of answers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_dspark.bench.guard import GuardVerdict, Sample, judge_acceptance
from mlx_dspark.foundation.bench_settings import BASELINE, BenchmarkSettings

if TYPE_CHECKING:
    from mlx_dspark.bench.suite import Measurement
    from mlx_dspark.bench.summary import Line
    from mlx_dspark.foundation.settings import LoadSettings
    from mlx_dspark.session.pair import Parts

CONTENTS = ("chat", "code", "math")
PROMPTS, TOKENS = 8, 96
"""Of each content, and in each answer."""


def guard_measured(parts: Parts, found: Measurement) -> dict[str, GuardVerdict]:
    """By arm that the pair's drafter drafted in, the verdict over its greedy answers to prompts alone."""
    if parts.pair is None:
        return {}
    expected = parts.pair.expectations(parts.mode)
    verdicts: dict[str, GuardVerdict] = {}
    for arm, label in enumerate(found.arms):
        samples = [
            Sample(case.group, tuple(one for one in taken[0].answers[0].rounds if one.source == parts.mode))
            for i, case in enumerate(found.cases)
            if case.rows == 1 and case.temperature == 0 and (taken := found.taken(i, arm))
        ]
        verdict = judge_acceptance(samples, expected)
        if verdict.kind != "unknown":
            verdicts[label] = verdict
    return verdicts


def guard_now(
    parts: Parts, loading: LoadSettings, tell: Callable[[str, float | None], None] = lambda *_: None
) -> GuardVerdict:
    """Greedy answers to shipped prompts in whole blocks, the drafter alone, and the verdict over them.

    The prompts of a content are answered together. Parts without a registered drafter are `unknown`. Raises
    UsageError where the model's context is too short for them.
    """
    if parts.pair is None or parts.drafter is None or not parts.pair.expectations(parts.mode):
        return GuardVerdict("unknown")
    samples: list[Sample] = []
    for i, content in enumerate(CONTENTS):
        tell(f"checking acceptance on {content}", i / len(CONTENTS))
        samples += samples_of(parts, loading, content, range(PROMPTS))
    return judge_acceptance(samples, parts.pair.expectations(parts.mode))


def samples_of(parts: Parts, loading: LoadSettings, content: str, numbers: Iterable[int]) -> list[Sample]:
    """What the drafter alone, in whole blocks, achieves on these of the shipped prompts of a content."""
    from mlx_dspark.bench.arms import OwnArm
    from mlx_dspark.bench.cases import Case, cases_of, shipped_prompts
    from mlx_dspark.foundation.lists import Drafting
    from mlx_dspark.session.calibrate import parts_of

    settings, prompts = BenchmarkSettings(max_new_tokens=TOKENS), shipped_prompts(content)
    chosen = {content: [prompts[number] for number in numbers]}
    cases = cases_of(settings, chosen, parts.tokenizer, parts.target.spec.context)
    alone = replace(parts, drafter=parts_of(parts.drafter)[-1])
    arm = OwnArm(alone, loading, Drafting(parts.mode, 0))
    together = Case(content, content, tuple(case.prompts[0] for case in cases), TOKENS)
    return [Sample(content, answer.rounds) for answer in arm.answer(together, 0).answers]


def gains(lines: list[Line], parts: Parts) -> Mapping[str, float]:
    """By mode, the geometric mean over contents of what its derived cap gained over plain decoding."""
    from statistics import geometric_mean

    found: dict[str, list[float]] = {}
    for line in lines:
        if line.arm in (parts.mode, "lookup") and line.arm != BASELINE and line.against_plain is not None:
            found.setdefault(line.arm, []).append(line.against_plain.median)
    return {mode: geometric_mean(each) for mode, each in found.items()}
