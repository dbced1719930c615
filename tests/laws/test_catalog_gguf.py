"""A GGUF file read here is the same numbers, and the same tokens, as the file says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, TokenType
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_dspark.catalog.checkpoint import Checkpoint, load_checkpoint
from mlx_dspark.catalog.gguf_file import GGUFFile, open_gguf
from mlx_dspark.catalog.gguf_model import REPACKINGS, llama_config, llama_weights
from mlx_dspark.catalog.gguf_tokenizer import end_ids, gguf_tokenizer
from mlx_dspark.catalog.resolve import ModelRef, resolve_model
from mlx_dspark.compat.gguf_reader import FastGGUFReader
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel
from mlx_dspark.foundation.paths import default_cache_dir
from tests.tiny import tiny_config, tiny_model, tiny_tokenizer
from tests.tiny_gguf import save_tiny_gguf

KINDS = [GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32")]
PROMPT = mx.array([[5, 9, 120, 300, 7, 7, 44]])


def load(path: Path) -> Checkpoint:
    return load_checkpoint(ModelRef("tiny", path, "gguf", str(path)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_every_weight_is_bit_exact(tmp_path: Path, kind: GGMLQuantizationType, kv_heads: int) -> None:
    dense = save_tiny_gguf(
        tmp_path / "m.gguf", matrices=kind, embedding=kind, num_key_value_heads=kv_heads, head_dim=32
    )
    file = open_gguf(tmp_path / "m.gguf")
    weights, quantization = llama_weights(file, llama_config(file))
    for name, expected in dense.items():
        module = name.removesuffix(".weight")
        found = weights[name]
        if f"{module}.scales" in weights:
            bits = quantization.get(module, quantization)["bits"]
            found = mx.dequantize(
                found, weights[f"{module}.scales"], weights[f"{module}.biases"], group_size=32, bits=bits
            )
        assert found.dtype == mx.float32
        assert np.array_equal(np.array(found), np.array(expected)), name


@pytest.mark.parametrize("kind", list(REPACKINGS), ids=lambda kind: kind.name)
def test_blocks_of_extreme_values_repack_exactly(kind: GGMLQuantizationType) -> None:
    rng = np.random.default_rng(7)
    values = rng.standard_normal((8, 96)).astype(np.float32) * np.float32(10.0) ** rng.integers(
        -6, 4, (8, 96)
    )
    values[0], values[1], values[2, :32] = 0.0, -values[1], 1e-8
    blocks = quantize(values.astype(np.float32), kind)
    bits, repack = REPACKINGS[kind]
    parts = {name: mx.array(part) for name, part in repack(blocks).items()}
    found = mx.dequantize(parts["weight"], parts["scales"], parts["biases"], group_size=32, bits=bits)
    assert np.array_equal(np.array(found), dequantize(blocks, kind))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.F32], ids=lambda kind: kind.name
)
def test_logits_equal_the_dense_model(tmp_path: Path, kind: GGMLQuantizationType, tied: bool) -> None:
    dense = save_tiny_gguf(tmp_path / "m.gguf", matrices=kind, tie_word_embeddings=tied)
    reference = tiny_model(tiny_config("llama", tie_word_embeddings=tied))
    reference.load_weights(list(dense.items()))
    expected, found = np.array(reference(PROMPT)), np.array(load(tmp_path / "m.gguf").model(PROMPT))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))


def test_the_checkpoint_describes_the_file(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf")
    checkpoint = load(tmp_path / "m.gguf")
    expected = tiny_config("llama", tie_word_embeddings=True)
    shared = expected.keys() & checkpoint.config.keys() - {"eos_token_id"}
    assert {key: checkpoint.config[key] for key in shared} == {key: expected[key] for key in shared}
    assert checkpoint.config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert checkpoint.context == 512
    assert checkpoint.eos_token_ids == {0, 2}
    assert checkpoint.tokenizer.has_chat_template
    floats = cast(dict[str, mx.array], tree_flatten(checkpoint.model.parameters(), destination={}))
    assert {array.dtype for array in floats.values()} == {mx.float32, mx.uint32}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "scaled rope"),
        ({"extra_tensor": "rope_freqs.weight"}, "scaled rope"),
        ({"extra_tensor": "blk.0.ffn_gate_inp.weight"}, "blk.0.ffn_gate_inp.weight"),
        ({"matrices": GGMLQuantizationType.Q5_0}, "blk.0.attn_q.weight of type Q5_0"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(UnsupportedModel, match=re.escape(named)) as refusal:
        load(tmp_path / "m.gguf")
    assert refusal.value.next_step


def test_another_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="mamba"):
        llama_config(GGUFFile(Path("m.gguf"), {"general.architecture": "mamba"}, {}))


@pytest.mark.parametrize("keep", [0, 3, 10, 5_000, 40_000, -1])
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


def test_the_fast_reader_equals_the_packages_reader(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf")
    fast, stock = FastGGUFReader(tmp_path / "m.gguf"), GGUFReader(tmp_path / "m.gguf")
    assert {k: f.contents() for k, f in fast.fields.items()} == {
        k: f.contents() for k, f in stock.fields.items()
    }
    assert [(t.name, t.data_offset, t.n_bytes) for t in fast.tensors] == [
        (t.name, t.data_offset, t.n_bytes) for t in stock.tensors
    ]


# Tokenizer ------------------------------------------------------------------------------------------------

DIGITS = ["1", "2", "12", "a", "Ġ", "b", "aĠ", "<|endoftext|>", "<|end|>", "<tool>"]


def digits_file(**metadata: Any) -> GGUFFile:
    """A vocabulary that merges `1` and `2`, with a control token and a user-defined token."""
    control, user, normal = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": DIGITS,
        "tokenizer.ggml.token_type": [normal] * 7 + [control, control, user],
        "tokenizer.ggml.merges": ["1 2", "a Ġ"],
        "tokenizer.ggml.eos_token_id": 8,
    }
    renamed = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return GGUFFile(Path("m.gguf"), base | renamed, {})


def test_smollm_splits_digits_and_gpt2_does_not() -> None:
    assert gguf_tokenizer(digits_file(), 64).encode("12a 12") == [0, 1, 3, 4, 0, 1]
    assert gguf_tokenizer(digits_file(pre="gpt-2"), 64).encode("12a") == [2, 3]


def test_control_and_user_tokens_are_never_split() -> None:
    tokenizer = gguf_tokenizer(digits_file(), 64)
    ids = tokenizer.encode("a<|end|>b<tool>1")
    assert ids == [3, 8, 5, 9, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>1"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, [3]),
        ({"add_bos_token": True, "bos_token_id": 7}, [7, 3]),
        ({"add_eos_token": True}, [3, 8]),
        ({"add_bos_token": True, "bos_token_id": 8, "add_eos_token": True}, [8, 3, 8]),
    ],
)
def test_text_is_wrapped_as_the_metadata_says(metadata: dict[str, Any], expected: list[int]) -> None:
    assert gguf_tokenizer(digits_file(**metadata), 64).encode("a") == expected


@pytest.mark.parametrize(
    ("metadata", "expected"), [({}, {7, 8}), ({"eot_token_id": 9}, {7, 8, 9}), ({"token_type": []}, {8})]
)
def test_every_end_of_sequence_id_is_found(metadata: dict[str, Any], expected: set[int]) -> None:
    assert end_ids(digits_file(**metadata)) == expected
    assert gguf_tokenizer(digits_file(**metadata), 64).eos_token_ids == expected


def test_importing_the_catalog_says_nothing() -> None:
    command = [sys.executable, "-W", "error", "-c", "import mlx_dspark.catalog.gguf_tokenizer"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("metadata", [{"model": "llama"}, {"pre": "llama-bpe"}])
def test_an_unknown_tokenizer_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        gguf_tokenizer(digits_file(**metadata), 64)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"merges": ["x y"]}, "merges"),
        ({"merges": ["1"]}, "merges"),
        ({"eos_token_id": 99}, "eos_token_id 99"),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_key(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=named):
        gguf_tokenizer(digits_file(**metadata), 64)


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    save_tiny_gguf(path)
    return gguf_tokenizer(open_gguf(path), 512)


@given(st.text(max_size=60))
def test_the_rebuilt_tokenizer_equals_the_one_it_was_written_from(rebuilt: Any, text: str) -> None:
    assert rebuilt.encode(text) == tiny_tokenizer().encode(text)
    assert rebuilt.decode(rebuilt.encode(text)) == text


@pytest.mark.weights
def test_the_default_models_tokenizer() -> None:
    file = open_gguf(resolve_model(None, cache_dir=default_cache_dir()).path)
    tokenizer = gguf_tokenizer(file, 8192)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.encode("The capital of France is Paris.") == [504, 3575, 282, 4649, 314, 7042, 30]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 1984,  ok")] == [
        "in",
        " ",
        "1",
        "9",
        "8",
        "4",
        ",",
        " ",
        " ok",
    ]
    for text in (
        "naïve café – 日本語 👩‍🚀",
        "\tdef f(x):\n\n        return x**2\n",
        "<|im_start|>user\n1+1=2<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("first", ["user", "system"])
def test_the_chat_template_adds_its_system_line_unless_there_is_one(rebuilt: Any, first: str) -> None:
    messages = [{"role": first, "content": "Café 日本"}, {"role": "user", "content": "hi"}]
    text = rebuilt.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ("You are a tiny test model." in text) == (first == "user")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
