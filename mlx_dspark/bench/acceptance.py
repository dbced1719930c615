"""The acceptance guard of a loaded pair: of what `benchmark` measured, and of answers of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlx_dspark.bench.guard import GuardVerdict, Sample, judge_acceptance
from mlx_dspark.bench.stats import VerifyRound
from mlx_dspark.catalog.pair_row import Expected
from mlx_dspark.foundation.bench_settings import BASELINE, BenchmarkSettings

if TYPE_CHECKING:
    from mlx_dspark.bench.suite import Measurement
    from mlx_dspark.bench.summary import Line
    from mlx_dspark.foundation.settings import LoadSettings
    from mlx_dspark.session.pair import Parts

CONTENTS = ("chat", "code", "math")
PROMPTS, TOKENS = 8, 96
"""Of each content, and in each answer."""


@dataclass(frozen=True)
class Guarded:
    """What one run says: the `verdict` against the row, and what was `found`, by content.

    `before` is the verdict against what was remembered of this pair on this machine, None for nothing.
    """

    verdict: GuardVerdict
    found: tuple[Expected, ...] = ()
    before: GuardVerdict | None = None


def guard_measured(
    parts: Parts, found: Measurement, expected: Mapping[str, Expected]
) -> dict[str, GuardVerdict]:
    """By arm that the pair's drafter drafted in, the verdict over its greedy answers to prompts alone."""
    if not expected:
        return {}
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
) -> Guarded:
    """Greedy answers to shipped prompts in whole blocks, the drafter alone, and the verdicts over them.

    The prompts of a content are answered together. Parts without a registered drafter are `unknown`. Raises
    UsageError where the model's context is too short for them.
    """
    if parts.pair is None or parts.drafter is None:
        return Guarded(GuardVerdict("unknown"))
    samples: list[Sample] = []
    for i, content in enumerate(CONTENTS):
        tell(f"checking acceptance on {content}", i / len(CONTENTS))
        samples += samples_of(parts, loading, content, range(PROMPTS))
    remembered = expected_here(parts)
    before = judge_acceptance(samples, remembered) if remembered else None
    verdict = judge_acceptance(samples, parts.pair.expectations(parts.mode))
    return Guarded(verdict, accepted(samples, parts.mode), before)


def expected_here(parts: Parts) -> Mapping[str, Expected]:
    """By content, what `doctor --pair` found of this pair on this machine before; empty for nothing."""
    from mlx_dspark.foundation.paths import default_cache_dir
    from mlx_dspark.session.measured_acceptance import measured_acceptance

    drafter = "" if parts.pair is None else parts.pair.drafters.get(parts.mode, "")
    if not drafter:
        return {}
    found = measured_acceptance(default_cache_dir(), parts.fingerprint, drafter, parts.mode)
    return {each.content: each for each in found}


def accepted(samples: Iterable[Sample], mode: str) -> tuple[Expected, ...]:
    """What samples come to, by content: of the rounds that drafted so many, the share that accepted them."""
    found = []
    contents: dict[str, list[VerifyRound]] = {}
    for sample in samples:
        contents.setdefault(sample.content, []).extend(sample.rounds)
    for content, rounds in contents.items():
        reached: list[float] = []
        for depth in range(1, max((each.drafted for each in rounds), default=0) + 1):
            deep = [each.committed > depth for each in rounds if each.drafted >= depth]
            reached.append(min(*reached[-1:], sum(deep) / len(deep), 1.0))
        if reached:
            found.append(Expected(mode, content, len(reached), 1 + sum(reached), tuple(reached)))
    return tuple(found)


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
