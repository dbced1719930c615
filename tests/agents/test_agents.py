"""Real coding agents finish their work on this server, and what they send is served in full."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.agents.bug_fix import AGENTS, DONE, RECORDED, broken, mend, missing, names
from tests.scripted import scripted_session
from tests.tiny_server import tiny_server

ROOM = 9_900
"""Tokens: less than the file that is read, more than a request for a summary adds."""
UNHEEDED = {"output_config.effort"}
"""What agents ask for that the scripted model's template has no place for."""


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_mends_a_bug_and_runs_no_call_that_broke_off(name: str, tmp_path: Path) -> None:
    assert not missing(), missing()
    agent = AGENTS[name]
    outcome = mend(agent, tmp_path, first=[*agent.others, broken(agent)])
    told = f"{outcome.done.stdout}\n{outcome.done.stderr}"
    assert outcome.done.returncode == 0, told
    assert DONE in outcome.done.stdout, told
    assert "a + b" in outcome.code
    assert {*outcome.statuses} == {200}
    assert sorted(path.name for path in (tmp_path / "work").glob("*.*")) == ["calc.py", "check.py"]
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    new = names(outcome.asked) - names(recorded)
    assert not new, "the agent sends what is not on record: python -m tests.agents.record"


def test_claude_code_compacts_when_it_is_told_that_a_prompt_is_too_long(tmp_path: Path) -> None:
    """What it read does not fit; a summary of it, which it asks for without its tools, just does."""
    assert not missing(), missing()
    outcome = mend(AGENTS["claude"], tmp_path, comments=450, room=ROOM)
    told = f"{outcome.done.stdout}\n{outcome.done.stderr}"
    assert sorted(outcome.statuses)[-2:] == [200, 400], told
    assert outcome.summaries == 1
    assert DONE in outcome.done.stdout, told
    assert "a + b" in outcome.code


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_server(scripted_session(lambda _: "Well.")) as url:
        yield url


@pytest.mark.parametrize("name", AGENTS)
def test_recorded_bodies_are_served_in_full(url: str, name: str) -> None:
    bodies = json.loads((RECORDED / f"{name}.json").read_text())
    assert len(bodies) > 3
    for body in bodies:
        answered = httpx.post(f"{url}/v1/messages", json=body | {"stream": False})
        told = answered.json()
        assert answered.status_code == 200, told
        assert told["content"] == [{"type": "text", "text": "Well."}]
        assert {*told["x_mlx_dspark"]["ignored"]} <= UNHEEDED
