"""What the whole engine commits follows the plain sampler: launch, accept, land, commit and history together.

Each case draws 3 tokens for 17,000 rows (51,000 draws) over a vocabulary of 8, rows of a batch drafting
different lengths, and compares the joint distribution of the three with the exact one. Keys are fixed, so the
p-value is too; the floor is 1e-4.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.engine.loop import VerifyLoop
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.request import SamplingParams
from tests.fakes import TableDrafter, TableTarget
from tests.many_texts import draw_texts
from tests.reference_sampler import fit_p_value, reference_text

VOCAB, LENGTH, ROWS, BATCH, FLOOR = 8, 3, 17_000, 500, 1e-4
PROMPT = (3,)

_rng = np.random.default_rng(11)
TABLE = _rng.normal(size=(VOCAB, VOCAB)) * 1.5
BAD = _rng.dirichlet(np.ones(VOCAB) * 0.4, size=VOCAB)

SETTINGS = {
    "plain temperature": SamplingParams(temperature=1.0),
    "everything": SamplingParams(
        temperature=0.8,
        top_p=0.95,
        top_k=7,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={2: 0.7},
    ),
}


def q_of(quality: str, setting: SamplingParams) -> np.ndarray:
    if quality == "bad":
        return BAD
    logits = TABLE / setting.temperature + _rng.normal(size=TABLE.shape) * 0.2
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def texts_of(drafter: Any, sampling: SamplingParams, seeded: bool, monkeypatch: Any) -> np.ndarray:
    caps = FixedCaps({drafter.name: drafter.max_draft}) if drafter is not None else FixedCaps({})
    loop = VerifyLoop(TableTarget(mx.array(TABLE, dtype=mx.float32)), drafter)
    return draw_texts(
        loop, caps, PROMPT, LENGTH, sampling, rows=ROWS, batch=BATCH, seeded=seeded, monkeypatch=monkeypatch
    ).texts


CASES = [
    ("plain temperature", "bad", False),
    ("plain temperature", "good", True),
    ("everything", "none", False),
    ("everything", "good", False),
    ("everything", "bad", False),
]


@pytest.mark.parametrize(("setting", "quality", "seeded"), CASES)
def test_committed_text_has_the_plain_samplers_distribution(
    setting: str, quality: str, seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SETTINGS[setting]
    drafter = None
    if quality != "none":
        drafter = TableDrafter(mx.array(q_of(quality, sampling), dtype=mx.float32))
    texts = texts_of(drafter, sampling, seeded, monkeypatch)
    assert texts.shape == (ROWS, LENGTH)
    assert fit_p_value(texts, reference_text(TABLE, PROMPT, LENGTH, sampling)) > FLOOR
