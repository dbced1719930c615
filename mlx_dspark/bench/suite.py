"""Runs arms on cases by turns and keeps what each turn took. Whatever was measured outlives an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlx_dspark.bench.arms import Arm, Measured
from mlx_dspark.bench.cases import Case
from mlx_dspark.bench.order import turns
from mlx_dspark.bench.verdict import Gap, Verdict, compared

WARM_UP_TOKENS = 32

Tell = Callable[[str, float | None], None]
AskGap = Callable[[Sequence[int], int, int], Gap]
"""The gap after some tokens between an expected token and another: `gap.logit_gap`, with a target."""


@dataclass
class Measurement:
    """What was measured: by case and arm, both as indices, the turns taken, in order of trials.

    `reasons`: by arm, why its text may differ with no fault of anybody's, where there is a reason.
    """

    arms: Sequence[str]
    cases: Sequence[Case]
    trials: int
    turns: dict[tuple[int, int], list[Measured]] = field(default_factory=dict)
    interrupted: bool = False
    reasons: Mapping[int, str] = field(default_factory=dict)

    def taken(self, case: int, arm: int) -> Sequence[Measured]:
        return self.turns.get((case, arm), ())


def measure(
    arms: Sequence[Arm], cases: Sequence[Case], *, trials: int, seed: int, tell: Tell = lambda *_: None
) -> Measurement:
    """Warm up every arm, then let all take their turns. An interrupt ends it, and what is measured stays."""
    reasons = {i: arm.reason for i, arm in enumerate(arms) if arm.reason}
    found = Measurement([arm.label for arm in arms], cases, trials, reasons=reasons)
    taking_part = [[i for i, arm in enumerate(arms) if arm.takes(case)] for case in cases]
    total = trials * sum(map(len, taking_part))
    try:
        warm_up(arms, cases, tell)
        for done, turn in enumerate(turns(len(arms), taking_part, trials, seed)):
            case = cases[turn.case]
            left = "1 turn" if total - done == 1 else f"{total - done} turns"
            tell(f"{case.name}, {arms[turn.arm].label}, {left} to go", done / total)
            drawn = seed + 1000 * turn.trial + turn.case
            taken = arms[turn.arm].answer(case, drawn)
            found.turns.setdefault((turn.case, turn.arm), []).append(taken)
    except KeyboardInterrupt:
        found.interrupted = True
    return found


def warm_up(arms: Sequence[Arm], cases: Sequence[Case], tell: Tell) -> None:
    """A short answer of every arm to the first case of each number of rows and each temperature."""
    kinds = {(case.rows, case.temperature): case for case in reversed(cases)}
    for case in kinds.values():
        for arm in arms:
            if arm.takes(case):
                tell(f"warming up {arm.label}", None)
                arm.answer(replace(case, new=min(case.new, WARM_UP_TOKENS)), 0)


@dataclass(frozen=True)
class Judged:
    """The verdict on one prompt of a case by one arm: the worst of its trials."""

    case: int
    row: int
    arm: int
    verdict: Verdict


def judge(found: Measurement, baseline: int, ask: AskGap) -> list[Judged]:
    """Every arm's greedy answers against plain decoding's of the same prompt, alone where it was measured.

    The target is asked where they part; an interrupt leaves differences unjudged.
    """
    truth = _truth(found, baseline)
    judged: list[Judged] = []
    for (i, arm), taken in sorted(found.turns.items()):
        case = found.cases[i]
        if case.temperature > 0:
            continue
        for row, prompt in enumerate(case.prompts):
            expected = truth.get(prompt)
            if expected is None:
                continue
            answers = [each.answers[row].tokens for each in taken]
            verdicts = [compared(expected, answer) for answer in answers]
            verdict = next((each for each in verdicts if not each.same), verdicts[0])
            judged.append(Judged(i, row, arm, verdict))
    try:
        return [replace(each, verdict=_asked(found, truth, each, ask)) for each in judged]
    except KeyboardInterrupt:
        found.interrupted = True
        return judged


def _truth(found: Measurement, baseline: int) -> Mapping[tuple[int, ...], tuple[int, ...]]:
    """Plain decoding's greedy answer by prompt, that of a prompt alone before that of one in a batch."""
    truth: dict[tuple[int, ...], tuple[int, ...]] = {}
    for i, case in sorted(enumerate(found.cases), key=lambda each: each[1].rows):
        taken = found.taken(i, baseline)
        if case.temperature == 0 and taken:
            for prompt, answer in zip(case.prompts, taken[0].answers, strict=True):
                truth.setdefault(prompt, answer.tokens)
    return truth


def _asked(
    found: Measurement, truth: Mapping[tuple[int, ...], tuple[int, ...]], judged: Judged, ask: AskGap
) -> Verdict:
    prompt = found.cases[judged.case].prompts[judged.row]
    if not judged.verdict.same and judged.arm in found.reasons:
        return replace(judged.verdict, reason=found.reasons[judged.arm])
    return with_gap(judged.verdict, prompt, truth[prompt], ask)


def with_gap(verdict: Verdict, prompt: Sequence[int], reference: Sequence[int], ask: AskGap) -> Verdict:
    """The verdict with the target's say, where there are two tokens to choose between."""
    if verdict.at is None or verdict.expected is None or verdict.got is None:
        return verdict
    return replace(verdict, gap=ask([*prompt, *reference[: verdict.at]], verdict.expected, verdict.got))
