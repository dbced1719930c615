"""The acceptance guard of a loaded pair: of what `benchmark` measured, and of answers of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mlx_dspark.bench.guard import GuardVerdict, Sample, judge_acceptance
from mlx_dspark.foundation.bench_settings import BASELINE, BenchmarkSettings

if TYPE_CHECKING:
    from mlx_dspark.bench.suite import Measurement
    from mlx_dspark.bench.summary import Line
    from mlx_dspark.foundation.settings import LoadSettings
    from mlx_dspark.session.pair import Parts

CONTENTS = ("chat", "code", "math")
PROMPTS, TOKENS = 3, 96


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

    Parts without a registered drafter are `unknown`.
    """
    from mlx_dspark.bench.arms import OwnArm
    from mlx_dspark.bench.cases import cases_of, shipped_prompts
    from mlx_dspark.bench.suite import Measurement
    from mlx_dspark.foundation.lists import Drafting

    if parts.pair is None or parts.drafter is None or not parts.pair.expectations(parts.mode):
        return GuardVerdict("unknown")
    settings = BenchmarkSettings(max_new_tokens=TOKENS)
    contents = {content: shipped_prompts(content)[:PROMPTS] for content in CONTENTS}
    cases = cases_of(settings, contents, parts.tokenizer, parts.target.spec.context)
    arm = OwnArm(parts, loading, Drafting(parts.mode, 0))
    found = Measurement([arm.label], cases, 1)
    for i, case in enumerate(cases):
        tell(f"checking acceptance on {case.name}", i / len(cases))
        found.turns[i, 0] = [arm.answer(case, 0)]
    return guard_measured(parts, found).get(arm.label, GuardVerdict("unknown"))


def gains(lines: list[Line], parts: Parts) -> Mapping[str, float]:
    """By mode, the geometric mean over contents of what its derived cap gained over plain decoding."""
    from statistics import geometric_mean

    found: dict[str, list[float]] = {}
    for line in lines:
        if line.arm in (parts.mode, "lookup") and line.arm != BASELINE and line.against_plain is not None:
            found.setdefault(line.arm, []).append(line.against_plain.median)
    return {mode: geometric_mean(each) for mode, each in found.items()}
