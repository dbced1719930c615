"""Laws of all packagings at once: none of them shows in the drafts, no key of a drafter is ever ignored, and
what is two packagings at once is none."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.catalog.formats import DrafterCheckpoint, DrafterConfig, read_drafter
from mlx_dspark.contracts import Ask, Observation, TargetSpec
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.foundation.errors import LoadError
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.nn.noise import RowNoise
from tests.every_packaging import PACKAGINGS
from tests.golden import TableTarget

HIDDEN, VOCAB = 32, 48
EMBED = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(201))
HEAD = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(202)) / 5
ROUNDS = (((9, 1, 14), (9, 2, 1)), ((1, 3, 2), (1, 9, 3)), ((4, 2, 1), (2, 1, 9)))
"""By round what three rows keep, and how many drafts they may have next."""

FOLDERS = [name for name in PACKAGINGS if name != "GGUF"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))


def drafts(path: Path, seed: int) -> list[list[list[int]]]:
    """What three rows of one batch draft in three rounds, greedily."""
    if path.is_dir() and (found := list(path.glob("*.gguf"))):
        path = found[0]
    drafter = load_drafter(path, quantize_bits=0)
    spec = TargetSpec("table", VOCAB, HIDDEN, 2, context=1 << 20)
    scale = HIDDEN**0.5 if drafter.config.backbone == "gemma4" else 1.0
    drafter.bind(TableTarget(spec, EMBED, HEAD, scale))
    rows, found, keys = drafter.new_rows(3), [], iter(mx.random.split(mx.random.key(500 + seed), 3))
    for kept, caps in ROUNDS:
        width, numbers = max(kept), next(keys)
        seen = mx.random.normal((3, width, 2 * HIDDEN), key=numbers)
        there = mx.arange(width)[None, :, None] < mx.array(kept)[:, None, None]
        seen = mx.where(there, seen, mx.array(math.nan))
        drafter.observe(rows, Observation([[0] * n for n in kept], seen, [0] * 3, [0] * 3))
        anchors = [seed + sum(kept), 7, 11]
        noise = RowNoise.of_seeds([None] * 3)
        proposal = drafter.propose(rows, Ask(anchors, caps, rows.depth, [SamplingParams()] * 3, noise))
        found.append([proposal.tokens[row, :n].tolist() for row, n in enumerate(proposal.lengths)])
    return found


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("name", PACKAGINGS)
def test_rounds_of_every_packaging_are_those_of_the_native_layout(
    name: str, seed: int, tmp_path: Path
) -> None:
    native, wrapped = PACKAGINGS[name].save(tmp_path, seed=seed, hidden=HIDDEN, vocab=VOCAB)
    found = drafts(wrapped, seed)
    assert found == drafts(native, seed)
    assert len({tuple(row) for each in found for row in each}) > 3, "rows that draft alike tell nothing"


# ------------------------------------------------------------------------------------- two packagings at once

MARKS: dict[str, dict[str, Any]] = {
    "deepspec": {"architectures": ["Qwen3DSparkModel"]},
    "z-lab DFlash": {"architectures": ["DFlashDraftModel"]},
    "DFlash 2": {"architectures": ["DFlash2DraftModel"], "dflash_config": {"selector_rank": 12}},
    "speculators": {"speculators_model_type": "dspark", "speculators_config": {"algorithm": "dspark"}},
    "SpecForge": {"dflash_config": {"projector_type": "dspark"}},
    "Nemotron": {"architectures": ["Qwen3DSparkModel"], "dflash_query_causal": True},
    "Qwen 3.5 native": {"model_type": "qwen3_5", "enable_qwen35_gated_q_proj": True},
    "LFM2": {"architectures": ["Lfm2DSparkDraftModel"], "dflash_config": {"target_layer_ids": [0, 1]}},
    "PrismML": {"log_snr_conditioning": True, "min_log_snr": -9, "max_log_snr": 9},
}
"""What each packaging is known by."""

LESS = {
    "Nemotron": "deepspec",
    "SpecForge": "deepspec",
    "Qwen 3.5 native": "deepspec",
    "PrismML": "deepspec",
    "DFlash 2": "z-lab DFlash",
    "speculators": "z-lab DFlash",
}
"""By packaging the one whose marks its heads may have too."""


def with_marks(config: dict[str, Any], marks: dict[str, Any]) -> dict[str, Any]:
    both = config | marks
    for key in ("dflash_config", "speculators_config"):
        if isinstance(config.get(key), dict) and key in marks:
            both[key] = config[key] | marks[key]
    if "architectures" in marks:
        both["architectures"] = [*(config.get("architectures") or []), *marks["architectures"]]
    return both


def read_with(folder: Path, config: dict[str, Any]) -> DrafterCheckpoint | None:
    """None where it is refused with a sentence and what to do."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return read_drafter(folder)
    except LoadError as error:
        told = bool(error.sentence and error.next_step)
    assert told, "an error without a sentence or a next step"
    return None


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each packaging's own folder and config."""
    found = {}
    for name in FOLDERS:
        folder = PACKAGINGS[name].damaged(
            tmp_path_factory.mktemp("head"), hidden=16, vocab=24, taps=(0, 2), target_layers=4
        )
        found[name] = (folder, json.loads((folder / "config.json").read_text()))
    return found


@pytest.mark.parametrize("name", FOLDERS)
def test_marks_of_another_packaging_make_none(name: str, heads: dict[str, tuple[Path, Any]]) -> None:
    """Either mark first. It is refused, by its marks or by its tensors, unless one of the two packagings is
    the other with more to it: then it is that one."""
    folder, config = heads[name]
    own = PACKAGINGS[name].name
    for other, marks in MARKS.items():
        for both in (with_marks(config, marks), with_marks(marks, config)):
            found = read_with(folder, both)
            if other != own and found is not None:
                assert {own, other} == {found.packaging, LESS.get(found.packaging)}, (other, found.packaging)


# ------------------------------------------------------------------------------- keys where nobody reads them

UNREAD: dict[str, tuple[Any, ...]] = {
    "block_size": (5,),
    "mask_token_id": (3,),
    "target_layer_ids": ([-1, 1],),
    "logits_start": (0, 1),
    "sample_from_anchor": (True, False),
    "is_causal": (True, False),
    "causal": (True, False),
    "dflash_query_causal": (True, False),
    "sliding_window_non_causal": (True,),
    "attention_sink_bias": (True, False),
    "dspark_bonus_anchor": (True, False),
    "dspark_fixup_head_type": ("gru",),
    "log_snr_conditioning": (True,),
    "rope_is_neox_style": (False,),
    "enable_qwen35_gated_q_proj": (True,),
    "input_embedding_scale": (2.0,),
    "layer_types": (["sliding_attention", "full_attention"],),
    "use_swa": (True,),
    "rope_theta": (77.0,),
    "rms_norm_eps": (0.25,),
    "final_logit_softcapping": (5.0,),
    "output_multiplier": (2.0,),
}
"""Keys of drafters with values that tell of another head than most of those here."""

SAYS: dict[str, Callable[[DrafterConfig, Any], bool]] = {
    "sliding_window_non_causal": lambda c, _: not any(c.layer_causal),
    "logits_start": lambda c, value: c.first_slot == value,
    "sample_from_anchor": lambda c, value: (c.first_slot == 0) == value,
    "dspark_bonus_anchor": lambda c, value: (c.first_slot == 1) == value,
    "attention_sink_bias": lambda c, value: c.sinks == value,
    "log_snr_conditioning": lambda c, _: c.noise_levels,
    "rope_is_neox_style": lambda c, _: c.rope_kind == "interleaved",
    "enable_qwen35_gated_q_proj": lambda c, _: c.gated,
    "use_swa": lambda c, _: None not in c.layer_windows,
    "layer_types": lambda c, value: (
        [width is not None for width in c.layer_windows] == [kind == "sliding_attention" for kind in value]
    ),
    "is_causal": lambda c, value: set(c.layer_causal) == {value},
    "causal": lambda c, value: not value or all(c.layer_causal),
    "dflash_query_causal": lambda c, value: not value or all(c.layer_causal),
}
"""What the head is when the key was heeded, though the original may have been the same."""

COME_SECOND = {"block_size", "mask_token_id", "target_layer_ids", "final_logit_softcapping", "rope_theta"}
COME_SECOND |= {"logits_start", "sample_from_anchor", "output_multiplier"}
"""What on top has another key before it, or is the target's own; and in a backbone, where the layers' kinds
count only if it says that its window is used."""


@pytest.mark.parametrize("place", ["", "dflash_config", "transformer_layer_config"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_key_is_heeded_or_refused(name: str, place: str, heads: dict[str, tuple[Path, Any]]) -> None:
    folder, config = heads[name]
    wanted = read_with(folder, config)
    assert wanted is not None
    backbone = place == "transformer_layer_config"
    second = {"rope_theta", "output_multiplier", "layer_types"} if backbone else COME_SECOND
    keys = [key for key in UNREAD if place == "dflash_config" or key not in second]
    if backbone and place not in config:
        return
    for key in keys:
        for value in UNREAD[key]:
            new = deepcopy(config)
            at = new.setdefault(place, {}) if place else new
            at[key] = value
            found = read_with(folder, new)
            if found is None or found.packaging != wanted.packaging or found.config != wanted.config:
                continue
            assert key in SAYS, f"{key} {value!r} is ignored"
            assert SAYS[key](found.config, value), f"{key} {value!r} is ignored"
