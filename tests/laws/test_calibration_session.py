"""When a pair is measured, when what is known is used, and what the command says. Costs are scripted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import mlx_dspark
from mlx_dspark.calibration.shape import with_rows
from mlx_dspark.calibration.store import FILE, CalibrationStore
from mlx_dspark.calibration.watch import ENOUGH
from mlx_dspark.cli.main import run
from mlx_dspark.engine import caps
from mlx_dspark.engine.times import RoundTimes
from mlx_dspark.foundation.caps import CapPolicy
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.events import RoundReport
from mlx_dspark.session import calibrate, live
from mlx_dspark.session.timing import RoundTimer
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dspark

PROMPT = "the same words the same words the same"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("calibrated")
    save_tiny(home / "model")
    save_tiny(home / "copy")
    save_tiny(home / "other", seed=5)
    save_tiny_dspark(home / "dspark")
    return home


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MLX_DSPARK_CALIBRATE", raising=False)
    return tmp_path


class Costs:
    """What rounds are said to cost; counts the rounds. `scale` may change while they run."""

    def __init__(self) -> None:
        self.runs = 0
        self.scale: Callable[[int], float] = lambda n: 1.0

    def __call__(self, item: Any) -> float:
        self.runs += 1
        base = 1e-3 if item.source else 0.01 + 1e-3 * item.size + (0.0 if item.bare else 1e-3)
        return self.scale(self.runs) * base


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Costs:
    scripted, really = Costs(), RoundTimer.run

    def timed(timer: RoundTimer, item: Any) -> float:
        really(timer, item)
        return scripted(item)

    monkeypatch.setattr(RoundTimer, "run", timed)
    monkeypatch.setattr(calibrate, "UNASKED", True)
    monkeypatch.setattr(calibrate, "BUDGET", {"cpu": 0.6, "gpu": 0.6})
    return scripted


def curves_of(session: mlx_dspark.Session) -> CostCurves:
    assert session.calibration is not None
    assert session.calibration.curves is not None
    return session.calibration.curves


def test_a_pair_is_measured_once(home: Path, cache: Path, costs: Costs) -> None:
    told: list[str] = []
    first = mlx_dspark.load(home / "model", progress=lambda step: told.append(step.message))
    assert f"{calibrate.MEASURING}, once for this pair" in told
    assert first.calibration is not None
    assert first.calibration.reason == "measured"
    assert curves_of(first).round_seconds(7, source="lookup") == pytest.approx(0.01 + 9e-3 + 1e-3)
    runs = costs.runs
    for again in (home / "model", home / "copy"):
        second = mlx_dspark.load(again)
        assert curves_of(second) == curves_of(first)
    assert costs.runs == runs
    mlx_dspark.load(home / "other")
    mlx_dspark.load(home / "model", drafter=home / "dspark")
    assert costs.runs > runs
    assert len(list(CalibrationStore(cache).entries())) == 3


def test_what_is_known_is_read_without_a_round(
    home: Path, cache: Path, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlx_dspark.load(home / "model")

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing is to be timed")

    monkeypatch.setattr(RoundTimer, "__init__", fails)
    assert curves_of(mlx_dspark.load(home / "model"))


@pytest.mark.parametrize("settings", [{"calibrate": False}, {"max_draft": 3}, {"mode": "baseline"}])
def test_who_does_not_need_costs_does_not_pay(
    home: Path, cache: Path, costs: Costs, settings: dict[str, Any]
) -> None:
    session = mlx_dspark.load(home / "model", **settings)
    assert costs.runs == 0
    assert session.calibration is None or session.calibration.curves is None
    assert not (cache / FILE).exists()


def test_what_is_known_is_used_with_a_pinned_cap_and_not_when_switched_off(
    home: Path, cache: Path, costs: Costs
) -> None:
    mlx_dspark.load(home / "model")
    runs = costs.runs
    assert curves_of(mlx_dspark.load(home / "model", max_draft=6))
    off = mlx_dspark.load(home / "model", calibrate=False)
    assert off.calibration is not None
    assert off.calibration.curves is None
    assert costs.runs == runs


def test_a_pair_is_measured_anew_when_asked(home: Path, cache: Path, costs: Costs) -> None:
    first = curves_of(mlx_dspark.load(home / "model"))
    costs.scale = lambda n: 2.0
    second = curves_of(mlx_dspark.load(home / "model", calibrate=True))
    assert second.verify_seconds(1) == pytest.approx(2 * (first.verify_seconds(1) or 0))
    assert curves_of(mlx_dspark.load(home / "model")) == second
    with pytest.raises(UsageError, match="calibrate is set, and there is nothing to measure: nobody drafts"):
        mlx_dspark.load(home / "model", mode="baseline", calibrate=True)


def test_a_refused_measurement_is_told_and_tried_later(
    home: Path, cache: Path, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves the session that made it, and no other."""
    known: list[CostCurves | None] = []
    policy = caps.cap_policy

    def seen(*args: Any, curves: CostCurves | None = None, **options: Any) -> CapPolicy:
        known.append(curves)
        return policy(*args, curves=curves, **options)

    monkeypatch.setattr(caps, "cap_policy", seen)
    costs.scale = lambda n: 1.0 + (n % 7) / 3
    found = mlx_dspark.load(home / "model").calibration
    assert found is not None
    assert found.curves is None
    assert "in doubt" in str(found)
    assert "beside other work" in str(found)
    assert known[-1] is found.doubtful
    runs = costs.runs
    costs.scale = lambda n: 1.0
    later = mlx_dspark.load(home / "model").calibration
    assert costs.runs == runs
    assert later is not None
    assert known[-1] is None
    assert "the next is due in 10 min" in str(later)
    assert curves_of(mlx_dspark.load(home / "model", calibrate=True))


def test_a_measurement_that_fails_keeps_nobody_from_loading(
    home: Path, cache: Path, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(RoundTimer, "__init__", fails)
    session = mlx_dspark.load(home / "model")
    assert "out of memory" in str(session.calibration)
    assert session.generate(PROMPT, max_new_tokens=4).num_tokens == 4


def test_a_cache_that_cannot_be_written_is_told(
    home: Path, cache: Path, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(cache / "file" / "cache"))
    session = mlx_dspark.load(home / "model")
    assert curves_of(session)
    assert "cannot be written" in str(session.calibration)


def test_live_rounds_that_disagree_have_the_pair_measured_anew(home: Path, cache: Path, costs: Costs) -> None:
    """Measured a thousand times as slow as it is, as on a hot machine."""
    costs.scale = lambda n: 1000.0
    with mlx_dspark.load(home / "model") as session:
        session.generate(PROMPT, max_new_tokens=4)
        assert [entry.stale for entry in CalibrationStore(cache).entries()] == [""]
        for _ in range(2):
            session.generate(PROMPT, max_new_tokens=3 * ENOUGH)
    assert "times what was measured" in next(iter(CalibrationStore(cache).entries())).stale
    costs.scale = lambda n: 1.0
    runs = costs.runs
    healed = curves_of(mlx_dspark.load(home / "model"))
    assert costs.runs > runs
    assert healed.verify_seconds(1) == pytest.approx(0.011)
    assert next(iter(CalibrationStore(cache).entries())).stale == ""


def test_a_stale_entry_is_measured_anew_and_serves_where_that_is_not_believed(
    home: Path, cache: Path, costs: Costs
) -> None:
    first = curves_of(mlx_dspark.load(home / "model"))
    store = CalibrationStore(cache)
    entry = next(iter(store.entries()))
    store.mark_stale(entry.key, entry.curves.measured_at, "rounds took longer")
    costs.scale = lambda n: 1.0 + (n % 7) / 3
    told: list[str] = []
    mlx_dspark.load(home / "model", progress=lambda step: told.append(step.message))
    assert f"{calibrate.MEASURING} anew: rounds took longer" in told
    later = mlx_dspark.load(home / "model").calibration
    assert later is not None
    assert str(later).startswith("costs in doubt: the last try was not believed")
    assert (later.curves, later.usable) == (None, first)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a list": lambda file: file.write_text("[]"),
    "not JSON": lambda file: file.write_text("{"),
    "curves that are text": lambda file: file.write_text(
        re.sub(r'"curves": {', '"curves": "x", "y": {', file.read_text())
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_told_and_mended(
    damage: str, home: Path, cache: Path, costs: Costs, capsys: pytest.CaptureFixture[str]
) -> None:
    curves_of(mlx_dspark.load(home / "model"))
    file = CalibrationStore(cache).file
    DAMAGES[damage](file)
    assert run(["calibrate", str(home / "model"), "--show"]) == 2
    said = capsys.readouterr().err
    whole = damage.startswith("curves")
    assert str(file) in said
    assert ("1 measurement cannot be read" if whole else f"set aside as {file}.damaged") in said
    mended = mlx_dspark.load(home / "model")
    assert curves_of(mended)
    assert f"{file} {'held of this pair was damaged' if whole else 'was damaged'}" in str(mended.calibration)
    assert Path(f"{file}.damaged").exists() != whole
    assert str(mlx_dspark.load(home / "model").calibration) == ""


def test_a_folder_in_the_files_place_is_told(
    home: Path, cache: Path, costs: Costs, capsys: pytest.CaptureFixture[str]
) -> None:
    CalibrationStore(cache).file.mkdir()
    assert run(["calibrate", str(home / "model"), "--show"]) == 2
    assert f"{CalibrationStore(cache).file} cannot be read: Is a directory" in capsys.readouterr().err
    assert "Is a directory" in str(mlx_dspark.load(home / "model").calibration)


def test_a_batch_is_measured_when_it_first_forms(
    home: Path, cache: Path, costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "METER_SHARE", 1.0)
    with mlx_dspark.load(home / "model", max_batch=2) as session:
        streams = [session.stream(PROMPT + " more" * i, max_new_tokens=120) for i in range(2)]
        threads = [Thread(target=session.fold, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entry = next(iter(CalibrationStore(cache).entries()))
    assert {point.rows for point in entry.curves.verify} == {1, 2}
    runs = costs.runs
    again = mlx_dspark.load(home / "model", max_batch=2)
    assert curves_of(again) == entry.curves
    assert costs.runs == runs


@pytest.mark.parametrize("priced", [True, False])
def test_times_noted_without_a_price_are_let_go_when_there_is_one(priced: bool) -> None:
    """They were seconds, and would be read as multiples of the price."""
    one = CostCurves(
        (VerifyPoint(1, 1, 0, 0.01, 0.0),), {"lookup": (DraftPoint(1, 6, 0, 0.0, 0.0),)}, 0.0, 1.0
    )
    two = with_rows(one, CostCurves((VerifyPoint(2, 1, 0, 0.02, 0.0),), {}, 0.0, 1.0))
    times = RoundTimes(two if priced else one)
    for n in range(8):
        times.charge(RoundReport(n, n + 0.03, 2, 1, 1, 0, 0, 0, 1, 5))
    assert times.seconds(2, 1) == pytest.approx(0.03, rel=0.01)
    times.learn(two)
    assert times.seconds(2, 1) == pytest.approx(0.03 if priced else 0.02, rel=0.01)


def test_functions_use_what_load_pair_measured(home: Path, cache: Path, costs: Costs) -> None:
    target, _, drafter, _ = mlx_dspark.load_pair(home / "model")
    known = calibrate.known_calibration(target, drafter)
    assert known is not None
    assert known.curves == next(iter(CalibrationStore(cache).entries())).curves


# the command ---------------------------------------------------------------------------------------------


def test_the_command_measures_prints_and_remembers(
    home: Path, cache: Path, costs: Costs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", str(home / "model"), "--drafter", str(home / "dspark")]) == 0
    first = capsys.readouterr()
    assert "knee" in first.out
    assert "lookup cap" in first.out
    assert "dspark cap" in first.out
    assert calibrate.MEASURING in first.err
    runs = costs.runs
    assert run(["calibrate", str(home / "model"), "--drafter", str(home / "dspark"), "--json"]) == 0
    assert costs.runs == runs
    told = json.loads(capsys.readouterr().out)
    entry = next(iter(CalibrationStore(cache).entries()))
    assert CostCurves.from_json(told[0]["curves"]) == entry.curves
    assert told[0]["predicted"]["dspark"]["0.9"]["0"] == 1.0
    assert run(["calibrate", str(home / "model"), "--drafter", str(home / "dspark"), "--force"]) == 0
    assert costs.runs > runs


def test_show_tells_what_is_known_and_measures_nothing(
    home: Path, cache: Path, costs: Costs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", str(home / "model"), "--show"]) == 2
    assert "Nothing is known of model" in capsys.readouterr().err
    for drafter in ([], ["--drafter", str(home / "dspark")]):
        assert run(["calibrate", str(home / "model"), *drafter]) == 0
    runs = costs.runs
    capsys.readouterr()
    assert run(["calibrate", str(home / "copy"), "--show", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert run(["calibrate", str(home / "model"), "--show"]) == 0
    assert capsys.readouterr().out.count("measured 20") == 2
    assert costs.runs == runs


def test_a_refused_measurement_is_shown_told_and_not_kept(
    home: Path, cache: Path, costs: Costs, capsys: pytest.CaptureFixture[str]
) -> None:
    costs.scale = lambda n: 1.0 + (n % 7) / 3
    assert run(["calibrate", str(home / "model")]) == 2
    said = capsys.readouterr()
    assert "nothing was kept" in said.err
    assert "in doubt" in said.out
    assert not list(CalibrationStore(cache).entries())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--show", "--force"], "--force is set"),
        (["--show", "--mode", "lookup"], "--mode is set"),
        (["--mode", "baseline"], "nobody drafts"),
        (["--plot", "curves.txt"], "--plot is 'curves.txt'"),
        (["--plot", "no such folder/curves.png"], "its folder does not exist"),
        (["--max-draft", "3"], "--max-draft"),
    ],
)
def test_what_the_command_cannot_do_is_refused(
    home: Path, cache: Path, costs: Costs, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", str(home / "model"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert costs.runs == 0


def test_a_picture_needs_the_extra(
    home: Path, cache: Path, costs: Costs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlx_dspark.foundation.pictures.find_spec", lambda _: None)
    assert run(["calibrate", str(home / "model"), "--plot", str(cache / "curves.png")]) == 2
    assert "[plot]'" in capsys.readouterr().err
    assert costs.runs == 0
