"""Heads drawn in every published layout draft what float64 numpy does, which follows the specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.contracts import Ask, Observation, TargetSpec
from mlx_dspark.drafters.block import BlockDrafter
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.noise import RowNoise
from tests.drawn_heads import PACKAGINGS, Drawn, draw
from tests.golden import TableTarget

SEEDS = range(8)
TOLERANCE = 1e-4


def bound(folder: Path, drawn: Drawn, embed: Any, head: Any) -> BlockDrafter:
    drafter = load_drafter(folder, quantize_bits=0, dtype=mx.float32)
    spec = TargetSpec("table", drawn.V, drawn.H, drafter.config.target_layers or 10, context=1 << 20)
    scale = drawn.H**0.5 if drawn.gemma else 1.0
    tables = (mx.array(table.astype(np.float32)) for table in (embed, head))
    drafter.bind(TableTarget(spec, *tables, embed_scale=scale))
    return drafter


def normal(rng: np.random.Generator, *shape: int) -> Any:
    """Numbers that float32 holds."""
    return rng.normal(size=shape).astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_a_drawn_head_drafts_what_numpy_does(packaging: str, seed: int, tmp_path: Path) -> None:
    drawn = draw(packaging, seed, tmp_path)
    rng = np.random.default_rng(seed)
    embed, head = (normal(rng, drawn.V, drawn.H) / n for n in (1, 8))
    depth = int(rng.integers(1, 40))
    more = int(rng.integers(1, drawn.B + 1))
    features = (
        rng.normal(size=(depth + more, len(drawn.taps) * drawn.H)).astype(np.float32).astype(np.float64)
    )
    drafter = bound(tmp_path, drawn, embed, head)
    rows, seen = drafter.new_rows(), 0
    for end in (depth, depth + more):
        chunk = mx.array(features[seen:end].astype(np.float32))
        drafter.observe(rows, Observation([[0] * (end - seen)], chunk[None], [0], [0]))
        seen, anchor = end, int(rng.integers(drawn.V))
        wanted = drawn.draft(features[:end], anchor, embed, head)
        trace = drafter.trace(rows, [anchor])
        found: dict[str, Any] = {"block_hidden": trace.hidden, "base_logits": trace.chain.base_logits}
        if "draft_logits" in wanted:
            found["draft_logits"] = trace.chain.logits
        assert ("confidence_logits" in wanted) == (trace.chain.confidence_logits is not None)
        if "confidence_logits" in wanted:
            found["confidence_logits"] = trace.chain.confidence_logits
        for name, value in found.items():
            error = np.abs(np.array(value[0]) - wanted[name]).max() / np.abs(wanted[name]).max()
            assert error < TOLERANCE, f"{name} is off by {error:.2g}"
        assert trace.chain.tokens[0].tolist() == wanted["draft_tokens"]
        ask = Ask([anchor], [drafter.max_draft], rows.depth, [SamplingParams()], RowNoise.of_seeds([None]))
        assert drafter.propose(rows, ask).tokens[0].tolist() == wanted["draft_tokens"]
