"""docs/python.md: its programs run, and its table of events is whole."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import mlx_dspark
from mlx_dspark.session import Session, SessionEvent
from tests.tiny import save_tiny

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Session]]:
    """The sessions that a program loads: all of a tiny model."""
    folder, load, opened = save_tiny(tmp_path / "model"), mlx_dspark.load, []

    def tiny(**settings: Any) -> Session:
        opened.append(load(folder, mode="lookup", **settings))
        return opened[-1]

    monkeypatch.setattr(mlx_dspark, "load", tiny)
    yield opened
    for session in opened:
        session.close()


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_the_page_run_and_leave_nothing_open(program: str, sessions: list[Session]) -> None:
    exec(compile(program, "docs/python.md", "exec"), {})
    assert len(sessions) == 1
    assert not any(session.engine.running for session in sessions)  # type: ignore[attr-defined]


def test_every_event_is_listed_with_all_its_fields() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    events = {event.__name__: event for event in get_args(SessionEvent)}
    assert rows.keys() == events.keys()
    for name, event in events.items():
        assert {field.name for field in dataclasses.fields(event)} <= set(re.findall(r"`(\w+)`", rows[name]))
