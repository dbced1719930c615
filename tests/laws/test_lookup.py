"""The lookup drafter: what it proposes, how long, and when its gate closes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mlx_dspark.contracts import Ask, Observation
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.drafters.lookup.drafter import LongDraftGate, LookupRows
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.noise import RowNoise
from tests.fakes import ScriptedDrafter


def ask(anchors: Sequence[int], caps: Sequence[int], positions: Sequence[int] = ()) -> Ask:
    n = len(anchors)
    return Ask(anchors, caps, positions or [0] * n, [SamplingParams()] * n, RowNoise.of_seeds([1] * n))


def seen(tokens: Sequence[Sequence[int]], drafted: int = 0, accepted: int = 0) -> Observation:
    return Observation(tokens, None, [drafted] * len(tokens), [accepted] * len(tokens))


def drafts(
    drafter: LookupDrafter, rows: LookupRows, anchors: Sequence[int], cap: int = 64
) -> list[list[int]]:
    proposal = drafter.propose(rows, ask(anchors, [cap] * len(anchors)))
    tokens: list = proposal.tokens.tolist()  # type: ignore[assignment]
    return [row[:length] for row, length in zip(tokens, proposal.lengths, strict=True)]


def reference(tokens: list[int], min_n: int, max_n: int, base: int, long: int) -> list[int]:
    """The rule by brute force over the whole sequence, its last token being the anchor."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] != tokens[-n:]:
                continue
            length = n
            while length < min(32, end) and tokens[end - length - 1] == tokens[-length - 1]:
                length += 1
            return tokens[end : end + (min(2 * length, long) if length >= 8 else base)]
    return []


@pytest.mark.parametrize("alphabet", [2, 3, 8, 40])
@pytest.mark.parametrize(("min_n", "max_n"), [(3, 4), (4, 5), (1, 1), (1, 8)])
def test_drafts_equal_the_rule_applied_by_brute_force(alphabet: int, min_n: int, max_n: int) -> None:
    drafter = LookupDrafter(min_n=min_n, max_n=max_n)
    rng = random.Random(alphabet)
    for _ in range(40):
        tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 60))]
        if rng.random() < 0.5:
            tokens += tokens[: rng.randrange(len(tokens))]
        rows = drafter.new_rows(1)
        cut = rng.randrange(len(tokens))
        drafter.observe(rows, seen([tokens[:cut]]))
        drafter.observe(rows, seen([tokens[cut:-1]]))
        assert drafts(drafter, rows, tokens[-1:]) == [reference(tokens, min_n, max_n, 6, 32)]


@pytest.mark.parametrize("alphabet", [2, 5, 30])
@pytest.mark.parametrize("min_n", [1, 2, 3, 4])
def test_blind_means_that_no_next_token_leads_to_a_draft(alphabet: int, min_n: int) -> None:
    drafter = LookupDrafter(min_n=min_n, max_n=max(4, min_n))
    rng, blind = random.Random(min_n), 0
    for _ in range(60):
        tokens = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 40))]
        rows = drafter.new_rows(1)
        drafter.observe(rows, seen([tokens[:-1]]))
        found = drafter.blind(rows, tokens[-1:], {drafter.name})
        blind += found
        drafter.observe(rows, seen([tokens[-1:]]))
        could = any(drafts(drafter, rows, [token])[0] for token in range(alphabet))
        assert not (found and could)
        assert found or could or min_n == 1
    assert blind or min_n == 1 or alphabet == 2


def test_of_several_drafters_only_those_that_are_asked_count_as_seeing() -> None:
    """A parked drafter that can always draft does not keep rounds from running ahead."""
    lookup, other = LookupDrafter(), ScriptedDrafter(lambda _, count: [0] * count, 1.0, vocab=300)
    both = FirstHit([lookup, other])
    names = [source.name for source in lookup.sources]
    for text, blind in (([5, 6, 7, 8, 9, 10], True), ([5, 6, 7, 8] * 3, False)):
        rows = both.new_rows(1)
        both.observe(rows, seen([text[:-1]]))
        assert both.blind(rows, text[-1:], names) == blind
        assert both.blind(rows, text[-1:], names[:1]) == blind
        assert not both.blind(rows, text[-1:], [*names, other.name])
        assert not both.blind(rows, text[-1:], [other.name])


def test_a_cap_is_the_most_and_zero_is_none() -> None:
    drafter, text = LookupDrafter(), list(range(100, 140))
    rows = drafter.new_rows(1)
    drafter.observe(rows, seen([text + text[:20]]))
    for cap in (0, 1, 5, 9, 64):
        assert drafts(drafter, rows, [text[20]], cap) == [
            text[21:40][: min(cap, 32)] + text[:20][: max(0, cap - 19)][:13]
        ]


def test_rows_keep_to_themselves_and_move_with_join_and_select() -> None:
    drafter = LookupDrafter()
    left, right = drafter.new_rows(1), drafter.new_rows(1)
    drafter.observe(left, seen([[1, 2, 3, 4, 5, 1, 2]]))
    drafter.observe(right, seen([[1, 2, 3, 9, 9, 1, 2]]))
    left.join(right)
    assert left.depth == [7, 7]
    assert drafts(drafter, left, [3, 3]) == [[4, 5, 1, 2, 3], [9, 9, 1, 2, 3]]
    left.select([1])
    assert drafts(drafter, left, [3]) == [[9, 9, 1, 2, 3]]


def test_the_gate_closes_after_two_refused_long_drafts_and_probes_after_eight_base_ones() -> None:
    gate = LongDraftGate()
    gate.observe(True, 20, 9)
    assert gate.open
    gate.observe(True, 20, 10)
    gate.observe(True, 20, 0)
    assert gate.open, "a success in between resets the count"
    gate.observe(True, 20, 0)
    assert not gate.open
    for _ in range(7):
        gate.observe(False, 6, 0)
        assert not gate.open
    gate.observe(False, 6, 0)
    assert gate.open, "one probe"
    gate.observe(True, 20, 3)
    assert not gate.open
    for _ in range(8):
        gate.observe(False, 6, 0)
    gate.observe(True, 20, 20)
    assert gate.open


def test_refused_long_drafts_shrink_to_the_base_length() -> None:
    drafter, text = LookupDrafter(), list(range(100, 160))
    rows = drafter.new_rows(1)
    drafter.observe(rows, seen([text + text[:20]]))
    lengths = []
    for i in range(20, 24):
        (draft,) = drafts(drafter, rows, [text[i]])
        lengths.append(len(draft))
        drafter.observe(rows, seen([[text[i]]], drafted=len(draft), accepted=0))
    assert lengths[:2] == [32, 32]
    assert lengths[2:] == [6, 6]


@pytest.mark.parametrize(
    "options",
    [{"max_draft": 0}, {"max_draft": 65}, {"long_draft": -1}, {"min_n": 0}, {"min_n": 5, "max_n": 4}],
)
def test_sizes_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"out of range|no range"):
        LookupDrafter(**options)
