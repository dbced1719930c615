"""Heads with the keys of published ones, every width but those small, are read as what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_dspark.catalog.formats import read_drafter
from tests.tiny_dflash2 import save_tiny_dflash2
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_packagings import as_nemotron, as_specforge, as_speculators

BORROWED: dict[str, Any] = {"own_embedding": False, "own_head": False}
FIVE: dict[str, Any] = {"layers": 5, "vocab": 384, "hidden": 32}
NEMOTRON = (1, 5, 19, 29, 41, 51)
REDHAT = (3, 11, 19, 27, 35, 43, 51, 59)


def sliding(layers: int, width: int, theta: float) -> dict[str, Any]:
    return {
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": width,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def dspark(folder: Path, taps: tuple[int, ...], target: int, **options: Any) -> Path:
    return save_tiny_dspark(folder / "native", taps=taps, target_layers=target, **options)


def nemotron(folder: Path) -> Path:
    slides = sliding(6, 1024, 1e4) | {"layers": 6, "block_size": 8, "mask_token_id": 90}
    slides |= {"rope_parameters": None, "rope_theta": 10000}
    head = dspark(folder, NEMOTRON, 52, logits_start=1, own_head=False, confidence=False, **slides)
    silent = {"enable_confidence_head": None, "confidence_head_with_markov": None}
    return as_nemotron(head, folder / "wrapped", sinks=-1.0, **silent)


def muse(folder: Path) -> Path:
    slides = sliding(5, 2048, 5e5) | FIVE | {"rms_norm_eps": 1e-5, "block_size": 15, "draft_vocab_size": 384}
    head = dspark(folder, (1, 13, 25, 37, 49), 52, **slides, **BORROWED)
    return as_speculators(head, folder / "wrapped", sample_from_anchor=True, num_target_layers=None)


def redhat(folder: Path) -> Path:
    head = dspark(folder, REDHAT, 64, **sliding(5, 2048, 1e7) | FIVE, **BORROWED, block_size=8)
    return as_speculators(head, folder / "wrapped", sample_from_anchor=True)


def makora(folder: Path) -> Path:
    head = dspark(folder, (1, 13, 27), 30, block_size=7, draft_vocab=32, logits_start=1, mask_token_id=4)
    return as_speculators(head, folder / "wrapped")


def diminfer(folder: Path) -> Path:
    noise = {"partial_rotary_factor": 0.25, "attn_output_gate": True, "mrope_section": [11, 11, 10]}
    return dspark(folder, (1, 16, 31, 46, 61), 64, block_size=15, **FIVE, **BORROWED, **noise)


def radixark(folder: Path) -> Path:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}
    rope = {"rope_parameters": yarn | {"rope_theta": 1e7, "beta_fast": 32.0, "beta_slow": 1.0}}
    return as_specforge(
        dspark(folder, (4, 16, 28, 40, 52), 64, **FIVE, **BORROWED, **rope), folder / "wrapped"
    )


def incoai(folder: Path) -> Path:
    slides = {"sliding": range(5), "sliding_window": 2048, "is_causal": False}
    ids = {"taps": (5, 19, 33, 47, 61), "target_layers": 64, "block_size": 8}
    section = {"output_multiplier": 1.0, "final_logit_softcapping": None, "selector_top_k": 16}
    return save_tiny_dflash2(folder, **FIVE, **slides, **ids, section=section)


def zlab(folder: Path) -> Path:
    slides = {"sliding": range(4), "sliding_window": 2048, "block_size": 16}
    return save_tiny_dflash(folder, **FIVE, **slides, taps=(1, 16, 31, 46, 61), target_layers=64)


HEADS: dict[Callable[[Path], Path], dict[str, Any]] = {
    nemotron: {
        "packaging": "Nemotron", "block_size": 8, "first_slot": 1, "taps": NEMOTRON, "mask_token": 90,
        "layer_causal": (True,) * 6, "layer_windows": (1024,) * 6, "sinks": True, "markov": "vanilla",
        "confidence": False, "own_head": False, "own_embedding": True, "rope_theta": 1e4,
    },
    muse: {
        "packaging": "speculators", "block_size": 15, "first_slot": 0, "taps": (1, 13, 25, 37, 49),
        "layer_causal": (True,) * 5, "layer_windows": (2048,) * 5, "draft_vocab": 384, "own_head": False,
        "own_embedding": False, "rope_theta": 5e5, "norm_eps": 1e-5, "confidence": True,
    },
    redhat: {
        "packaging": "speculators", "block_size": 8, "first_slot": 0, "taps": REDHAT,
        "layer_causal": (True,) * 5, "layer_windows": (2048,) * 5, "own_head": False, "rope_theta": 1e7,
    },
    makora: {
        "packaging": "speculators", "backbone": "qwen3", "block_size": 7, "first_slot": 1, "draft_vocab": 32,
        "mask_token": 4, "taps": (1, 13, 27), "max_draft": 6,
    },
    diminfer: {
        "packaging": "deepspec", "block_size": 15, "first_slot": 0, "taps": (1, 16, 31, 46, 61),
        "gated": False, "rope_kind": "default", "own_head": False, "own_embedding": False, "max_draft": 15,
        "layer_causal": (False,) * 5,
    },
    radixark: {
        "packaging": "SpecForge", "block_size": 7, "first_slot": 0, "taps": (4, 16, 28, 40, 52),
        "rope_kind": "yarn", "rope_theta": 1e7, "confidence_with_markov": True, "own_head": False,
    },
    incoai: {
        "packaging": "DFlash 2", "block_size": 8, "first_slot": 1, "taps": (5, 19, 33, 47, 61),
        "layer_causal": (False,) * 5, "layer_windows": (2048,) * 5, "softcap": None, "output_multiplier": 1.0,
    },
    zlab: {
        "packaging": "z-lab DFlash", "block_size": 16, "first_slot": 1, "taps": (1, 16, 31, 46, 61),
        "layer_causal": (True,) * 4 + (False,), "layer_windows": (2048,) * 4 + (None,),
    },
}  # fmt: skip
"""What each is, in the words of `DrafterConfig`."""


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_a_published_head_is_what_it_is(head: Callable[[Path], Path], tmp_path: Path) -> None:
    found = read_drafter(head(tmp_path))
    for name, value in HEADS[head].items():
        read = found.packaging if name == "packaging" else getattr(found.config, name)
        assert read == value, name
