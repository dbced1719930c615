"""The same conversation in forms that stricter templates take, for when one refuses it as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_dspark.foundation.chat import Turn


def milder(turns: Sequence[Turn]) -> Iterator[tuple[Turn, ...]]:
    """The turns as they are; then with later system turns as the user's, and neighbours of one role joined;
    then without a system turn, its text ahead of the user's. What repeats the form before is left out."""
    seen: list[tuple[Turn, ...]] = []
    for form in (tuple(turns), _joined(_late_systems(turns)), _joined(_no_system(turns))):
        if form not in seen:
            seen.append(form)
            yield form


def _late_systems(turns: Sequence[Turn]) -> list[Turn]:
    return [
        replace(turn, role="user") if turn.role == "system" and i else turn for i, turn in enumerate(turns)
    ]


def _no_system(turns: Sequence[Turn]) -> list[Turn]:
    return [replace(turn, role="user") if turn.role == "system" else turn for turn in turns]


def _joined(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Neighbouring turns of the user, and neighbouring ones of the assistant, as one; a call ends a turn."""
    found: list[Turn] = []
    for turn in turns:
        last = found[-1] if found else None
        if last is None or turn.role != last.role or turn.role == "tool" or last.tool_calls:
            found.append(turn)
            continue
        found[-1] = replace(
            turn,
            content="\n\n".join(filter(None, (last.content, turn.content))),
            reasoning="\n\n".join(filter(None, (last.reasoning, turn.reasoning))),
        )
    return tuple(found)
