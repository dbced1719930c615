"""What a model is said to need is what MLX then holds, and a verdict is right to the token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlx_dspark
from mlx_dspark.catalog.fit import Memory, Need, StateBytes, verdict
from mlx_dspark.catalog.memory import group_room, memory_here
from mlx_dspark.catalog.resolve import ModelRef, resolve_model
from mlx_dspark.foundation.errors import OutOfMemory
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.fits import MemoryGuard, beside, config_of, dtype_of, need_of, stored_bytes
from mlx_dspark.targets.footprint import state_bytes
from mlx_dspark.targets.load import target_of
from tests.company import fed
from tests.laws.test_family_bars import KINDS
from tests.tiny import save_tiny, tiny_config
from tests.tiny_families import family_config, tiny_family
from tests.tiny_gguf import save_tiny_gguf

FAMILIES = (*KINDS, "mamba2", "phi3", "olmo2", "dbrx")
DEPTHS = (1, 7, 600)


def measured(target: Any, depths: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """Bytes of content and of buffers after prefills of so many tokens."""
    found = {}
    for depth in depths:
        rows = target.new_rows()
        for begin in range(0, depth, 128):
            width = min(128, depth - begin)
            fed(target, rows, [[(begin + i) % 300 + 5 for i in range(width)]], [width])
        arrays = [array for layer in rows.layers for array in layer.arrays()]
        found[depth] = rows.capture(0).nbytes, sum(array.nbytes for array in arrays)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_states_take_what_is_said_of_every_family(family: str) -> None:
    said = state_bytes(family_config(family), dtype=mx.float32)
    assert said is not None
    target = target_of(tiny_family(family, seed=1), family_config(family), context=1024)
    for depth, (content, held) in measured(target, DEPTHS).items():
        assert said.content(depth) == content
        assert held <= said.held(depth)
        if not said.windows:
            assert held == said.held(depth)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "mixtral", "olmo2"])
def test_states_in_few_bits_take_what_is_said(family: str, bits: int) -> None:
    config = family_config(family, wide=True)
    said = state_bytes(config, dtype=mx.float32, kv_bits=bits)
    assert said is not None
    target = target_of(tiny_family(family, seed=1, wide=True), config, kv_bits=bits)
    for depth, found in measured(target, (5, 300)).items():
        assert (said.content(depth), said.held(depth)) == found


def test_what_cannot_be_told_is_not_told() -> None:
    assert state_bytes(tiny_config() | {"model_type": "no_such_model"}, dtype=mx.float32) is None
    assert state_bytes(tiny_config("gpt_oss"), dtype=mx.float32, kv_bits=4) is None


def test_a_model_of_any_size_is_told_in_a_moment_and_without_its_memory() -> None:
    large = {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248, "head_dim": 128}
    large |= {"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256}
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    said = state_bytes(tiny_config() | large, dtype=mx.bfloat16)
    assert said == StateBytes(per_token=126 * 2 * 8 * 128 * 2)
    assert mx.get_peak_memory() - before < 1 << 24


sizes = st.integers(0, 1 << 20)
needs = st.builds(
    Need,
    weights=sizes,
    states=st.builds(
        StateBytes, sizes, st.integers(0, 512), st.lists(st.tuples(st.integers(0, 64), sizes)).map(tuple)
    ),
    drafter=sizes,
    working=sizes,
    working_per_token=st.integers(0, 64),
    rows=st.integers(1, 8),
)


@given(needs, st.integers(1, 1 << 16), st.integers(0, 1 << 26))
def test_the_largest_context_is_the_last_that_fits(need: Need, declared: int, have: int) -> None:
    found = verdict(need, declared, Memory(have, "a test"))
    assert found.fits == (need.at(min(512, declared)) <= have)
    if found.fits:
        assert need.at(found.context) <= have
        assert found.context == declared or need.at(found.context + 1) > have
    else:
        assert found.context == 0


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": "1000", "memory.current": "400"}, 600),
        ({"memory.max": "1000", "memory.current": "400", "memory.stat": "anon 9\ninactive_file 50"}, 650),
        ({"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "1200"}, 0),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"}, None),
    ],
)
def test_a_control_group_limits_what_there_is(
    tmp_path: Path, files: dict[str, str], room: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert group_room(tmp_path) == room


def test_this_machine_has_memory() -> None:
    here = memory_here()
    assert here is not None
    assert 1 << 20 < here.bytes < 1 << 50


# the guard at load ---------------------------------------------------------------------------------------


@pytest.fixture(params=["folder", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "folder":
        return save_tiny(tmp_path / "m")
    save_tiny_gguf(tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_dspark.catalog.memory.memory_here", lambda: Memory(100_000, "a test"))
    with monkeypatch.context() as reading:
        for reader in ("_evaluate", "load_weights"):
            reading.setattr(f"mlx_dspark.catalog.checkpoint.{reader}", lambda *_: pytest.fail("it was read"))
        with pytest.raises(OutOfMemory, match=r"needs .* MB of memory.* has 0 MB \(a test\)") as refusal:
            mlx_dspark.load(model, mode="lookup")
    assert "--no-memory-guard" in refusal.value.next_step
    with mlx_dspark.load(model, mode="lookup", memory_guard=False) as session:
        assert session.generate("the", max_new_tokens=2).num_tokens == 2


def test_a_draft_model_counts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where model and draft model do not fit together, though each of them does."""
    draft = save_tiny(tmp_path / "draft", seed=2)
    settings = LoadSettings.of({"model": model, "draft_model": draft})
    found, other = (resolve_model(str(name), cache_dir=tmp_path) for name in (model, draft))
    alone = [need_alone(each) for each in (found, other)]
    together = beside(*alone).at(512)
    assert together > max(each.at(512) for each in alone)
    have = Memory(together, "a test")
    monkeypatch.setattr("mlx_dspark.catalog.memory.memory_here", lambda: have)
    mlx_dspark.load(model, draft_model=draft, calibrate=False).close()
    have = Memory(together - 1, "a test")
    mlx_dspark.load(model, mode="lookup").close()
    with pytest.raises(OutOfMemory, match=r"The model with its drafter needs .* for the drafter's"):
        mlx_dspark.load(model, draft_model=draft)
    guard, unfetched = MemoryGuard(settings, have), (config_of(other), stored_bytes(other))
    guard.weigh(*unfetched)
    with pytest.raises(OutOfMemory):
        guard.weigh_draft_model(found)(*unfetched)


def need_alone(found: ModelRef) -> Need:
    need = need_of(config_of(found), stored_bytes(found), dtype=dtype_of(found))
    assert need is not None
    return need


def test_what_is_not_known_is_not_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_dspark.catalog.memory.memory_here", lambda: None)
    mlx_dspark.load(model, mode="lookup").close()
    monkeypatch.setattr("mlx_dspark.targets.footprint.state_bytes", lambda *_, **__: None)
    monkeypatch.setattr("mlx_dspark.catalog.memory.memory_here", lambda: Memory(10_000_000, "a test"))
    mlx_dspark.load(model, mode="lookup").close()
    monkeypatch.setattr("mlx_dspark.catalog.memory.memory_here", lambda: Memory(1000, "a test"))
    with pytest.raises(OutOfMemory):
        mlx_dspark.load(model, mode="lookup")
