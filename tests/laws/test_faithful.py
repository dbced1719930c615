"""What is put around a model is compared with it at load: a fault is found, named, and remembered."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_dspark
from mlx_dspark.catalog.integrity import content_fingerprint
from mlx_dspark.foundation.errors import DrafterMismatch, UnsupportedModel
from mlx_dspark.session.trust import refuse_unfaithful
from mlx_dspark.state.recurrent import RecurrentState
from mlx_dspark.state.window import WindowState
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.faithful import memory
from mlx_dspark.targets.faithful.memory import FaithfulMemory, remembered_faithfulness
from mlx_dspark.targets.faithful.probes import Faithfulness, faithfulness
from mlx_dspark.targets.load import target_of
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dspark
from tests.tiny_families import family_config, tiny_family

RECURRENT = ["lfm2", "qwen3_5", "nemotron_h", "jamba", "falcon_h1", "rwkv7"]


@lru_cache
def target_for(family: str) -> DenseTarget:
    return target_of(tiny_family(family, seed=1), family_config(family), context=512)


# faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", RECURRENT)
def test_a_rejected_draft_that_is_kept_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, commit = target_for(family), RecurrentState.commit

    def all_kept(self: RecurrentState, keep: list[int]) -> None:
        commit(self, [self._open[0].span.width if kept else 0 for kept in keep])

    monkeypatch.setattr(RecurrentState, "commit", all_kept)
    found = faithfulness(target, (0,))
    assert "rejected draft" in found.replay
    assert found.taps == ""


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "nemotron_h"])
def test_a_round_that_is_not_taken_back_whole_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, commit = target_for(family), RecurrentState.commit

    def never_nothing(self: RecurrentState, keep: list[int]) -> None:
        commit(self, [max(1, kept) for kept in keep])

    monkeypatch.setattr(RecurrentState, "commit", never_nothing)
    assert "rejected draft" in faithfulness(target, ()).replay


@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_text"])
def test_a_window_that_forgets_what_was_cut_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, begin = target_for(family), WindowState.begin

    def misplaced(self: WindowState, span: Any) -> None:
        begin(self, span)
        if span.base[0] > 6:
            self.offset = self.offset + 2

    monkeypatch.setattr(WindowState, "begin", misplaced)
    found = faithfulness(target, ())
    assert found.replay
    assert not found.taps


@pytest.mark.parametrize("family", ["gemma2", "phi", "deepseek_v3", "afm7"])
def test_code_that_mixes_or_refuses_rows_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These models' code does not take several rows, which run one by one unless it is believed to."""
    target = target_for(family)
    assert faithfulness(target, ()).rows == ""
    monkeypatch.setattr(target, "_run_together", lambda *, rectangle: True)
    assert faithfulness(target, ()).rows != ""


def test_a_head_that_is_not_the_models_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(tiny_family("cohere2", seed=1), family_config("cohere2"))
    assert faithfulness(target, (0, 2)) == Faithfulness()
    parts = target._parts
    raw = type(parts)(parts.body, lambda hidden: mx.flip(parts.head(hidden), -1), None, False, None)  # type: ignore[misc]
    monkeypatch.setattr(target, "_parts", raw)
    assert "not those of the model" in faithfulness(target, (0, 2)).taps


@pytest.mark.parametrize("family", ["iquestloopcoder", "gemma3n"])
def test_layers_that_no_drafter_can_read_are_found_and_named(family: str) -> None:
    found = faithfulness(target_for(family), (0, 1))
    assert "one stream" in found.taps
    assert (found.replay, found.rows) == ("", "")
    assert faithfulness(target_for(family), ()) == Faithfulness()


def test_a_looped_model_counts_every_pass_and_a_tap_at_its_end_is_what_enters_the_next() -> None:
    target, model = target_for("nanbeige"), target_for("nanbeige").model
    layers = len(model.layers)
    assert target.spec.layers == 2 * layers
    tokens, rows = mx.array([[5, 9, 30, 7]]), target.new_rows()
    with rows.transaction(4):
        features = target.forward(tokens, rows, taps=(-1, layers - 1, 2 * layers - 1)).features
    assert features is not None
    entering, between, last = mx.split(features, 3, axis=-1)
    assert mx.array_equal(entering, model.model.embed_tokens(tokens)).item()
    mask, h = "causal", entering
    for layer in model.layers:
        h = layer(h, mask)
    assert mx.allclose(between, model.model.norm(h), rtol=1e-4, atol=1e-4).item()
    h = between
    for layer in model.layers:
        h = layer(h, mask)
    assert mx.allclose(last, h, rtol=1e-4, atol=1e-4).item()


def test_what_is_asked_is_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    target, fed = target_for("lfm2"), []
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda tokens, *a, **k: (fed.append(tokens.size), forward(tokens, *a, **k))[1]
    )
    faithfulness(target, (0,))
    assert sum(fed) < 128


# refusals ------------------------------------------------------------------------------------------------

BATCH: dict[str, Any] = {"called": "a/head", "max_batch": 4}


@pytest.mark.parametrize(
    ("found", "taps", "drafts", "kind", "says"),
    [
        (Faithfulness(taps="no layers"), (1,), True, DrafterMismatch, "a/head"),
        (Faithfulness(replay="it forgets"), (), True, UnsupportedModel, "it forgets"),
        (Faithfulness(rows="they mix"), (), False, UnsupportedModel, "several requests"),
        (Faithfulness(taps="no layers"), (), True, None, ""),
        (Faithfulness(replay="it forgets"), (), False, None, ""),
    ],
)
def test_a_fault_refuses_what_needs_the_faulty_part_and_nothing_else(
    found: Faithfulness, taps: tuple[int, ...], drafts: bool, kind: type[Exception] | None, says: str
) -> None:
    if kind is None:
        return refuse_unfaithful(found, taps=taps, drafts=drafts, **BATCH)
    with pytest.raises(kind, match=says):
        refuse_unfaithful(found, taps=taps, drafts=drafts, **BATCH)
    return None


def test_at_load_the_drafter_is_refused_by_name_and_lookup_runs(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "looped", "iquestloopcoder")
    head = save_tiny_dspark(tmp_path / "the-head")
    with pytest.raises(DrafterMismatch, match="the-head") as refusal:
        mlx_dspark.load(model, drafter=head)
    assert refusal.value.field == "drafter"
    assert mlx_dspark.load(model, mode="lookup").generate("the the", max_new_tokens=5).num_tokens == 5
    assert mlx_dspark.load(model, mode="baseline").generate("the the", max_new_tokens=5).num_tokens == 5


def test_at_load_a_model_that_cannot_take_drafts_back_runs_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny(tmp_path / "model", "gemma3_text")
    monkeypatch.setattr(memory, "faithfulness", lambda *_, **__: Faithfulness(replay="it forgets"))
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(UnsupportedModel, match="it forgets"):
        mlx_dspark.load(model, mode="lookup")
    assert mlx_dspark.load(model, mode="baseline").generate("the", max_new_tokens=3).num_tokens == 3


# memory --------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    times: list[int] = []
    monkeypatch.setattr(
        memory, "faithfulness", lambda *_, **__: (times.append(1), Faithfulness(rows="they mix"))[1]
    )
    return times


def recall(
    folder: Path, fingerprint: str = "a", taps: tuple[int, ...] = (1,), rows: bool = True
) -> Faithfulness:
    target = target_for("lfm2")
    return remembered_faithfulness(target, taps, rows=rows, fingerprint=fingerprint, cache_dir=folder)


def test_an_answer_is_asked_for_once(tmp_path: Path, asked: list[int]) -> None:
    assert recall(tmp_path) == recall(tmp_path) == Faithfulness(rows="they mix")
    assert len(asked) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda patch: {"fingerprint": "b"},
        lambda patch: {"taps": (2,)},
        lambda patch: {"rows": False},
        lambda patch: patch.setattr(memory, "__version__", "other") or {},
        lambda patch: patch.setattr(memory, "version", lambda name: "other") or {},
        lambda patch: patch.setattr(memory, "VERSION", -1) or {},
        lambda patch: patch.setattr(mx, "device_info", lambda: {"device_name": "other"}) or {},
    ],
    ids=["model", "taps", "rows", "our version", "mlx", "questions", "device"],
)
def test_another_question_is_asked_anew(
    tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch, other: Callable[[Any], dict[str, Any]]
) -> None:
    recall(tmp_path)
    changed = other(monkeypatch)
    recall(tmp_path, **changed)
    assert len(asked) == 2
    recall(tmp_path, **changed)
    assert len(asked) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b'{"a": 1}', b'{"a": {"taps": ""}}', b'{"a": {"taps": 1}}', b"null"],
)
def test_a_damaged_or_foreign_file_is_asked_anew_and_written_over(
    tmp_path: Path, asked: list[int], content: bytes
) -> None:
    recall(tmp_path)
    file = tmp_path / "faithful.json"
    file.write_bytes(content)
    assert recall(tmp_path) == recall(tmp_path) == Faithfulness(rows="they mix")
    assert len(asked) == 2
    assert len(json.loads(file.read_text())) == 1


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, asked: list[int]) -> None:
    (tmp_path / "file").write_text("")
    assert recall(tmp_path / "file" / "cache") == Faithfulness(rows="they mix")
    assert len(asked) == 1


def test_the_oldest_answers_go_first(tmp_path: Path) -> None:
    held = FaithfulMemory(tmp_path)
    for number in range(memory.KEPT + 3):
        held.remember(str(number), Faithfulness())
    assert held.recall("2") is None
    assert held.recall("3") == held.recall(str(memory.KEPT + 2)) == Faithfulness()


# fingerprints --------------------------------------------------------------------------------------------


def test_a_fingerprint_follows_content_and_no_names(tmp_path: Path) -> None:
    def written(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    small, large = b"config", bytes(3 << 20)
    first = content_fingerprint([written("a", small), written("b", large)])
    assert first == content_fingerprint([written("c", large), written("d", small)])
    others = [[small], [small, large[1:]], [b"Config", large], [small, b"\1" + large[1:]]]
    others += [[small, large[:-1] + b"\1"], [small, bytes(1 << 20) + bytes([1]) * (2 << 20)]]
    prints = {first}
    for number, parts in enumerate(others):
        files = [written(f"{number}-{i}", part) for i, part in enumerate(parts)]
        prints.add(content_fingerprint(files))
    assert len(prints) == 1 + len(others)
