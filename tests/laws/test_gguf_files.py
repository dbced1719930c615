"""What a GGUF file lacks, or has and cannot be run, is refused by name; a split file is one model."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGUFReader

from mlx_dspark.catalog.gguf.file import open_gguf
from mlx_dspark.compat.gguf_reader import FastGGUFReader
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel
from tests.tiny_gguf import load_gguf, save_tiny_gguf

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
        load_gguf(tmp_path / "m.gguf")
    assert "m.gguf" in refusal.value.sentence
    assert refusal.value.next_step


def test_what_can_be_run_is_listed(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", metadata={"general.architecture": "qwen3moe"})
    with pytest.raises(UnsupportedModel) as refusal:
        load_gguf(tmp_path / "m.gguf")
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
        ({"metadata": {"llama.rope.freq_base": 0.0}}, "llama.rope.freq_base in "),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": -1.0}}, "rms_epsilon in "),
        (
            {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}},
            "llama.rope.scaling.factor in ",
        ),
        ({"metadata": {"tokenizer.ggml.tokens": ["x"] * 400}}, "400 tokens and 384 rows"),
        ({"metadata": {"tokenizer.chat_template": 7}}, "tokenizer.chat_template in "),
    ],
)
def test_what_is_missing_or_senseless_is_named(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(BadCheckpoint, match=re.escape(named)) as refusal:
        load_gguf(tmp_path / "m.gguf")
    assert "m.gguf" in refusal.value.sentence
    assert refusal.value.next_step


# Files ----------------------------------------------------------------------------------------------------


def part(tmp_path: Path, number: int, count: int = 3) -> Path:
    return tmp_path / f"m-{number:05d}-of-{count:05d}.gguf"


@pytest.mark.parametrize("named", [1, 2])
def test_a_split_model_equals_a_whole_one(tmp_path: Path, named: int) -> None:
    save_tiny_gguf(tmp_path / "whole.gguf")
    save_tiny_gguf(tmp_path / "m.gguf", parts=3)
    whole, split = load_gguf(tmp_path / "whole.gguf"), load_gguf(part(tmp_path, named))
    ids = mx.array([[5, 9, 120, 300, 7, 7, 44]])
    assert mx.array_equal(split.model(ids), whole.model(ids)).item()
    assert split.files == tuple(part(tmp_path, number) for number in (1, 2, 3))
    assert len(split.content_hash) == 64


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", parts=3)
    part(tmp_path, 3).unlink()
    with pytest.raises(BadCheckpoint, match=r"m-00003-of-00003\.gguf is missing"):
        load_gguf(part(tmp_path, 1))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", parts=3)
    second = part(tmp_path, 2).read_bytes()
    part(tmp_path, 3).write_bytes(second)
    with pytest.raises(BadCheckpoint, match=r"m-00003-of-00003\.gguf is not part 3 of 3"):
        load_gguf(part(tmp_path, 1))
    part(tmp_path, 1).rename(tmp_path / "renamed.gguf")
    with pytest.raises(BadCheckpoint, match=r"renamed\.gguf is one part of 3, and its name"):
        load_gguf(tmp_path / "renamed.gguf")


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


def test_a_file_that_ends_in_its_header_is_cut_short_wherever_it_ends(tmp_path: Path) -> None:
    """No word of the reader's own reaches the user."""
    path = tmp_path / "whole.gguf"
    save_tiny_gguf(path)
    whole = path.read_bytes()
    for keep in [*range(4, 300), *range(300, 6000, 97)]:
        path.write_bytes(whole[:keep])
        with pytest.raises(BadCheckpoint, match="is cut short: "):
            open_gguf(path)


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
