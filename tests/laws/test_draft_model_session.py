"""A draft model by its name: who is refused beside it, how many drafts it may make, and what is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import mlx_dspark
from mlx_dspark.drafters.draft_model.drafter import NUM_DRAFT_TOKENS, DraftModelDrafter
from mlx_dspark.drafters.draft_model.vocabulary import check_same_vocabulary
from mlx_dspark.drafters.first_hit import FirstHit
from mlx_dspark.foundation.errors import DrafterMismatch, ModelNotFound, UnsupportedModel, UsageError
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session import calibrate, load_pair
from mlx_dspark.session.calibrate import Insist, calibrated
from mlx_dspark.session.pair import load_parts
from mlx_dspark.session.timing import TIMED_DRAFTS, RoundTimer
from mlx_dspark.session.variants import variant
from tests.tiny import VOCAB, save_tiny
from tests.tiny_drafters import save_tiny_dspark
from tests.tiny_families import family_config, tiny_family
from tests.tiny_packagings import save_tiny_speculators
from tests.tiny_variants import native, save_prism_gguf

TEXT = "the people would call each other"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("draft models")
    save_tiny(home / "model", "qwen3", seed=1)
    save_tiny(home / "draft", seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "cache"))
        yield home


def settings(folders: Path, **options: Any) -> LoadSettings:
    given = {"model": folders / "model", "draft_model": folders / "draft"} | options
    return LoadSettings.of({name: value for name, value in given.items() if value is not None})


@pytest.mark.parametrize("draft", ["draft", "model"])
def test_a_session_drafts_with_it(folders: Path, draft: str) -> None:
    plain = mlx_dspark.load(folders / "model", mode="baseline").generate(TEXT, max_new_tokens=24)
    session = mlx_dspark.load(folders / "model", draft_model=folders / draft, num_draft_tokens=3, max_draft=0)
    assert session.mode == "draft-model"
    result = session.generate(TEXT, max_new_tokens=24)
    assert result.token_ids == plain.token_ids
    told = json.loads(json.dumps(result.to_dict()))
    assert told["mode"] == "draft-model"
    assert list(told["sources"]) == ["draft-model"]
    assert result.drafted
    assert max(result.caps) == 3
    if draft == "model":
        assert result.accepted == result.drafted


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, NUM_DRAFT_TOKENS),
        ({"max_draft": "auto"}, NUM_DRAFT_TOKENS),
        ({"num_draft_tokens": 2}, 2),
        ({"num_draft_tokens": 12, "max_draft": "auto"}, 12),
        ({"num_draft_tokens": 12, "max_draft": 0}, 12),
        ({"max_draft": 20}, 20),
        ({"num_draft_tokens": 5, "max_draft": 5}, 5),
        ({"lookup_drafts": True, "num_draft_tokens": 5}, 5),
    ],
)
def test_how_many_drafts(folders: Path, options: dict[str, Any], most: int) -> None:
    drafter: Any = load_parts(settings(folders, **options)).drafter
    assert isinstance(drafter, FirstHit) == ("lookup_drafts" in options)
    model = drafter.parts[1] if isinstance(drafter, FirstHit) else drafter
    assert isinstance(model, DraftModelDrafter)
    assert model.max_draft == most


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"drafter": "some/drafter"}, "draft_model"),
        ({"mode": "lookup"}, "draft_model"),
        ({"mode": "baseline"}, "draft_model"),
        ({"mode": "dspark"}, "draft_model"),
        ({"drafter_bits": 4}, "drafter_bits"),
        ({"drafter_window": 7}, "drafter_window"),
        ({"confidence_threshold": 0.5}, "confidence_threshold"),
        ({"lookup_long_draft": 7}, "lookup_long_draft"),
        ({"num_draft_tokens": 3, "max_draft": 4}, "num_draft_tokens"),
        ({"num_draft_tokens": 4, "max_draft": 3}, "num_draft_tokens"),
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"num_draft_tokens": 65}, "num_draft_tokens"),
        ({"max_draft": 65}, "max_draft"),
        ({"draft_model": None, "mode": "draft-model"}, "mode"),
        ({"draft_model": None, "mode": "lookup", "num_draft_tokens": 3}, "num_draft_tokens"),
        ({"draft_model": None, "mode": "baseline", "num_draft_tokens": 3}, "num_draft_tokens"),
    ],
)
def test_no_option_is_accepted_and_ignored(folders: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as refusal:
        load_parts(settings(folders, **options))
    assert refusal.value.field == field
    assert refusal.value.next_step


def test_another_vocabulary_is_refused(folders: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other")
    path = other / "tokenizer.json"
    table = json.loads(path.read_text())
    words = table["model"]["vocab"]
    by_id = {own: token for token, own in words.items()}
    first, second = by_id[300], by_id[310]
    words[first], words[second] = 310, 300
    path.write_text(json.dumps(table))
    with pytest.raises(DrafterMismatch) as refusal:
        load_parts(settings(folders, draft_model=other))
    assert refusal.value.field == "draft_model"
    assert f"id 300 is {first!r} to the model and {second!r} to other" in refusal.value.sentence


def test_a_padded_vocabulary_of_another_size_is_none(folders: Path, tmp_path: Path) -> None:
    padded = save_tiny(tmp_path / "padded", seed=3, vocab_size=VOCAB + 64)
    session = mlx_dspark.load(folders / "model", draft_model=padded, max_draft=3)
    plain = mlx_dspark.load(folders / "model", mode="baseline").generate(TEXT, max_new_tokens=8)
    result = session.generate(TEXT, max_new_tokens=8)
    assert result.token_ids == plain.token_ids
    assert result.drafted


@pytest.mark.parametrize(
    ("target", "draft", "told"),
    [
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}, None),
        ({"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2}, None),
        ({"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1}, None),
        ({"a": 0, "b": 1}, {"a": 0, "c": 1}, "id 1 is 'b' to the model and 'c' to small"),
        ({"a": 0, "b": 5}, {"a": 0, "b": 4}, "'b' has id 5 in the model and 4 in small"),
        ({"a": 0}, {"b": 1}, "no id in common"),
    ],
)
def test_vocabularies(target: dict[str, int], draft: dict[str, int], told: str | None) -> None:
    if told is None:
        check_same_vocabulary(target, draft, called="small")
        return
    with pytest.raises(DrafterMismatch) as refusal:
        check_same_vocabulary(target, draft, called="small")
    assert told in refusal.value.sentence


def test_what_cannot_be_a_target_cannot_be_a_draft_model(folders: Path, tmp_path: Path) -> None:
    refused = save_tiny(tmp_path / "refused")
    weights: Any = tree_flatten(tiny_family("phi3small").parameters())
    mx.save_safetensors(str(refused / "model.safetensors"), dict(weights))
    (refused / "config.json").write_text(json.dumps(family_config("phi3small")))
    with pytest.raises(UnsupportedModel) as refusal:
        load_parts(settings(folders, draft_model=refused))
    assert refusal.value.sentence.startswith(f"The draft model {refused} cannot be used: This phi3small ")
    assert refusal.value.field == "draft_model"


@pytest.mark.parametrize("save", [save_tiny_dspark, save_tiny_speculators])
def test_a_drafter_in_the_place_of_a_model_is_told_where_it_belongs(
    folders: Path, tmp_path: Path, save: Callable[..., Path]
) -> None:
    head = save(tmp_path / "head")
    with pytest.raises(UnsupportedModel, match="is a drafter and no model") as refusal:
        load_parts(settings(folders, draft_model=head))
    assert refusal.value.next_step == "Name it with --drafter, in the place of --draft-model."
    with pytest.raises(UnsupportedModel, match="is a drafter and no model") as refusal:
        load_parts(LoadSettings(model=head))
    assert refusal.value.next_step.startswith("Name it with --drafter")
    with pytest.raises(UnsupportedModel, match="is a language model") as refusal:
        load_parts(LoadSettings(model=folders / "model", drafter=folders / "draft"))
    assert "--draft-model" in refusal.value.next_step


def test_a_packed_drafter_in_the_place_of_a_model_is_told_where_it_belongs(tmp_path: Path) -> None:
    file = save_prism_gguf(native(tmp_path / "native", 1), tmp_path / "head.gguf")
    with pytest.raises(UnsupportedModel, match="is a drafter and no model") as refusal:
        load_parts(LoadSettings(model=file))
    assert refusal.value.next_step.startswith("Name it with --drafter")


def test_a_draft_model_that_is_not_there(folders: Path) -> None:
    with pytest.raises(ModelNotFound) as refusal:
        load_parts(settings(folders, draft_model="nowhere at all"))
    assert "nowhere at all" in refusal.value.sentence
    assert refusal.value.field == "draft_model"


def test_costs_belong_to_the_pair(folders: Path) -> None:
    facts = [
        load_parts(settings(folders, **options)).facts
        for options in ({}, {"num_draft_tokens": 3}, {"max_draft": 20}, {"draft_model": folders / "model"})
    ]
    assert facts[0] == facts[1] == facts[2]
    assert facts[3] != facts[0]


@pytest.mark.parametrize("lookup", [False, True])
def test_what_its_drafts_cost_is_measured(folders: Path, lookup: bool) -> None:
    parts = load_parts(settings(folders, num_draft_tokens=3, lookup_drafts=lookup))
    calibration = calibrated(parts, Insist.ANEW).calibration
    assert calibration is not None
    curves = calibration.curves or calibration.doubtful
    assert curves is not None
    timed = {point.cap for point in curves.draft["draft-model"]}
    assert timed == {1, 2, 4, TIMED_DRAFTS}
    assert max(point.width for point in curves.verify) >= TIMED_DRAFTS + 1


@pytest.mark.parametrize("lookup", [False, True])
def test_one_measurement_serves_every_number_of_drafts(
    folders: Path, lookup: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calibrate, "UNASKED", True)
    monkeypatch.setattr(
        RoundTimer, "run", lambda _, item: 1e-3 if item.source else 0.01 + 1e-3 * (item.size + 1 - item.bare)
    )
    first, second, wide = (
        calibrated(load_parts(settings(folders, num_draft_tokens=most, lookup_drafts=lookup)), None)
        for most in (3, 8, 20)
    )
    assert first.calibration is not None
    assert first.calibration.reason == "measured"
    for other in (second, wide):
        assert other.calibration is not None
        assert (other.calibration.reason, other.calibration.curves) == (
            "remembered",
            first.calibration.curves,
        )
    with wide.session(own_thread=False) as session:
        assert max(session.generate(TEXT, max_new_tokens=24).caps) <= 20


def test_ways_to_draft_share_the_model(folders: Path) -> None:
    asked = settings(folders)
    parts = load_parts(asked)
    six: Any = variant(parts, asked, "draft-model", 12).drafter
    assert isinstance(parts.drafter, DraftModelDrafter)
    assert six.model is parts.drafter.model
    assert (six.max_draft, parts.drafter.max_draft) == (12, NUM_DRAFT_TOKENS)
    assert variant(parts, asked, "lookup").mode == "lookup"
    with pytest.raises(UsageError, match="num_draft_tokens"):
        variant(parts, settings(folders, num_draft_tokens=4), "draft-model", 5)
    plain = settings(folders, draft_model=None)
    without = load_parts(plain)
    with pytest.raises(UsageError, match="--draft-model"):
        variant(without, plain, "draft-model")


def test_functions_take_it(folders: Path) -> None:
    target, tokenizer, drafter, _ = load_pair(folders / "model", draft_model=folders / "draft")
    result = mlx_dspark.speculative_generate(
        target, tokenizer, drafter, TEXT, max_new_tokens=12, max_draft_tokens=3
    )
    plain = mlx_dspark.greedy_generate(target, tokenizer, TEXT, max_new_tokens=12)
    assert result.mode == "draft-model"
    assert result.token_ids == plain.token_ids


@pytest.mark.weights
def test_the_default_model_drafts_for_itself() -> None:
    plain = mlx_dspark.load(mode="baseline").generate("Name three colours.", max_new_tokens=24)
    result = mlx_dspark.load(draft_model="smollm2-135m", max_draft=4).generate(
        "Name three colours.", max_new_tokens=24
    )
    assert result.token_ids == plain.token_ids
    assert result.drafted == result.accepted > 12
