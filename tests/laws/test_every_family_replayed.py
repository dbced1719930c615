"""Every family of mlx-lm: rounds that are replayed are those of its own code."""

from __future__ import annotations

from contextlib import suppress

import pytest

from mlx_dspark.foundation.errors import UnsupportedModel
from tests.laws.test_every_family import NOT_BUILT
from tests.laws.test_replays import begun, fed, ids, pair, recordings, same
from tests.tiny_families import ONLY

FAMILIES = sorted(name for name in ONLY if "." not in name and name not in NOT_BUILT)
SURE = ("qwen2", "qwen3", "qwen3_moe", "glm4", "granite", "phi3", "olmo2", "mixtral", "starcoder2")
"""Some that must be replayed."""


@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_of_a_family_are_those_of_its_code(family: str) -> None:
    targets = None
    with suppress(UnsupportedModel):
        targets = pair(family)
    if targets is None:
        assert family not in SURE
        return
    states = [begun(target, [9]) for target in targets]
    for turn, width in enumerate([3, 3, 3, 1, 1, 3]):
        tokens, kept = ids(1, width, turn), [min(2, width)]
        made = [fed(*each, tokens, kept).logits for each in zip(targets, states, strict=True)]
        assert same(*made), turn
    assert recordings(targets[1]) or family not in SURE
