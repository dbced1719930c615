"""What comes next, on numbers alone: rounds and chunks take turns, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_dspark.engine.schedule import (
    PADDING,
    PATIENCE,
    Load,
    Reading,
    Work,
    may_admit,
    may_launch_ahead,
    next_work,
    which_prompts,
)

READINGS = st.lists(st.builds(Reading, st.integers(1, 5000), st.integers(0, 9), st.booleans()), max_size=6)
SHORT = st.lists(
    st.builds(Reading, st.integers(1, 60), st.integers(0, 9), st.booleans()), min_size=1, max_size=9
)
LOADS = st.builds(
    Load,
    waiting=st.integers(0, 5),
    reading=READINGS,
    running=st.integers(0, 6),
    in_flight=st.just(False),
    chunk_last=st.booleans(),
)


@given(LOADS, st.integers(1, 8))
def test_something_is_done_whenever_something_can_be(load: Load, max_rows: int) -> None:
    work = next_work(load, max_rows)
    can = {
        Work.ADMIT: may_admit(load, max_rows),
        Work.READ: bool(load.reading),
        Work.ROUND: load.running > 0,
        Work.REST: not (may_admit(load, max_rows) or load.reading or load.running),
    }
    assert can[work]


@given(LOADS, st.integers(1, 8))
def test_room_is_never_exceeded_and_never_wasted(load: Load, max_rows: int) -> None:
    room = max_rows - len(load.reading) - load.running
    assert (next_work(load, max_rows) is Work.ADMIT) == (load.waiting > 0 and room > 0)


@given(READINGS.filter(bool), st.integers(1, 6))
def test_rounds_and_chunks_take_turns(reading: list[Reading], running: int) -> None:
    after_round = Load(0, reading, running, chunk_last=False)
    after_chunk = Load(0, reading, running, chunk_last=True)
    assert next_work(after_round, 99) is Work.READ
    assert next_work(after_chunk, 99) is Work.ROUND
    assert next_work(Load(0, reading, 0, chunk_last=True), 99) is Work.READ


def test_a_round_in_flight_lands_before_anything_else() -> None:
    assert next_work(Load(3, [Reading(9)], 1, in_flight=True), 8) is Work.ROUND


@given(LOADS, st.integers(1, 8))
def test_rounds_run_ahead_only_where_nothing_else_could_be_done_between_them(
    load: Load, max_rows: int
) -> None:
    if may_launch_ahead(load, max_rows):
        assert next_work(load, max_rows) in (Work.ROUND, Work.REST)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.lists(st.integers(1, 3), max_size=200))
def test_no_prompt_is_passed_over_for_ever(first: list[int], later: list[int]) -> None:
    """Short prompts keep coming in the places of those that were read."""
    reading, arriving, most = [Reading(left) for left in first], iter(later), len(first)
    while reading:
        place = which_prompts(reading, 1)[0]
        reading = [
            Reading(each.left - 1, 0) if i == place else Reading(each.left, each.passed_over + 1)
            for i, each in enumerate(reading)
        ]
        assert max(each.passed_over for each in reading) <= PATIENCE + most
        if not reading[place].left:
            newcomer = next(arriving, None)
            reading[place : place + 1] = [] if newcomer is None else [Reading(newcomer)]


def test_the_shortest_prompt_comes_first_among_the_patient() -> None:
    assert which_prompts([Reading(900, 2), Reading(20), Reading(300, 3)], 512) == [1]
    assert which_prompts([Reading(900, PATIENCE), Reading(20)], 512) == [0]
    assert which_prompts([Reading(5), Reading(5)], 512) == [0]


@given(SHORT, st.integers(1, 200))
def test_prompts_that_share_a_chunk_are_whole_and_fit_it_with_little_padding(
    reading: list[Reading], chunk: int
) -> None:
    chosen = which_prompts(reading, chunk)
    assert len(set(chosen)) == len(chosen) >= 1
    assert chosen[0] == which_prompts([Reading(r.left, r.passed_over) for r in reading], chunk)[0]
    if len(chosen) > 1:
        lengths = [reading[place].left for place in chosen]
        assert all(reading[place].whole for place in chosen)
        assert len(chosen) * max(lengths) <= chunk
        assert len(chosen) * max(lengths) <= (1 + PADDING) * sum(lengths)


def test_whole_prompts_of_similar_length_share_a_chunk() -> None:
    reading = [Reading(20, 0, True), Reading(90, 0, True), Reading(22, 0, True), Reading(21)]
    assert which_prompts(reading, 512) == [0, 2]
    assert which_prompts(reading, 43) == [0]
    assert which_prompts([Reading(9, 0, True)] * 5, 36) == [0, 1, 2, 3]
