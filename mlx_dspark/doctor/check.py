"""One check, and how a check of ours that raises is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.installing import no_back_end

OK, WARN, FAIL, OPEN = "ok", "warn", "fail", "open"


@dataclass(frozen=True)
class Check:
    """One check: what was found, and the fix where there is something to fix. `open`: it could not tell."""

    name: str
    status: str
    found: str
    fix: str = ""

    @property
    def well(self) -> bool:
        """Whether it did not fail."""
        return self.status != FAIL

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.status:5} {self.name}: {self.found}" + (f" {self.fix}" if self.fix else "")


def checked(name: str, check: Callable[[], Check]) -> Check:
    """A check's outcome; an error of ours is one that failed, with its next step as the fix."""
    try:
        return check()
    except DsparkError as error:
        return Check(name, FAIL, error.sentence, error.next_step)
    except ImportError as error:
        if (told := no_back_end(error)) is None:
            raise
        return Check(name, FAIL, told.sentence, told.next_step)
