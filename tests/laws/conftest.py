"""What holds for every law."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlx_dspark.foundation.events import Trouble


@pytest.fixture(autouse=True)
def no_unexpected_trouble(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A drafter that raises costs no text, so laws about text would not notice: it fails any test that does
    not ask for `troubles`."""
    seen: list[Trouble] = []
    made = Trouble.of

    def watched(*arguments: Any) -> Trouble:
        seen.append(made(*arguments))
        return seen[-1]

    monkeypatch.setattr(Trouble, "of", watched)
    yield
    if "troubles" not in request.fixturenames:
        assert not seen, seen[0].traceback


@pytest.fixture(autouse=True)
def measured_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading measures nothing unless a test asks for it: caps would follow what this machine is like."""
    monkeypatch.setattr("mlx_dspark.session.calibrate.UNASKED", False)
    monkeypatch.setenv("MLX_DSPARK_CALIBRATE", "off")


@pytest.fixture
def troubles() -> None:
    """Permits Trouble."""
