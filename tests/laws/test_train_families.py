"""docs/train.md names the families for which no drafter can be trained; the command refuses just those."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_dspark.foundation.errors import UnsupportedModel
from mlx_dspark.foundation.settings import TrainSettings
from mlx_dspark.targets.load import target_of
from mlx_dspark.train.checks import check_teacher
from mlx_dspark.train.target import Teacher
from tests.families_page import RUN
from tests.tiny_families import family_config, tiny_family

PAGE = (Path(__file__).parents[2] / "docs" / "train.md").read_text(encoding="utf-8")
REFUSED = re.findall(r"`([^`]+)`", PAGE.partition("no drafter can be trained for")[2].partition("##")[0])
TRAINED = sorted(RUN.keys() - set(REFUSED))


def teacher(family: str) -> Teacher:
    target = target_of(tiny_family(family, seed=1), family_config(family), context=512)
    return Teacher(target, None, {}, frozenset(), "", family)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_cannot_teach_are_refused(family: str) -> None:
    assert family in RUN
    with pytest.raises(UnsupportedModel, match=f"No drafter can be trained for {family}") as refusal:
        check_teacher(teacher(family), TrainSettings())
    assert refusal.value.field == "target"
    assert refusal.value.next_step


@pytest.mark.parametrize("family", TRAINED[::6])
def test_the_others_teach(family: str) -> None:
    check_teacher(teacher(family), TrainSettings())
