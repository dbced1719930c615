"""`benchmark` on a registered pair: what it says of acceptance, what it remembers, and who reads that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_dspark.bench import acceptance
from mlx_dspark.bench.guard import Sample
from mlx_dspark.bench.stats import VerifyRound
from mlx_dspark.catalog.pair_row import Expected
from mlx_dspark.catalog.pairs import PACKAGED, read_pairs
from mlx_dspark.cli.main import run
from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.foundation.settings import LoadSettings
from mlx_dspark.session.measured import measured_gains, remember_gains
from mlx_dspark.session.measured_acceptance import measured_acceptance, remember_acceptance
from mlx_dspark.session.pair import Parts, load_parts
from mlx_dspark.session.registered import chosen_mode, registered_as_shipped
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dspark

SHORT = ("--max-new-tokens", "6", "--trials", "1", "--json")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model with a row of its own, whose random drafter is expected to be a good one."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    head = save_tiny_dspark(tmp_path / "head", taps=(0, 1))
    folder = save_tiny(tmp_path / "model", "qwen3", max_position_embeddings=8192)
    (folder / "README.md").write_text("---\nbase_model: maker/Small\nlibrary_name: mlx\n---\n")
    rows = tmp_path / "config" / "mlx_dspark" / "pairs.toml"
    rows.parent.mkdir(parents=True)
    rows.write_text(
        f'[[pair]]\nid = "small"\ntarget = "me/Small-8bit"\nparents = ["maker/Small"]\n'
        f'architecture = "qwen3"\ndrafters = {{ dspark = "{head}" }}\nlookup = false\n'
        '[[pair.expected]]\nmode = "dspark"\ncontent = "all"\ncap = 4\naccept_length = 4.5\n'
    )
    return folder


def loaded(model: Path) -> Parts:
    return load_parts(LoadSettings(model=model))


def test_a_benchmark_warns_and_remembers_and_auto_takes_what_was_faster(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, cache = loaded(model), tmp_path / "cache"
    assert parts.pair is not None
    assert parts.mode == "dspark"
    assert run(["benchmark", "--model", str(model), "--caps", "derived,4", *SHORT]) == 0
    shown = capsys.readouterr()
    verdict = json.loads(shown.out)["acceptance"]["dspark 4"]
    assert verdict["kind"] == "low"
    assert f"dspark 4: accept length {verdict['accept_length']:.2f}, expected" in shown.err
    assert "wrong slot" in shown.err
    gains = measured_gains(cache, parts.fingerprint)
    assert gains.keys() == {"dspark", "lookup"}
    assert loaded(model).mode == chosen_mode("dspark", parts.pair.drafters, gains)


@pytest.mark.parametrize(
    ("gains", "mode"),
    [({"dspark": 1.0, "lookup": 2.0}, "lookup"), ({"dspark": 2.0, "lookup": 1.0}, "dspark")],
)
def test_a_run_without_the_rows_own_mode_leaves_what_is_remembered(
    gains: dict[str, float], mode: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint, cache = loaded(model).fingerprint, tmp_path / "cache"
    assert remember_gains(cache, fingerprint, gains) == ""
    assert loaded(model).mode == mode
    assert run(["benchmark", "--model", str(model), "--modes", "lookup", "--num-prompts", "1", *SHORT]) == 0
    capsys.readouterr()
    assert measured_gains(cache, fingerprint) == gains


@pytest.mark.parametrize(
    "options",
    [{"confidence_threshold": 0.3}, {"drafter_bits": 0}, {"drafter_window": 64}, {"lookup_drafts": True}],
)
def test_auto_drafts_with_a_drafter_where_an_option_needs_one(
    options: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Whatever was faster here: an option that is given is never refused for what was measured."""
    parts = loaded(model)
    assert remember_gains(tmp_path / "cache", parts.fingerprint, {"dspark": 1.0, "lookup": 2.0}) == ""
    assert loaded(model).mode == "lookup"
    assert load_parts(LoadSettings(model=model, **options)).mode == "dspark"
    assert parts.pair is not None
    for name in parts.pair.drafters.values():
        (Path(name) / "config.json").unlink()
    assert loaded(model).mode == "lookup"
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        load_parts(LoadSettings(model=model, **options))


def test_doctor_says_that_a_row_expects_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(acceptance, "TOKENS", 8)
    rows = tmp_path / "config" / "mlx_dspark" / "pairs.toml"
    rows.write_text(rows.read_text().partition("[[pair.expected]]")[0])
    assert run(["doctor", "--pair", str(model), "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["acceptance"]["status"] == "open"
    assert "small has no accept length of mode dspark on record" in checks["acceptance"]["found"]
    assert str(rows) in checks["acceptance"]["fix"]


def doctored(model: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    assert run(["doctor", "--pair", str(model), "--json"]) == 0
    return {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}


def answers(content: str, accepted: int) -> list[Sample]:
    """Of four drafts, so many are accepted in each round, give or take one."""
    rounds = [max(0, min(4, accepted + off)) for off in (-1, 0, 1)] * 20
    return [Sample(content, tuple(VerifyRound(4, n, n + 1, "dspark") for n in rounds))] * 3


def test_a_pair_that_was_measured_here_is_compared_with_that(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, drafts = tmp_path / "cache" / "acceptance.json", {"accepted": 1}
    monkeypatch.setattr(acceptance, "samples_of", lambda *asked: answers(asked[2], drafts["accepted"]))
    low = doctored(model, capsys)
    assert low["acceptance"]["status"] == "warn"
    assert "not remembered" in low["acceptance here"]["found"]
    assert not file.exists()
    drafts["accepted"] = 4
    first = doctored(model, capsys)
    assert first["acceptance"]["status"] == "ok"
    assert "compared with one mean over contents" in first["acceptance"]["found"]
    assert "later runs are compared" in first["acceptance here"]["found"]
    kept = file.read_bytes()
    assert "100% of the expected drafts" in doctored(model, capsys)["acceptance here"]["found"]
    drafts["accepted"] = 2
    worse = doctored(model, capsys)
    assert worse["acceptance"]["status"] != "warn"
    assert worse["acceptance here"]["status"] == "warn"
    assert "measured here before" in worse["acceptance here"]["found"]
    assert "wrong slot" in worse["acceptance here"]["fix"]
    assert file.read_bytes() == kept


def test_a_benchmark_is_compared_with_what_was_measured_here(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, good = loaded(model), (1.0, 1.0, 1.0, 1.0)
    assert parts.pair is not None
    found = [Expected("dspark", content, 4, 5.0, good) for content in ("chat", "code", "math")]
    drafter = parts.pair.drafters["dspark"]
    assert remember_acceptance(tmp_path / "cache", parts.fingerprint, drafter, "dspark", found) == ""
    assert run(["benchmark", "--model", str(model), "--caps", "4", *SHORT]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["acceptance_here"]["dspark 4"]["kind"] == "low"
    assert "against what was measured here before" in shown.err


@pytest.mark.parametrize("damage", ["{", "[]", '{"KEY": 3}', '{"KEY": [1, {"mode": "dspark"}]}'])
def test_a_damaged_record_counts_as_none(damage: str, tmp_path: Path) -> None:
    good = Expected("dspark", "chat", 2, 1.75, (0.5, 0.25))
    assert remember_acceptance(tmp_path, "target", "head", "dspark", [good]) == ""
    assert measured_acceptance(tmp_path, "target", "head", "dspark") == (good,)
    assert measured_acceptance(tmp_path, "other", "head", "dspark") == ()
    file = tmp_path / "acceptance.json"
    (key,) = json.loads(file.read_text())
    file.write_text(damage.replace("KEY", key))
    assert measured_acceptance(tmp_path, "target", "head", "dspark") == ()
    assert remember_acceptance(tmp_path, "target", "head", "dspark", [good]) == ""
    assert measured_acceptance(tmp_path, "target", "head", "dspark") == (good,)


def test_what_is_remembered_chooses_for_a_shipped_drafter_too() -> None:
    pair = next(each for each in read_pairs(PACKAGED) if each.id == "smollm2-135m")
    assert not registered_as_shipped(pair, {}).leaves_shipped
    assert not registered_as_shipped(pair, {"dspark": 2.0, "lookup": 1.0}).leaves_shipped
    slower = registered_as_shipped(pair, {"dspark": 1.0, "lookup": 2.0})
    assert slower.leaves_shipped
    assert "lookup drafts" in slower.told
