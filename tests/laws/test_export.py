"""An exported folder is the same model to stock mlx-lm: same weights, same tokens, same end of sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from gguf import GGMLQuantizationType
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from mlx_dspark.catalog.checkpoint import Checkpoint, load_checkpoint
from mlx_dspark.catalog.export import export_model
from mlx_dspark.catalog.resolve import resolve_model
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.paths import default_cache_dir
from tests.tiny import save_tiny
from tests.tiny_gguf import WIDE, save_tiny_gguf
from tests.tiny_sentencepiece import sentencepiece_keys

TEXTS = ["Tell me about 12 cafés.", "def print(self):", "日本 and the world"]


def greedy(model: nn.Module, prompt: list[int], tokens: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]


def load(path: Path) -> Checkpoint:
    return load_checkpoint(resolve_model(str(path), cache_dir=path.parent, offline=True))


def chat(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)


def assert_equal_in_stock_mlx_lm(checkpoint: Checkpoint, folder: Path, tokens: int) -> None:
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    ours, stock = dict(tree_flatten(checkpoint.model.parameters())), dict(tree_flatten(model.parameters()))
    assert ours.keys() == stock.keys()
    for name in ours:
        assert ours[name].dtype == stock[name].dtype
        assert mx.array_equal(ours[name], stock[name]).item(), name
    assert tokenizer.eos_token_ids == checkpoint.eos_token_ids
    for text in TEXTS:
        prompt = chat(checkpoint.tokenizer, text)
        assert chat(tokenizer, text) == prompt
        assert tokenizer.decode(prompt) == checkpoint.tokenizer.decode(prompt)
        assert greedy(model, prompt, tokens) == greedy(checkpoint.model, prompt, tokens)


GGUF_FORMS = [
    {},
    {"tie_word_embeddings": False},
    {"family": "qwen2", "matrices": GGMLQuantizationType.Q5_1},
    {"family": "gemma3_text", "query_pre_attn_scalar": 64, "matrices": GGMLQuantizationType.Q6_K, **WIDE},
    {"metadata": sentencepiece_keys(leads=True), "without": ("tokenizer.ggml.merges",)},
    {"metadata": sentencepiece_keys(leads=False), "matrices": GGMLQuantizationType.BF16},
]


@pytest.mark.parametrize("form", GGUF_FORMS)
def test_a_gguf_export_equals_its_checkpoint(tmp_path: Path, form: dict[str, Any]) -> None:
    save_tiny_gguf(tmp_path / "tiny.gguf", **form)
    checkpoint = load(tmp_path / "tiny.gguf")
    folder = export_model(checkpoint, tmp_path / "out")
    assert_equal_in_stock_mlx_lm(checkpoint, folder, 40)
    assert load(folder).eos_token_ids == checkpoint.eos_token_ids


@pytest.mark.parametrize("form", [{}, {"family": "qwen3"}, {"bits": 4}, {"dtype": mx.bfloat16, "bits": 8}])
def test_a_folder_export_equals_its_checkpoint(tmp_path: Path, form: dict[str, Any]) -> None:
    checkpoint = load(save_tiny(tmp_path / "model", **form))
    assert_equal_in_stock_mlx_lm(checkpoint, export_model(checkpoint, tmp_path / "out"), 40)


@pytest.mark.weights
@pytest.mark.slow
def test_the_default_model_exports_to_the_same_greedy_tokens(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(resolve_model(None, cache_dir=default_cache_dir()))
    assert checkpoint.eos_token_ids == {0, 2}
    assert_equal_in_stock_mlx_lm(checkpoint, export_model(checkpoint, tmp_path / "out"), 16)


def test_an_empty_folder_is_filled_and_a_full_one_refused(tmp_path: Path) -> None:
    checkpoint = load(save_tiny(tmp_path / "model"))
    (tmp_path / "out").mkdir()
    export_model(checkpoint, tmp_path / "out")
    for taken in (tmp_path / "out", tmp_path / "out" / "config.json"):
        with pytest.raises(UsageError, match="exists and is not an empty folder") as refusal:
            export_model(checkpoint, taken)
        assert refusal.value.field == "directory"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    checkpoint = load(save_tiny(tmp_path / "model"))
    with pytest.raises(UsageError, match="cannot be written"):
        export_model(checkpoint, tmp_path / "model" / "config.json" / "out")


class Placed(nn.Linear):
    """Stands for a module that a kernel put over a stock one."""


Placed.__module__ = "mlx_dspark.kernels.placed"


def test_a_model_with_kernels_in_place_is_refused(tmp_path: Path) -> None:
    checkpoint = load(save_tiny(tmp_path / "model"))
    checkpoint.model.update_modules({"lm_head": Placed(64, 384, bias=False)})
    with pytest.raises(UsageError, match="lm_head"):
        export_model(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
