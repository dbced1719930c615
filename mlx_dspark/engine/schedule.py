"""What an engine does next. Numbers in, a decision out; no MLX, no threads, no clock.

Rounds of the running rows and chunks of prompts take turns, so a long prompt holds the others up by one chunk
at a time. Of several prompts the one with the fewest tokens left is read first, but none is passed over more
than PATIENCE times in a row. Short prompts of similar lengths share a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

PATIENCE = 4

PADDING = 0.25
"""Prompts share a chunk where padding adds at most this share to their tokens: on a CPU padding costs as much
as tokens do."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A prompt being read: tokens left, and how often in a row another was read instead. `whole`: nothing of
    it is read yet, and it may be read together with others."""

    left: int
    passed_over: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What there is to do: `waiting` requests, prompts being `reading`, `running` rows.

    `in_flight`: a round of the running rows is launched and has not landed. `chunk_last`: the last piece of
    work was a chunk.
    """

    waiting: int
    reading: Sequence[Reading]
    running: int
    in_flight: bool = False
    chunk_last: bool = False


class Work(Enum):
    """`ADMIT`: take the oldest waiting request; `READ`: a chunk of a prompt; `ROUND`: a round of the running
    rows; `REST`: nothing to do."""

    ADMIT = "admit"
    READ = "read"
    ROUND = "round"
    REST = "rest"


def next_work(load: Load, max_rows: int) -> Work:
    """The next piece of work; at most `max_rows` rows are read and run at once.

    A round in flight lands first, so that no chunk is charged to it.
    """
    if load.in_flight:
        return Work.ROUND
    if may_admit(load, max_rows):
        return Work.ADMIT
    if load.reading and (not load.chunk_last or not load.running):
        return Work.READ
    return Work.ROUND if load.running else Work.REST


def may_admit(load: Load, max_rows: int) -> bool:
    """Whether a request waits and there is room for it."""
    return load.waiting > 0 and len(load.reading) + load.running < max_rows


def may_launch_ahead(load: Load, max_rows: int) -> bool:
    """Whether rounds are all there is to do, so that the next may be launched before the last one lands."""
    return not load.reading and not may_admit(load, max_rows)


def which_prompts(reading: Sequence[Reading], chunk: int) -> list[int]:
    """The prompts whose chunk is next: the one longest out of patience, else the shortest, else the first.

    With a whole prompt come those whole ones nearest in length that fit a chunk of `chunk` tokens with it,
    padding included.
    """
    first = _first_prompt(reading)
    chosen, tokens, longest = [first], reading[first].left, reading[first].left
    if not reading[first].whole:
        return chosen
    others = [i for i, other in enumerate(reading) if other.whole and i != first]
    for i in sorted(others, key=lambda i: abs(reading[i].left - reading[first].left)):
        most = max(longest, reading[i].left)
        padded = (len(chosen) + 1) * most
        if padded <= min(chunk, (1 + PADDING) * (tokens + reading[i].left)):
            chosen.append(i)
            tokens, longest = tokens + reading[i].left, most
    return chosen


def _first_prompt(reading: Sequence[Reading]) -> int:
    most = max(range(len(reading)), key=lambda i: reading[i].passed_over)
    if reading[most].passed_over >= PATIENCE:
        return most
    return min(range(len(reading)), key=lambda i: reading[i].left)
