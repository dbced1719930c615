"""Quantized keys and values: text equals stock mlx-lm's with quantized caches, or a refusal says why not."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache

import mlx_dspark
from mlx_dspark.contracts import Drafter
from mlx_dspark.drafters.lookup import LookupDrafter
from mlx_dspark.engine.engine import Engine
from mlx_dspark.foundation.caps import FixedCaps
from mlx_dspark.foundation.errors import UnsupportedModel, UsageError
from mlx_dspark.foundation.events import Committed
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.state.quantized import GROUP
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests.fakes import ScriptedDrafter, TextOracle
from tests.tiny import VOCAB, save_tiny, tiny_config, tiny_family
from tests.tiny_gguf import save_tiny_gguf

NEW = 40
PROMPTS = [[(7 * i + 31 * n) % 350 + 5 for i in range(n)] for n in (1, 16, 40)]
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": GROUP}

bits_each = pytest.mark.parametrize("bits", [4, 8])


@lru_cache
def model_of(family: str = "qwen3") -> Any:
    return tiny_family(family, seed=3, **HEADS)


@lru_cache
def target_for(bits: int) -> DenseTarget:
    return target_of(model_of(), tiny_config("qwen3", **HEADS), kv_bits=bits)


@lru_cache
def truth(bits: int) -> list[list[int]]:
    """Greedy text of mlx-lm's model over its own quantized caches."""
    texts = []
    for prompt in PROMPTS:
        caches = [QuantizedKVCache(GROUP, bits) for _ in model_of().layers]
        tokens, text = prompt, []
        for _ in range(NEW):
            newest = mx.argmax(model_of()(mx.array([tokens]), cache=caches)[0, -1])
            tokens = [cast(int, newest.item())]
            text += tokens
        texts.append(text)
    return texts


def ids_of(bits: int, drafter: Drafter | None, rows: int, chunk: int = 512) -> list[list[int]]:
    caps = FixedCaps({"scripted": 5, "lookup": 5})
    engine = Engine(target_for(bits), drafter, cap=caps, prefill_chunk=chunk)
    answers: list[list[int]] = [[] for _ in range(rows)]
    for index, event in engine.run([GenerateRequest(tuple(p), NEW) for p in PROMPTS[-rows:]]):
        if isinstance(event, Committed):
            answers[index] += event.tokens
    return answers


@bits_each
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("right", [None, 1.0, 0.7, 0.0])
def test_any_draft_equals_stock_with_quantized_caches(bits: int, rows: int, right: float | None) -> None:
    oracle = TextOracle([[*p, *t] for p, t in zip(PROMPTS, truth(bits), strict=True)])
    drafter = None if right is None else ScriptedDrafter(oracle, right, vocab=VOCAB, ragged=True)
    assert ids_of(bits, drafter, rows, chunk=7) == truth(bits)[-rows:]


@bits_each
def test_lookup_equals_stock_with_quantized_caches(bits: int) -> None:
    drafter = LookupDrafter(min_n=1, max_n=2)
    drafter.bind(target_for(bits))
    assert ids_of(bits, drafter, 3) == truth(bits)


def test_keys_and_values_are_held_in_so_many_bits() -> None:
    held = {}
    for bits in (4, 8):
        rows = target_for(bits).new_rows()
        with rows.transaction(40) as transaction:
            target_for(bits).forward(mx.array([PROMPTS[2]]), rows)
            transaction.commit([40])
        held[bits] = rows.capture(0).nbytes
    layers, heads, numbers = 2, HEADS["num_key_value_heads"], 2 * 40 * GROUP
    scales = layers * heads * 2 * 40 * 2 * 4
    assert held == {bits: layers * heads * numbers * bits // 8 + scales for bits in (4, 8)}


@pytest.mark.parametrize(
    ("family", "given", "reason"),
    [
        ("llama", {}, "16 wide"),
        ("llama", {"head_dim": None}, "16 wide"),
        ("gemma3_text", {"head_dim": 64}, "RotatingKVCache"),
        ("gpt_oss", {"head_dim": 64}, "RotatingKVCache"),
    ],
)
def test_what_forbids_quantized_keys_is_told_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, given: dict[str, Any], reason: str
) -> None:
    folder = save_tiny(tmp_path / "model", family, **given)
    monkeypatch.setattr(
        "mlx_dspark.catalog.checkpoint._evaluate", lambda *_: pytest.fail("weights were read")
    )
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        mlx_dspark.load(folder, kv_bits=4)
    assert refusal.value.field == "kv_bits"


def test_what_forbids_quantized_keys_of_a_gguf_file_is_told_before_its_tokenizer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_gguf(tmp_path / "m.gguf", family="gemma3_text")
    for reader in ("gguf_tokenizer", "load_weights"):
        monkeypatch.setattr(f"mlx_dspark.catalog.checkpoint.{reader}", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UnsupportedModel, match="RotatingKVCache") as refusal:
        mlx_dspark.load(tmp_path / "m.gguf", kv_bits=4)
    assert refusal.value.field == "kv_bits"


def test_code_that_cannot_read_quantized_keys_is_told_at_load() -> None:
    model = tiny_family("gemma2", **HEADS)
    with pytest.raises(UnsupportedModel, match="code does not take") as refusal:
        target_of(model, tiny_config("gemma2", **HEADS), kv_bits=8)
    assert refusal.value.field == "kv_bits"


@bits_each
def test_kv_bits_are_four_or_eight_and_reach_the_session(bits: int, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", **HEADS)
    with pytest.raises(UsageError, match="kv_bits"):
        mlx_dspark.load(folder, kv_bits=3)
    text = mlx_dspark.load(folder, kv_bits=bits, mode="lookup").generate("the the the", max_new_tokens=9)
    assert text.num_tokens == 9
