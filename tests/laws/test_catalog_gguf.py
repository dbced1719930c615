"""A GGUF file read here is the same numbers, and the same tokens, as the file says."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize
from mlx.utils import tree_flatten

from mlx_dspark.catalog.checkpoint import Checkpoint, load_checkpoint
from mlx_dspark.catalog.gguf.blocks import GRIDS, pack
from mlx_dspark.catalog.gguf.file import GGUFFile, open_gguf
from mlx_dspark.catalog.gguf.layouts import LAYOUTS, gguf_config
from mlx_dspark.catalog.gguf.model import build_model, load_weights
from mlx_dspark.catalog.gguf.weights import float_type, read_tensor
from mlx_dspark.catalog.resolve import ModelRef
from mlx_dspark.compat.gguf_reader import FastGGUFReader
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.caps import FixedCaps
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.targets.load import target_of
from tests.fakes import stock_greedy
from tests.tiny import tiny_config, tiny_model
from tests.tiny_gguf import ARCHITECTURES, WIDE, random_blocks, save_tiny_gguf

T = GGMLQuantizationType
EXACT = [T[name] for name in ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"]]
LOSSY = [
    T[name]
    for name in [
        "Q2_K",
        "Q3_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
        "IQ3_S",
        "IQ2_XXS",
        "IQ1_S",
        "TQ1_0",
        "TQ2_0",
        "MXFP4",
    ]
]
PROMPT = [5, 9, 120, 300, 7, 7, 44, *range(60, 90)]
NEW = 24

families = pytest.mark.parametrize("family", list(ARCHITECTURES))


def kinds(which: list[GGMLQuantizationType]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", which, ids=lambda kind: kind.name)


def load(path: Path) -> Checkpoint:
    return load_checkpoint(ModelRef("tiny", path, "gguf", str(path)))


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
    checkpoint = load(tmp_path / "m.gguf")
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
    checkpoint = load(tmp_path / "m.gguf")
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
    checkpoint = load(tmp_path / "m.gguf")
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


@kinds([T.Q4_K, T.Q6_K, T.Q8_0, T.BF16])
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
    assert (error == 0) == (kind in (T.Q8_0, T.BF16))


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
        load(tmp_path / "m.gguf")


# Layouts --------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_untied_models_and_other_head_counts(tmp_path: Path, family: str, kv_heads: int) -> None:
    fields: dict[str, Any] = {"tie_word_embeddings": False, "num_key_value_heads": kv_heads, **sizes(family)}
    if family in ("llama", "qwen3"):
        fields["head_dim"] = 32
    dense = save_tiny_gguf(tmp_path / "m.gguf", family=family, **fields)
    model, ids = reference(family, dense, **fields), mx.array([PROMPT])
    assert_close(load(tmp_path / "m.gguf").model(ids), model(ids))


@pytest.mark.parametrize("fields", [{"attention_bias": True}, {"mlp_bias": True}])
def test_llamas_with_biases(tmp_path: Path, fields: dict[str, Any]) -> None:
    dense = save_tiny_gguf(tmp_path / "m.gguf", **fields)
    model, ids = reference("llama", dense, **fields), mx.array([PROMPT])
    assert_close(load(tmp_path / "m.gguf").model(ids), model(ids))


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
    checkpoint = load(tmp_path / "m.gguf")
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
    assert_close(load(tmp_path / "m.gguf").model(ids), reference(family, dense, **fields)(ids))


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
    found, model = load(tmp_path / "m.gguf"), reference("llama", dense, **fields)
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
    assert_close(load(tmp_path / "m.gguf").model(ids), model(ids))


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
    assert load(tmp_path / "m.gguf").config["num_key_value_heads"] == 2


# Refusals -------------------------------------------------------------------------------------------------

ONES = np.ones(32, np.float32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "a scaled rope of type 'longrope'"),
        (
            {
                "metadata": {
                    "llama.rope.scaling.type": "yarn",
                    "llama.rope.scaling.factor": 4.0,
                    "llama.rope.scaling.attn_factor": 2.0,
                }
            },
            "attn_factor",
        ),
        ({"tensors": {"rope_freqs.weight": np.arange(8, dtype=np.float32)}}, "rope factors"),
        ({"tensors": {"blk.0.ffn_gate_inp.weight": ONES}}, "blk.0.ffn_gate_inp.weight"),
        ({"tensors": {"rope_factors_long.weight": ONES}}, "rope_factors_long.weight"),
        ({"metadata": {"llama.expert_count": 8}}, "llama.expert_count 8"),
        ({"metadata": {"llama.final_logit_softcapping": 30.0}}, "final_logit_softcapping 30.0"),
        ({"metadata": {"llama.attention.sliding_window": 64}}, "sliding windows"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "partly rotated"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 1]}}, "layers that differ in llama.attention"),
        ({"metadata": {"general.architecture": "mamba"}}, "the architecture 'mamba'"),
        ({"metadata": {"general.architecture": "qwen3moe"}}, "the architecture 'qwen3moe'"),
        ({"metadata": {"general.architecture": "clip"}}, "an image encoder"),
        ({"family": "gemma3_text", "metadata": {"gemma3.final_logit_softcapping": 30.0}}, "softcapping"),
        (
            {
                "family": "gemma3_text",
                "metadata": {"gemma3.attention.sliding_window_pattern": [True, False, False]},
            },
            "sliding windows without a period",
        ),
        (
            {
                "family": "qwen2",
                "metadata": {"qwen2.attention.key_length": 32, "qwen2.attention.value_length": 32},
            },
            "heads that do not divide",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(UnsupportedModel, match=re.escape(named)) as refusal:
        load(tmp_path / "m.gguf")
    assert "m.gguf" in refusal.value.sentence
    assert refusal.value.next_step


def test_what_can_be_run_is_listed(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", metadata={"general.architecture": "qwen3moe"})
    with pytest.raises(UnsupportedModel) as refusal:
        load(tmp_path / "m.gguf")
    assert "llama, qwen2, qwen3, gemma3" in refusal.value.next_step


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"without": ("blk.1.attn_q.weight",)}, "lacks the tensor blk.1.attn_q.weight"),
        ({"without": ("token_embd.weight",)}, "lacks the tensor token_embd.weight"),
        ({"family": "qwen2", "without": ("blk.0.attn_k.bias",)}, "lacks the tensor blk.0.attn_k.bias"),
        ({"family": "gemma3_text", "without": ("blk.2.post_ffw_norm.weight",)}, "blk.2.post_ffw_norm.weight"),
        ({"without": ("llama.block_count",)}, "lacks the metadata key llama.block_count"),
        ({"metadata": {"llama.block_count": 3}}, "lacks the tensor blk.2.attn_q.weight"),
        ({"metadata": {"llama.block_count": "two"}}, "llama.block_count in "),
        ({"metadata": {"llama.block_count": 2**31 - 1}}, "claims 2147483647 layers"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, "4 heads on 3"),
        ({"metadata": {"llama.embedding_length": 0}}, "llama.embedding_length in "),
        ({"metadata": {"llama.feed_forward_length": 64}}, "blk.0.ffn_gate.weight in shape (128, 64)"),
        ({"metadata": {"llama.rope.freq_base": "high"}}, "llama.rope.freq_base in "),
        ({"metadata": {"tokenizer.ggml.tokens": ["x"] * 400}}, "400 tokens and 384 rows"),
        ({"metadata": {"tokenizer.chat_template": 7}}, "tokenizer.chat_template in "),
    ],
)
def test_what_is_missing_or_senseless_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(BadCheckpoint, match=re.escape(named)) as refusal:
        load(tmp_path / "m.gguf")
    assert "m.gguf" in refusal.value.sentence
    assert refusal.value.next_step


# Files ----------------------------------------------------------------------------------------------------


def part(tmp_path: Path, number: int, count: int = 3) -> Path:
    return tmp_path / f"m-{number:05d}-of-{count:05d}.gguf"


@pytest.mark.parametrize("named", [1, 2])
def test_a_split_model_equals_a_whole_one(tmp_path: Path, named: int) -> None:
    save_tiny_gguf(tmp_path / "whole.gguf")
    save_tiny_gguf(tmp_path / "m.gguf", parts=3)
    whole, split = load(tmp_path / "whole.gguf"), load(part(tmp_path, named))
    ids = mx.array([PROMPT])
    assert mx.array_equal(split.model(ids), whole.model(ids)).item()
    assert split.files == tuple(part(tmp_path, number) for number in (1, 2, 3))
    assert len(split.content_hash) == 64


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", parts=3)
    part(tmp_path, 3).unlink()
    with pytest.raises(BadCheckpoint, match=r"m-00003-of-00003\.gguf is missing"):
        load(part(tmp_path, 1))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", parts=3)
    second = part(tmp_path, 2).read_bytes()
    part(tmp_path, 3).write_bytes(second)
    with pytest.raises(BadCheckpoint, match=r"m-00003-of-00003\.gguf is not part 3 of 3"):
        load(part(tmp_path, 1))
    part(tmp_path, 1).rename(tmp_path / "renamed.gguf")
    with pytest.raises(BadCheckpoint, match=r"renamed\.gguf is one part of 3, and its name"):
        load(tmp_path / "renamed.gguf")


@pytest.mark.parametrize("keep", [0, 3, 6, 10, 5_000, 40_000, -1])
def test_a_shortened_file_is_refused(tmp_path: Path, keep: int) -> None:
    save_tiny_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[:keep])
    with pytest.raises(BadCheckpoint, match=r"m\.gguf"):
        open_gguf(tmp_path / "m.gguf")


def test_a_shortened_file_says_what_is_missing(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf")
    tensors = open_gguf(tmp_path / "m.gguf").tensors.values()
    end = max(tensor.data_offset + tensor.n_bytes for tensor in tensors)
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[: end - 1])
    with pytest.raises(BadCheckpoint, match=f"is cut short: {end - 1} bytes in place of {end}\\."):
        open_gguf(tmp_path / "m.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("this is not a model\n" * 50)
    with pytest.raises(BadCheckpoint, match="is not a GGUF file"):
        open_gguf(tmp_path / "m.gguf")


def test_other_versions_and_byte_orders_are_refused(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for version, error, named in (
        (struct.pack(">I", 3), UnsupportedModel, "is a big-endian GGUF file"),
        (struct.pack("<I", 1), BadCheckpoint, "is not a readable GGUF file"),
    ):
        (tmp_path / "m.gguf").write_bytes(data[:4] + version + data[8:])
        with pytest.raises(error, match=named) as refusal:
            open_gguf(tmp_path / "m.gguf")
        assert refusal.value.next_step


def test_the_fast_reader_equals_the_packages_reader(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf")
    fast, stock = FastGGUFReader(tmp_path / "m.gguf"), GGUFReader(tmp_path / "m.gguf")
    assert {k: f.contents() for k, f in fast.fields.items()} == {
        k: f.contents() for k, f in stock.fields.items()
    }
    assert [(t.name, t.data_offset, t.n_bytes) for t in fast.tensors] == [
        (t.name, t.data_offset, t.n_bytes) for t in stock.tensors
    ]
