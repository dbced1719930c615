"""Laws of the heads for hybrid targets and of stored precisions: a packaging changes no draft, the math is
the specification's, and what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.catalog.formats import nvfp4, read_drafter
from mlx_dspark.contracts import Ask, Observation, TargetSpec
from mlx_dspark.drafters.block import BlockDrafter, Trace
from mlx_dspark.drafters.dspark.noise import noise_features
from mlx_dspark.drafters.load import load_drafter
from mlx_dspark.foundation.errors import BadCheckpoint, LoadError, UnsupportedModel
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.kernels.dispatch import CHOICES, STOCK
from mlx_dspark.nn.noise import RowNoise
from tests.golden import TableTarget
from tests.reference_numpy import Block, Head
from tests.tiny_drafters import save_tiny_dspark
from tests.tiny_variants import native, opened, put, save_lfm2, save_nvfp4, save_prism, save_qwen35

HIDDEN, VOCAB, LAYERS, DEPTH, ANCHOR = 64, 384, 2, 23, 5
SAVE: dict[str, Callable[..., Path]] = {
    "qwen35": save_qwen35,
    "lfm2": save_lfm2,
    "nvfp4": save_nvfp4,
    "prism": save_prism,
}
PACKAGING = {"qwen35": "Qwen 3.5 native", "lfm2": "LFM2", "nvfp4": "deepspec", "prism": "PrismML"}
every = pytest.mark.parametrize("kind", SAVE)
seeds = pytest.mark.parametrize("seed", [1, 2])


def start(kind: str, folder: Path, seed: int) -> Path:
    """LFM2's heads borrow the target's tables."""
    own = kind != "lfm2"
    return native(folder / "native", seed, own_embedding=own, own_head=own)


def saved(kind: str, folder: Path, seed: int = 1, *, same: bool = False) -> Path:
    return SAVE[kind](start(kind, folder, seed), folder / "drafter", same=same, seed=seed)


def tables(seed: int) -> tuple[mx.array, mx.array]:
    embed, head = (mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(seed + n)) for n in (100, 200))
    return embed, head / 8


def features(seed: int) -> mx.array:
    return mx.random.normal((DEPTH, LAYERS * HIDDEN), key=mx.random.key(1000 + seed))


def bound(folder: Path, seed: int, held_as: str = STOCK) -> BlockDrafter:
    drafter = load_drafter(folder, quantize_bits=0, window=0)
    spec = TargetSpec("table", VOCAB, HIDDEN, LAYERS, context=1 << 20)
    gemma4 = drafter.config.backbone == "gemma4"
    drafter.bind(TableTarget(spec, *tables(seed), HIDDEN**0.5 if gemma4 else 1.0))
    if held_as != STOCK:
        drafter.hold_weights(held_as, folder)
    return drafter


def traced(drafter: BlockDrafter, seed: int) -> Trace:
    """After a context that came in two chunks, the first block of it after another block."""
    rows, chunks = drafter.new_rows(), features(seed)
    for chunk in (chunks[:7], chunks[7:]):
        drafter.observe(rows, Observation([[0] * len(chunk)], chunk[None], [0], [0]))
        found = drafter.trace(rows, [ANCHOR])
    ask = Ask([ANCHOR], [drafter.max_draft], rows.depth, [SamplingParams()], RowNoise.of_seeds([None]))
    assert drafter.propose(rows, ask).tokens.tolist() == found.chain.tokens.tolist()
    return found


def reference(folder: Path, seed: int) -> Block:
    embed, head = (np.array(table) for table in tables(seed))
    return Head(folder, (embed, head)).draft(np.array(features(seed)), ANCHOR)


def assert_equal(found: Trace, wanted: Block) -> None:
    pairs = {
        "hidden": (found.hidden, wanted.hidden),
        "base_logits": (found.chain.base_logits, wanted.base_logits),
        "logits": (found.chain.logits, wanted.logits),
    }
    if wanted.confidence_logits is not None:
        assert found.chain.confidence_logits is not None
        pairs["confidence"] = (found.chain.confidence_logits, wanted.confidence_logits)
    for name, (value, vector) in pairs.items():
        error = np.abs(np.array(value[0]) - vector).max() / np.abs(vector).max()
        assert error < 2e-5, f"{name} is off by {error:.2g}"
    assert found.chain.tokens[0].tolist() == wanted.tokens


@seeds
@every
def test_a_packaging_changes_no_draft(kind: str, seed: int, tmp_path: Path) -> None:
    plain = start(kind, tmp_path, seed)
    folder = SAVE[kind](plain, tmp_path / "drafter", same=True, seed=seed)
    assert read_drafter(folder).packaging == PACKAGING[kind]
    assert read_drafter(plain).packaging == "deepspec"
    ours, theirs = traced(bound(folder, seed), seed), traced(bound(plain, seed), seed)
    assert ours.chain.tokens.tolist() == theirs.chain.tokens.tolist()
    assert mx.allclose(ours.chain.logits, theirs.chain.logits, rtol=1e-4, atol=1e-4)


@seeds
@every
def test_vectors_of_the_specification(kind: str, seed: int, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path, seed)
    assert_equal(traced(bound(folder, seed), seed), reference(folder, seed))


@seeds
@pytest.mark.parametrize("shares", [True, False])
def test_vectors_of_gemma4(shares: bool, seed: int, tmp_path: Path) -> None:
    own = seed == 1
    folder = save_tiny_dspark(
        tmp_path, seed=seed, backbone="gemma4", values_from_keys=shares, own_embedding=own, own_head=own
    )
    if not own:
        config, weights = opened(folder)
        weights["layers.0.layer_scalar"] = np.array([0.6])
        put(folder, config | {"final_logit_softcapping": 2.5}, weights)
    assert_equal(traced(bound(folder, seed), seed), reference(folder, seed))


@pytest.mark.parametrize("choice", [choice for choice in CHOICES if choice not in (STOCK, "auto")])
@every
def test_held_weights_draft_alike(kind: str, choice: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path)
    assert_equal(traced(bound(folder, 1, choice), 1), reference(folder, 1))


def test_nvfp4_is_decoded_exactly() -> None:
    """The specification's byte 0x2F with scales 1 and 2, and every code under every finite scale."""
    byte = mx.full((1, 8), 0x2F, dtype=mx.uint8)
    found = nvfp4.decoded(byte, mx.array([[0x38]], dtype=mx.uint8), mx.array(2.0))
    assert found.tolist() == [[-12.0, 2.0] * 8]
    scales = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    codes = np.tile(np.arange(0, 16, 2, dtype=np.uint8) * 17 + 16, (len(scales), 1))
    decoded = nvfp4.decoded(mx.array(codes), mx.array(scales[:, None]), mx.array(0.75))
    wanted = np.array([[_e2m1(n) * _e4m3(int(s)) * 0.75 for n in range(16)] for s in scales], np.float32)
    assert np.array_equal(np.array(decoded), wanted)


def _e2m1(nibble: int) -> float:
    """From the format's fields: bias 1, one bit of mantissa."""
    sign, exponent, mantissa = -1 if nibble & 8 else 1, nibble >> 1 & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1 if byte & 128 else 1, byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def test_noise_features_of_the_specification() -> None:
    anchor, mask = noise_features(np.array([1000.0, 0.0]))
    assert (anchor[0], anchor[64]) == pytest.approx((0.826880, 0.562379), abs=1e-6)
    assert mask.tolist() == [0.0] * 64 + [1.0] * 64


def test_the_noise_embedding_is_never_quantized(tmp_path: Path) -> None:
    model: Any = load_drafter(saved("prism", tmp_path), quantize_bits=4).model
    assert model.log_snr_embed.fc1.weight.dtype == mx.float32
    assert model.fc.weight.dtype == mx.uint32


@pytest.mark.parametrize(
    ("marks", "gated", "offset"),
    [
        ({"model_type": "qwen3_5", "enable_qwen35_gated_q_proj": False}, False, True),
        ({"model_type": "qwen3", "enable_qwen35_gated_q_proj": True}, True, False),
        ({"model_type": "qwen3_5_text", "enable_qwen35_gated_q_proj": None}, False, False),
    ],
)
def test_each_mark_of_a_native_head_counts_by_itself(
    marks: dict[str, Any], gated: bool, offset: bool, tmp_path: Path
) -> None:
    folder = saved("qwen35", tmp_path)
    config, weights = opened(folder)
    if not gated:
        for name in [name for name in weights if name.endswith("q_proj.weight")]:
            weights[name] = weights[name].reshape(4, 2, 16, -1)[:, 0].reshape(-1, HIDDEN)
    read = read_drafter(put(folder, config | marks, weights))
    assert (read.config.gated, read.config.rope_kind == "partial") == (gated, gated or offset)
    assert np.allclose(np.array(read.weights["norm.weight"]), weights["norm.weight"] + offset)


def test_a_share_of_a_head_rotates_as_an_option_nested_or_not(tmp_path: Path) -> None:
    folder = saved("qwen35", tmp_path)
    config, weights = opened(folder)
    del config["partial_rotary_factor"]
    config["rope_parameters"]["partial_rotary_factor"] = 0.25
    assert read_drafter(put(folder, config, weights)).config.rope_options == {"partial_rotary_factor": 0.25}


def test_nvfp4_may_be_declared_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder = saved("nvfp4", tmp_path)
    wanted = read_drafter(folder).weights
    mx.eval(wanted)
    config, weights = opened(folder)
    algorithm = config.pop("quantization_config")["quant_algo"]
    put(folder, config, weights)
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (folder / nvfp4.BESIDE).write_text(json.dumps(own))
    found = read_drafter(folder).weights
    assert all(mx.array_equal(found[name], weight) for name, weight in wanted.items())
    (folder / nvfp4.BESIDE).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    assert "modelopt's FP8" in _refused(UnsupportedModel, folder)
    (folder / nvfp4.BESIDE).write_text("{")
    assert nvfp4.BESIDE in _refused(BadCheckpoint, folder)


def _refused(kind: type[LoadError], folder: Path) -> str:
    with pytest.raises(kind) as caught:
        read_drafter(folder)
    assert caught.value.next_step
    return caught.value.sentence


@pytest.mark.parametrize(
    ("kind", "change", "error", "named"),
    [
        ("qwen35", {"partial_rotary_factor": None}, BadCheckpoint, "partial_rotary_factor"),
        ("qwen35", {"partial_rotary_factor": 0.1}, BadCheckpoint, "partial_rotary_factor"),
        ("qwen35", {"partial_rotary_factor": 1.5}, BadCheckpoint, "partial_rotary_factor"),
        ("qwen35", {"enable_qwen35_gated_q_proj": 1}, BadCheckpoint, "enable_qwen35_gated_q_proj"),
        ("qwen35", {"enable_qwen35_gated_q_proj": False}, BadCheckpoint, "self_attn.q_proj.weight of shape"),
        ("qwen35", {"log_snr_conditioning": True}, UnsupportedModel, "Qwen 3.5 native and PrismML"),
        ("lfm2", {"rope_is_neox_style": "no"}, BadCheckpoint, "rope_is_neox_style"),
        ("lfm2", {"model_type": "llama"}, UnsupportedModel, "model_type 'llama'"),
        ("lfm2", {"dflash_config": {"target_layer_ids": [0, 1]}}, BadCheckpoint, "lacks mask_token_id"),
        ("prism", {"min_log_snr": None}, BadCheckpoint, "min_log_snr"),
        ("prism", {"min_log_snr": 9}, BadCheckpoint, "min_log_snr"),
        ("prism", {"max_log_snr": "9"}, BadCheckpoint, "max_log_snr"),
        ("prism", {"log_snr_conditioning": 1}, BadCheckpoint, "log_snr_conditioning"),
        ("prism", {"log_snr_conditioning": False}, BadCheckpoint, "unexpected log_snr_embed.fc1.bias"),
        ("nvfp4", {"quantization_config": None}, UnsupportedModel, "stored as U8"),
    ],
)
def test_a_wrong_value_is_named(
    kind: str, change: dict[str, Any], error: type[LoadError], named: str, tmp_path: Path
) -> None:
    folder = saved(kind, tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert named in _refused(error, folder)


ADDED = {
    "qwen35": "layers.1.self_attn.q_proj.weight",
    "lfm2": "layers.1.self_attn.q_norm.weight",
    "prism": "log_snr_embed.fc2.weight",
}


@pytest.mark.parametrize(("kind", "tensor"), ADDED.items())
def test_a_missing_an_extra_a_misshaped_and_a_nan_tensor_are_named(
    kind: str, tensor: str, tmp_path: Path
) -> None:
    folder = saved(kind, tmp_path)
    config, weights = opened(folder)
    without = {name: weight for name, weight in weights.items() if name != tensor}
    assert f"lacks {tensor}" in _refused(BadCheckpoint, put(folder, config, without))
    assert f"unexpected {tensor}2" in _refused(
        BadCheckpoint, put(folder, config, weights | {f"{tensor}2": weights[tensor]})
    )
    assert f"{tensor} of shape" in _refused(
        BadCheckpoint, put(folder, config, weights | {tensor: weights[tensor][:-1]})
    )
    broken = weights[tensor].copy()
    broken.flat[-1] = np.nan
    assert f"{tensor} in" in _refused(BadCheckpoint, put(folder, config, weights | {tensor: broken}))


@pytest.mark.parametrize(
    "damage", ["drop scale", "drop scale 2", "drop codes", "width", "type", "nan", "inf"]
)
def test_parts_in_nvfp4_that_do_not_fit_are_named(damage: str, tmp_path: Path) -> None:
    folder, name = saved("nvfp4", tmp_path), "fc.weight"
    config, weights = opened(folder)
    match damage:
        case "drop scale":
            del weights[f"{name}_scale"]
        case "drop scale 2":
            del weights[f"{name}_scale_2"]
        case "drop codes":
            del weights[name]
        case "width":
            weights[name] = weights[name][:, :-8]
        case "type":
            weights[f"{name}_scale"] = weights[f"{name}_scale"].astype(np.float32)
        case "nan":
            weights[f"{name}_scale"][0, 0] = 0xFF
        case _:
            weights[f"{name}_scale_2"] = np.array(np.inf, np.float32)
    assert "fc" in _refused(BadCheckpoint, put(folder, config, weights))
