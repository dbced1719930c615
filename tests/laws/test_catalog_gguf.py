"""A GGUF file read here is the same numbers, and the same tokens, as the file says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

from mlx_dspark.catalog.gguf.blocks import GRIDS, pack
from mlx_dspark.catalog.gguf.file import GGUFFile, open_gguf
from mlx_dspark.catalog.gguf.layouts import LAYOUTS, gguf_config
from mlx_dspark.catalog.gguf.model import build_model, load_weights
from mlx_dspark.catalog.gguf.weights import float_type, read_tensor
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.targets.load import target_of
from tests.fakes import stock_greedy
from tests.tiny import tiny_config, tiny_model
from tests.tiny_gguf import ARCHITECTURES, WIDE, load_gguf, random_blocks, save_tiny_gguf

T = GGMLQuantizationType
EXACT = [T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K]
LOSSY = [T.Q2_K, T.Q3_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS, T.IQ3_S, T.IQ2_XXS, T.IQ1_S, T.TQ1_0, T.TQ2_0]
PROMPT = [5, 9, 120, 300, 7, 7, 44, *range(60, 90)]
NEW = 24

families = pytest.mark.parametrize("family", list(ARCHITECTURES))


def kinds(which: list[GGMLQuantizationType]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", which, ids=lambda kind: kind.name)


def sizes(family: str, kind: GGMLQuantizationType = T.F32) -> dict[str, Any]:
    """Config fields that blocks of `kind` fit, and two rope bases that differ."""
    fields = dict(WIDE) if GGML_QUANT_SIZES[kind][0] == 256 else {}
    if family == "gemma3_text":
        fields |= {"rope_theta": 1e6, "query_pre_attn_scalar": fields.get("head_dim", 16)}
    return fields


def dense_weights(model: nn.Module) -> dict[str, np.ndarray]:
    """Every weight of a model in float32, what is quantized dequantized."""
    held = cast(dict[str, mx.array], tree_flatten(model.parameters(), destination={}))
    bits = {name: module.bits for name, module in model.named_modules() if hasattr(module, "bits")}
    dense = {}
    for name, array in held.items():
        module, _, leaf = name.rpartition(".")
        if module in bits and leaf in ("scales", "biases"):
            continue
        if module in bits and leaf == "weight":
            scales, biases = held[f"{module}.scales"], held[f"{module}.biases"]
            array = mx.dequantize(array, scales, biases, group_size=32, bits=bits[module])
        dense[name] = np.array(array.astype(mx.float32))
    return dense


def reference(family: str, dense: dict[str, mx.array], **fields: Any) -> Any:
    """mlx-lm's own model with the weights that a file stands for."""
    model = tiny_model(tiny_config(family, **({"tie_word_embeddings": True} | fields)))
    model.load_weights(list(dense.items()))
    return model


def assert_close(found: mx.array, expected: mx.array) -> None:
    right = np.array(expected)
    np.testing.assert_allclose(np.array(found), right, rtol=1e-4, atol=1e-5 * float(np.abs(right).max()))


# Weights --------------------------------------------------------------------------------------------------


@families
@kinds(EXACT)
def test_an_exact_format_gives_the_files_model(
    tmp_path: Path, family: str, kind: GGMLQuantizationType
) -> None:
    dense = save_tiny_gguf(tmp_path / "m.gguf", family=family, matrices=kind, **sizes(family, kind))
    checkpoint = load_gguf(tmp_path / "m.gguf")
    found = dense_weights(checkpoint.model)
    assert found.keys() == dense.keys()
    for name, expected in dense.items():
        assert np.array_equal(found[name], np.array(expected)), name
    assert checkpoint.requantized is None
    model, ids = reference(family, dense, **sizes(family, kind)), mx.array([PROMPT])
    assert_close(checkpoint.model(ids), model(ids))


@families
@kinds([T.F32, T.Q4_K, T.Q6_K])
def test_speculation_on_a_gguf_model_equals_stock_greedy(
    tmp_path: Path, family: str, kind: GGMLQuantizationType
) -> None:
    dense = save_tiny_gguf(tmp_path / "m.gguf", family=family, matrices=kind, **sizes(family, kind))
    checkpoint = load_gguf(tmp_path / "m.gguf")
    plain = checkpoint.model if kind is T.Q6_K else reference(family, dense, **sizes(family, kind))
    expected = stock_greedy(plain, PROMPT, NEW)
    target = target_of(checkpoint.model, checkpoint.config)
    engine = Engine(target, LookupDrafter(min_n=1, max_n=2, max_draft=4), cap=FixedCaps({"lookup": 4}))
    events = engine.stream(GenerateRequest(tuple(PROMPT), NEW))
    assert [t for e in events if isinstance(e, Committed) for t in e.tokens] == expected


@families
@kinds(LOSSY)
def test_what_a_format_lost_is_reported(tmp_path: Path, family: str, kind: GGMLQuantizationType) -> None:
    dense = save_tiny_gguf(tmp_path / "m.gguf", family=family, matrices=kind, **sizes(family, kind))
    checkpoint = load_gguf(tmp_path / "m.gguf")
    found, report = dense_weights(checkpoint.model), checkpoint.requantized
    errors = {
        name: float(np.linalg.norm(found[name] - expected) / np.linalg.norm(expected))
        for name, expected in ((name, np.array(value)) for name, value in dense.items())
    }
    lossy = {name: error for name, error in errors.items() if error}
    assert report is not None
    assert all(name.endswith("_proj.weight") for name in lossy)
    assert (report.types, report.tensors) == ((kind.name,), len(lossy))
    assert report.mean == pytest.approx(sum(lossy.values()) / len(lossy), rel=1e-3)
    assert report.worst == pytest.approx(max(lossy.values()), rel=1e-3)
    assert LAYOUTS[ARCHITECTURES[family]].name(report.tensor) in lossy
    assert report.worst < 0.01
    assert f"{report.worst:.2%} in {report.tensor}" in str(report)


@kinds(list(GRIDS))
def test_blocks_of_extreme_values_repack_exactly(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(7)
    if GGML_QUANT_SIZES[kind][0] == 256:
        blocks = np.concatenate([random_blocks((2, 512), kind, rng, size) for size in (1e-6, 1.0, 1e3)])
    else:
        values = rng.standard_normal((8, 96)) * 10.0 ** rng.integers(-6, 4, (8, 96))
        values[0], values[1], values[2, :32] = 0.0, -values[1], 1e-8
        blocks = quantize(values.astype(np.float32), kind)
    bits, read, half = GRIDS[kind]
    codes, scales, biases = read(blocks)
    found = mx.dequantize(mx.array(pack(codes, bits)), mx.array(scales), mx.array(biases), 32, bits)
    assert np.array_equal(np.array(found), dequantize(blocks, kind))
    assert not half or np.array_equal(scales.astype(np.float16).astype(np.float32), scales)


@kinds([T.F32, T.Q4_K, T.Q6_K, T.Q8_0])
def test_slices_join_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: GGMLQuantizationType
) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", matrices=kind, **WIDE)
    file = open_gguf(tmp_path / "m.gguf")
    tensor = file.tensors["blk.0.ffn_up.weight"]
    whole, whole_error = read_tensor(file, tensor, mx.float32)
    monkeypatch.setattr("mlx_dspark.catalog.gguf.weights._AT_ONCE", 256 * 100)
    sliced, sliced_error = read_tensor(file, tensor, mx.float32)
    assert all(mx.array_equal(whole[part], sliced[part]).item() for part in whole)
    assert sliced_error == pytest.approx(whole_error, rel=1e-5)


@kinds([T.Q4_K, T.Q6_K, T.F32, T.Q8_0, T.F16])
def test_rounding_to_half_precision_is_reported(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", matrices=kind, **WIDE)
    file = open_gguf(tmp_path / "m.gguf")
    tensor = file.tensors["blk.0.ffn_up.weight"]
    parts, error = read_tensor(file, tensor, mx.float16)
    exact = dequantize(tensor.data, kind)
    found = parts["weight"]
    if "scales" in parts:
        bits = GRIDS[kind].bits if kind in GRIDS else 8
        scales, biases = (parts[part].astype(mx.float32) for part in ("scales", "biases"))
        found = mx.dequantize(found, scales, biases, group_size=32, bits=bits)
    difference = np.linalg.norm(np.array(found.astype(mx.float32)) - exact) / np.linalg.norm(exact)
    assert error == pytest.approx(difference, rel=1e-3, abs=1e-7)
    assert (error == 0) == (kind in (T.Q8_0, T.F16))


@pytest.mark.parametrize(
    ("matrices", "on_cpu", "expected"),
    [
        ([T.Q4_K, T.BF16], True, mx.float32),
        ([T.Q4_K, T.BF16], False, mx.float16),
        ([T.F16], False, mx.float16),
        ([T.BF16], False, mx.bfloat16),
        ([T.F32], False, mx.float32),
    ],
)
def test_the_type_that_is_computed_in(
    tmp_path: Path, matrices: list[GGMLQuantizationType], on_cpu: bool, expected: mx.Dtype
) -> None:
    fields: dict[str, Any] = {"embedding": matrices[-1], **WIDE}
    save_tiny_gguf(tmp_path / "m.gguf", matrices=matrices[0], **fields)
    tensors = open_gguf(tmp_path / "m.gguf").tensors.values()
    assert float_type(tensors, on_cpu=on_cpu) == expected


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", matrices=T.Q6_K, **WIDE)
    tensor = open_gguf(tmp_path / "m.gguf").tensors["blk.1.ffn_up.weight"]
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    data[tensor.data_offset + 208 : tensor.data_offset + 210] = np.float16(math.nan).tobytes()
    (tmp_path / "m.gguf").write_bytes(bytes(data))
    with pytest.raises(BadCheckpoint, match=r"blk\.1\.ffn_up\.weight that are not finite"):
        load_gguf(tmp_path / "m.gguf")


# Layouts --------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_untied_models_and_other_head_counts(tmp_path: Path, family: str, kv_heads: int) -> None:
    fields: dict[str, Any] = {"tie_word_embeddings": False, "num_key_value_heads": kv_heads, **sizes(family)}
    if family in ("llama", "qwen3"):
        fields["head_dim"] = 32
    dense = save_tiny_gguf(tmp_path / "m.gguf", family=family, **fields)
    model, ids = reference(family, dense, **fields), mx.array([PROMPT])
    assert_close(load_gguf(tmp_path / "m.gguf").model(ids), model(ids))


@pytest.mark.parametrize("fields", [{"attention_bias": True}, {"mlp_bias": True}])
def test_llamas_with_biases(tmp_path: Path, fields: dict[str, Any]) -> None:
    dense = save_tiny_gguf(tmp_path / "m.gguf", **fields)
    model, ids = reference("llama", dense, **fields), mx.array([PROMPT])
    assert_close(load_gguf(tmp_path / "m.gguf").model(ids), model(ids))


@families
@pytest.mark.parametrize(
    ("kind", "dtype"), [(T.Q4_K, mx.float16), (T.BF16, mx.bfloat16), (T.F16, mx.float16)]
)
def test_a_model_in_half_precision(
    tmp_path: Path, family: str, kind: GGMLQuantizationType, dtype: mx.Dtype
) -> None:
    fields: dict[str, Any] = {"embedding": kind, **WIDE, "query_pre_attn_scalar": 64}
    dense = save_tiny_gguf(tmp_path / "m.gguf", family=family, matrices=kind, **fields)
    file = open_gguf(tmp_path / "m.gguf")
    config = gguf_config(file)
    assert float_type(file.tensors.values(), on_cpu=False) == dtype
    model = build_model(file, config)
    report = load_weights(file, model, config, dtype)
    held = cast(dict[str, mx.array], tree_flatten(model.parameters(), destination={}))
    assert {array.dtype for array in held.values()} - {mx.uint32} == {dtype}
    for name, found in dense_weights(model).items():
        exact = np.array(dense[name])
        assert np.linalg.norm(found - exact) < 4e-3 * np.linalg.norm(exact), name
        if name.endswith("_proj.weight"):
            assert np.array_equal(found, exact) == (kind is not T.Q4_K)
    assert (report is None) == (kind is not T.Q4_K)


@families
def test_the_checkpoint_describes_the_file(tmp_path: Path, family: str) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", family=family, **sizes(family))
    checkpoint = load_gguf(tmp_path / "m.gguf")
    expected = tiny_config(family, **({"tie_word_embeddings": True} | sizes(family)))
    shared = expected.keys() & checkpoint.config.keys() - {"eos_token_id", "architectures"}
    assert {key: checkpoint.config[key] for key in shared} == {key: expected[key] for key in shared}
    section: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "affine"}
    section["model.embed_tokens"] = {"group_size": 32, "bits": 8}
    assert checkpoint.config["quantization"] == section
    assert checkpoint.context == 512
    assert checkpoint.eos_token_ids == {0, 2}
    assert checkpoint.tokenizer.has_chat_template
    floats = cast(dict[str, mx.array], tree_flatten(checkpoint.model.parameters(), destination={}))
    assert {array.dtype for array in floats.values()} == {mx.float32, mx.uint32}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"scaling.type": "none"}, None),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_scaled_rope_is_honoured(
    tmp_path: Path, family: str, metadata: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    keys = {f"{ARCHITECTURES[family]}.rope.{key}": value for key, value in metadata.items()}
    dense = save_tiny_gguf(tmp_path / "m.gguf", family=family, matrices=T.F32, metadata=keys)
    fields = {} if scaling is None else {"rope_scaling": scaling}
    ids = mx.array([PROMPT])
    assert_close(load_gguf(tmp_path / "m.gguf").model(ids), reference(family, dense, **fields)(ids))


def llama3_factors(factor: float, base: float, dims: int) -> np.ndarray:
    """As llama.cpp's converter writes rope_freqs, frequency by frequency."""
    factors = []
    for i in range(0, dims, 2):
        wavelength = 2 * math.pi * base ** (i / dims)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope_is_honoured(tmp_path: Path, factor: float) -> None:
    fields: dict[str, Any] = {"rope_theta": 500000.0, "head_dim": 64}
    factors = {"rope_freqs.weight": llama3_factors(factor, 500000.0, 64)}
    dense = save_tiny_gguf(tmp_path / "m.gguf", matrices=T.F32, tensors=factors, **fields)
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    fields["rope_scaling"] = scaling | {"original_max_position_embeddings": 8192}
    ids = mx.array([PROMPT])
    found, model = load_gguf(tmp_path / "m.gguf"), reference("llama", dense, **fields)
    assert found.config["rope_scaling"] == fields["rope_scaling"]
    assert_close(found.model(ids), model(ids))


@pytest.mark.parametrize("pattern", [3, [True, True, False], None])
@pytest.mark.parametrize("scaled", [True, False])
def test_gemma_windows_and_its_two_ropes(tmp_path: Path, pattern: Any, scaled: bool) -> None:
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0} if scaled else {}
    metadata = {"gemma3.rope.freq_base_swa": 20000.0, **scaling}
    fields = {**sizes("gemma3_text"), "rope_local_base_freq": 20000.0}
    key = "gemma3.attention.sliding_window_pattern"
    if pattern is None:
        fields |= {"num_hidden_layers": 7, "sliding_window_pattern": 6}
    else:
        metadata[key] = pattern
    dense = save_tiny_gguf(
        tmp_path / "m.gguf",
        family="gemma3_text",
        matrices=T.F32,
        metadata=metadata,
        without=() if pattern else (key,),
        **fields,
    )
    if scaled:
        fields["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    model, ids = reference("gemma3_text", dense, **fields), mx.array([PROMPT])
    assert_close(load_gguf(tmp_path / "m.gguf").model(ids), model(ids))


def test_the_27b_gemma_scales_queries_by_its_hidden_size() -> None:
    file: dict[str, Any] = {
        "general.architecture": "gemma3",
        "gemma3.embedding_length": 5376,
        "gemma3.attention.head_count": 32,
        "gemma3.attention.key_length": 128,
        "gemma3.block_count": 62,
        "gemma3.feed_forward_length": 21504,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.context_length": 131072,
    }
    tensor = cast(Any, type("Embedding", (), {"shape": (5376, 262144)}))
    tensors = {"token_embd.weight": tensor} | {f"blk.{layer}": tensor for layer in range(62)}
    assert gguf_config(GGUFFile(Path("m"), file, tensors))["query_pre_attn_scalar"] == 168


def test_a_list_that_says_the_same_for_every_layer_is_one_value(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", metadata={"llama.attention.head_count_kv": [2, 2]})
    assert load_gguf(tmp_path / "m.gguf").config["num_key_value_heads"] == 2
