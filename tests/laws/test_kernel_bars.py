"""The script of the kernels' bars runs anywhere, ends with what it has, and compares the right things."""

from __future__ import annotations

import json
import os
import signal
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from benchmarks import kernel_bars
from benchmarks.argument_types import at_least
from benchmarks.scripted_drafter import ScriptedDrafter
from benchmarks.sides import Sides
from mlx_dspark.contracts import Ask
from mlx_dspark.foundation.request import SamplingParams
from mlx_dspark.kernels.cuda_attention.geometry import streaming
from mlx_dspark.nn.noise import RowNoise
from tests.tiny import save_tiny
from tests.tiny_drafters import save_tiny_dspark

WIDTHS = (1, 8, 2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in {"FIRST": WIDTHS, "QUERIES": WIDTHS, "REPEATS": 1, "CHAIN": 1, "CAPS": (7,)}.items():
        monkeypatch.setattr(kernel_bars, name, value)


def ran(piece: str, *more: str) -> list[Any]:
    return kernel_bars.main(["--tiny", "--only", piece, "--bits", "4", "--turns", "1", "--new", "48", *more])


@pytest.mark.parametrize(("piece", "times"), [("forward", "_ms"), ("attention", "_us")])
def test_times_of_both_sides_at_each_width(piece: str, times: str, tmp_path: Path) -> None:
    (row,) = ran(piece, "--json", str(tmp_path / "out.json"))
    assert set(row["ours" + times]) == set(row["stock" + times]) == set(WIDTHS)
    assert row["bars"]
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps([row]))


def test_geometries_are_timed_side_by_side(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def attend(q: Any, k: Any, v: Any, scale: float, mask: Any, sinks: Any, geometry: Any) -> mx.array:
        away = 1.0 if geometry == streaming(128, 32)[1] else 0.0
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks) + away

    monkeypatch.setattr(kernel_bars, "attend", attend)
    monkeypatch.setattr(kernel_bars, "on_cuda", lambda: True)
    (row,) = ran("attention", "--geometries")
    offered = [(width, each) for width in WIDTHS if width > 1 for each in streaming(128, 4 * width)]
    assert [(each["queries"], each["tiles"], each["stages"]) for each in row["geometries"]] == [
        (width, each.tiles, each.stages) for width, each in offered
    ]
    away = [each["away"] for each in row["geometries"]]
    assert away == pytest.approx([float(each == streaming(128, 32)[1]) for _, each in offered])
    assert capsys.readouterr().out.count(" us ") == len(offered)


def test_each_number_of_keys_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row["piece"] for row in ran("attention", "--keys", "8", "16")] == ["attention"] * 2
    with pytest.raises(SystemExit):
        ran("forward", "--keys", "8")
    assert "--keys is of `attention`" in capsys.readouterr().err


def test_a_scripted_drafter_answers_as_stock_does_in_fewer_rounds() -> None:
    (row,) = ran("pair8b")
    assert not [each for each in row["differ"] if not each["tie"]]
    assert row["tokens_a_round"]["stock"] == row["tokens_a_round"]["ours plain"] == 1
    assert row["tokens_a_round"]["cap 7"] > 2


def test_a_pair_answers_as_stock_does(tmp_path: Path) -> None:
    model, drafter = save_tiny(tmp_path / "model"), tmp_path / "drafter"
    save_tiny_dspark(drafter)
    (row,) = ran("pair", "--model", str(model), "--drafter", str(drafter))
    assert row["prompts"] == 1
    assert not [each for each in row["differ"] if not each["tie"]]


def test_an_interrupt_ends_it_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_bars, "_ms", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    rows = ran("forward")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == rows
    assert [row["piece"] for row in rows] == ["forward"]


@pytest.mark.parametrize("only", ["forward", "attention"])
def test_geometries_are_refused_where_there_are_none(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ran(only, "--geometries")
    assert "--geometries is of `attention`, on CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1", "-3", "two", "2.5", ""])
def test_numbers_that_a_script_cannot_use_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="no whole number of 2 or more"):
        at_least(2)(text)
    assert at_least(2)("2") == 2


def test_modules_take_turns() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = model(x := mx.ones((1, 4)))
    ours = nn.Linear(4, 4)
    sides = Sides(model, lambda held: held.update_modules({"layers": [{}, ours]}))
    after = model(x)
    assert sides.replaced == 1
    assert not mx.array_equal(before, after)
    for use, wanted in ((sides.use_stock, before), (sides.use_ours, after), (sides.use_stock, before)):
        use()
        assert mx.array_equal(model(x), wanted)


@pytest.mark.parametrize("acceptance", [0.0, 0.8, 1.0])
def test_drafts_are_right_as_often_as_told(acceptance: float) -> None:
    script = [i % 7 for i in range(2000)]
    drafter = ScriptedDrafter(script, acceptance)
    drafter._vocab = 7
    rows = drafter.new_rows()
    ask = Ask([0], [1990], [4], [SamplingParams()], RowNoise.of_seeds([0]))
    made = drafter.propose(rows, ask)
    drafts: Any = made.tokens[0].tolist()
    right = sum(draft == script[5 + i] for i, draft in enumerate(drafts))
    assert made.lengths == (1990,)
    assert abs(right / 1990 - acceptance) < 0.03
