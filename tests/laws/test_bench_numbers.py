"""Measuring without a model: statistics, order, verdicts, charts, summaries, what a machine tells."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.by_rounds import rate_by_rounds, rounds_of, usual
from mlx_dspark.bench.arms import Answer, Measured
from mlx_dspark.bench.cases import CONTENTS, Case, shipped_prompts
from mlx_dspark.bench.chart import Bar, bar, chart
from mlx_dspark.bench.machine import linux_state, macos_state, state_now
from mlx_dspark.bench.order import turns
from mlx_dspark.bench.picture import save_chart
from mlx_dspark.bench.report import TIE_RULE, figures, lossless, tables, told
from mlx_dspark.bench.stats import (
    Spread,
    VerifyRound,
    Work,
    accept_length,
    acceptance,
    rates,
    ratios,
    reached,
)
from mlx_dspark.bench.stock import Stock, StockArm
from mlx_dspark.bench.suite import Measurement, judge, measure
from mlx_dspark.bench.summary import lines, noisy
from mlx_dspark.bench.verdict import TIE_FACTOR, Gap, Verdict, compared, first_difference
from mlx_dspark.cli.benchmark import Told
from mlx_dspark.foundation.bench_settings import BenchmarkSettings
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.events import Committed, EngineEvent, Prefilled, RoundReport
from mlx_dspark.foundation.pictures import check_picture
from mlx_dspark.foundation.settings import LoadSettings

CHANCES = st.lists(st.floats(0, 1), min_size=1, max_size=5)
TOKENS = st.lists(st.integers(0, 3), max_size=8)


# -- statistics


def test_a_spread_is_the_median_between_the_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert Spread.of([]) is None
    assert Spread(2.0, 1.0, 3.0, 3).width == 1.0


def drawn_rounds(chances: Sequence[float], caps: Sequence[int], count: int) -> list[VerifyRound]:
    """Rounds of these caps by turns, in which draft `i` is accepted with chance `chances[i]`."""
    draw = random.Random(1)
    rounds = []
    for n in range(count):
        drafted = min(caps[n % len(caps)], len(chances))
        accepted = next((i for i in range(drafted) if draw.random() >= chances[i]), drafted)
        rounds.append(VerifyRound(drafted, accepted, accepted + 1))
    return rounds


@pytest.mark.parametrize("caps", [[3], [1, 2, 3]])
def test_acceptance_by_position_is_the_chance_whatever_the_caps(caps: list[int]) -> None:
    chances = [0.9, 0.5, 0.7]
    found = acceptance(drawn_rounds(chances, caps, 30_000))
    assert found == pytest.approx(chances, abs=0.03)


@settings(deadline=None)
@given(CHANCES, st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_accept_length_is_one_and_the_shares_that_reached_a_position(
    chances: list[float], caps: list[int]
) -> None:
    rounds = drawn_rounds(chances, caps, 50)
    assert accept_length(rounds) == pytest.approx(1 + sum(reached(rounds)))
    assert list(reached(rounds)) == sorted(reached(rounds), reverse=True)
    assert all(0 <= share <= 1 for share in acceptance(rounds))


def test_without_rounds_there_is_no_accept_length() -> None:
    assert (accept_length([]), reached([]), acceptance([])) == (None, (), ())


def test_rates_weigh_cases_by_their_time() -> None:
    fast, slow = Work(100, 1.0), Work(100, 4.0)
    assert rates([[fast, slow], [fast, fast]]) == Spread(70.0, 40.0, 100.0, 2)
    assert rates([[Work(0, 0.0)]]) is None


def test_ratios_are_taken_within_a_trial() -> None:
    """A machine that slows to a third between trials moves rates, not ratios."""
    ours = [[Work(100, 1.0)], [Work(100, 3.0)]]
    theirs = [[Work(100, 2.0)], [Work(100, 6.0)]]
    assert ratios(ours, theirs) == Spread(2.0, 2.0, 2.0, 2)


# -- order


@settings(deadline=None)
@given(
    st.lists(st.sets(st.integers(0, 3), min_size=1), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_every_arm_has_one_turn_on_each_of_its_cases_in_each_trial(
    cases: list[set[int]], trials: int, seed: int
) -> None:
    order = list(turns(4, [sorted(case) for case in cases], trials, seed))
    wanted = {(t, c, arm) for t in range(trials) for c, case in enumerate(cases) for arm in case}
    assert Counter(order) == Counter(wanted)
    assert [(turn.trial, turn.case) for turn in order] == sorted((turn.trial, turn.case) for turn in order)
    assert order == list(turns(4, [sorted(case) for case in cases], trials, seed))


def test_every_arm_is_first_about_as_often() -> None:
    order = list(turns(4, [range(4)], 4000, 7))
    first = Counter(turn.arm for turn in order[::4])
    assert all(count == pytest.approx(1000, abs=120) for count in first.values())


# -- verdicts


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_the_first_difference_is_where_answers_part(ours: list[int], theirs: list[int]) -> None:
    at = first_difference(ours, theirs)
    if at is None:
        assert ours == theirs
    else:
        assert ours[:at] == theirs[:at]
        assert ours[at : at + 1] != theirs[at : at + 1]


def test_a_comparison_names_both_tokens() -> None:
    assert compared([1, 2, 3], [1, 2, 3]) == Verdict(True)
    assert compared([1, 2, 3], [1, 5, 3]) == Verdict(False, 1, 2, 5)
    assert compared([1, 2, 3], [1, 2]) == Verdict(False, 2, 3, None)


def gap(token_gap: float, rounding: float = 1e-3) -> Gap:
    return Gap((2, 5), abs(token_gap), token_gap, rounding)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (Verdict(True), "identical"),
        (Verdict(False, 1, 2, 5), "unjudged"),
        (Verdict(False, 1, 2, 5, gap(0.99 * TIE_FACTOR * 1e-3)), "tie"),
        (Verdict(False, 1, 2, 5, gap(-0.99 * TIE_FACTOR * 1e-3)), "tie"),
        (Verdict(False, 1, 2, 5, gap(1.01 * TIE_FACTOR * 1e-3)), "differs"),
        (Verdict(False, 1, 2, 5, Gap((2, 3), 1e-6, 3.0, 1e-3)), "differs"),
        (Verdict(False, 1, 2, 5, reason="held otherwise"), "explained"),
    ],
)
def test_a_tie_is_a_gap_between_the_two_tokens_that_rounding_can_close(found: Verdict, kind: str) -> None:
    """The last one: the top two are a tie, and the arm wrote a third token."""
    assert found.kind == kind
    words = told(found, lambda token: f"<{token}>")
    expected = {
        "identical": "identical",
        "unjudged": "was not asked",
        "tie": ": a floating-point tie",
        "differs": ": not a floating-point tie",
        "explained": "no fault: held otherwise",
    }
    assert expected[kind] in words
    if not found.same:
        assert "'<5>' (5), where plain decoding has '<2>' (2)" in words


# -- charts


@settings(deadline=None)
@given(st.floats(0, 1e6), st.floats(1e-3, 1e6), st.integers(1, 80))
def test_a_bar_is_as_long_as_its_share(value: float, most: float, cells: int) -> None:
    drawn = bar(value, most, cells)
    eighths = 8 * drawn.count("█") + sum("▏▎▍▌▋▊▉".find(sign) + 1 for sign in drawn.strip("█"))
    assert eighths == pytest.approx(8 * cells * min(1.0, value / most), abs=0.51)
    assert len(drawn) <= cells


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            Bar,
            st.sampled_from(["chat", "code"]),
            st.sampled_from(["baseline", "lookup 4"]),
            st.floats(0, 9999),
            st.just(0.0),
            st.just(0.0),
            st.sampled_from(["", "1.00x"]),
        ),
        max_size=6,
    ),
    st.integers(50, 120),
)
def test_a_chart_keeps_to_its_width_and_has_a_line_for_each_bar(bars: list[Bar], width: int) -> None:
    drawn = chart(bars, width)
    assert all(len(line) <= width for line in drawn)
    assert sum(line.startswith("  ") for line in drawn) == len(bars)


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"pip install '/.*\[plot\]'"):
        check_picture(str(tmp_path / "rates.png"), stem="rates", besides="terminal")
    check_picture("terminal", stem="rates", besides="terminal")
    check_picture(None, stem="rates")


class FakeFigure:
    """Stands for matplotlib's: keeps what was drawn, and cannot be saved where `full` says so."""

    full = False
    drawn: dict[str, Any]

    def __init__(self, **_: Any) -> None:
        FakeFigure.drawn = {}

    def __getattr__(self, name: str) -> Any:
        def draw(*values: Any, **named: Any) -> FakeFigure:
            if name == "savefig" and self.full:
                raise OSError(28, "No space left on device")
            FakeFigure.drawn[name] = (values, named)
            return self

        return draw


@pytest.fixture
def matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = ModuleType("matplotlib.figure")
    figure.Figure = FakeFigure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)


@pytest.mark.usefixtures("matplotlib")
def test_a_picture_has_every_bar_with_its_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = [Bar("chat", "baseline", 10, 8, 13), Bar("chat", "lookup", 20, 20, 21, "2.00x")]
    save_chart(bars, tmp_path / "rates.png", title="tiny", unit="tokens a second")
    (places, values), named = FakeFigure.drawn["barh"]
    assert (list(places), values, named["xerr"]) == ([0, 1], [10, 20], [[2, 0], [3, 1]])
    assert FakeFigure.drawn["savefig"][0] == (tmp_path / "rates.png",)
    monkeypatch.setattr(FakeFigure, "full", True)
    with pytest.raises(UsageError, match="No space left on device"):
        save_chart(bars, tmp_path / "rates.png", title="tiny", unit="tokens a second")


def test_a_picture_read_back_has_bars_as_long_as_their_values(tmp_path: Path) -> None:
    bars = [Bar("chat", "baseline", 10, 10, 10), Bar("chat", "lookup", 30, 30, 30, "3.00x")]
    path = tmp_path / "rates.png"
    save_chart(bars, path, title="tiny", unit="tokens a second")
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = import_module("matplotlib.image").imread(path)
    blue = abs(pixels[:, :, :3] - [0x1F / 255, 0x77 / 255, 0xB4 / 255]).max(axis=2) < 0.02
    lengths = blue.sum(axis=1)
    first, *_, last = lengths[lengths > 0]
    assert last / first == pytest.approx(3, rel=0.05)


# -- the suite


class FakeArm:
    """Answers `tokens` at `rate`, and raises KeyboardInterrupt at its `stop`th turn after the warm-up."""

    reason = ""

    def __init__(
        self, label: str, rate: float, tokens: Sequence[int] = (1, 2, 3), stop: int = 0, most_rows: int = 9
    ) -> None:
        self.label = label
        self.rate = rate
        self.tokens = tuple(tokens)
        self.stop = stop
        self.most_rows = most_rows
        self.asked: list[Case] = []

    def takes(self, case: Case) -> bool:
        return case.rows <= self.most_rows

    def answer(self, case: Case, seed: int) -> Measured:
        self.asked.append(case)
        if self.stop and len([each for each in self.asked if each in CASES]) == self.stop:
            raise KeyboardInterrupt
        decode = Work(100, 100 / self.rate)
        answers = tuple(Answer(self.tokens) for _ in case.prompts)
        return Measured(answers, Work(10, 0.1), 0.1, decode, 2000, 500)


CASES = [
    Case("chat", "chat 1", ((1, 2),), 40),
    Case("chat", "chat 2", ((3, 4),), 40),
    Case("chat, T=1", "chat 1", ((1, 2),), 40, 1.0),
    Case("2 rows", "2 rows", ((1, 2), (3, 4)), 40),
]


def no_gap(tokens: Sequence[int], expected: int, got: int) -> Gap:
    raise AssertionError("the target is asked where answers part only")


def test_all_arms_are_warmed_up_and_take_all_their_turns() -> None:
    arms = [FakeArm("baseline", 10), FakeArm("lookup", 25), FakeArm("mlx-lm", 5, most_rows=1)]
    found = measure(arms, CASES, trials=3, seed=0)
    assert {key: len(taken) for key, taken in found.turns.items()} == {
        (case, arm): 3 for case in range(4) for arm in range(3) if not (arm == 2 and case == 3)
    }
    kinds = {(1, 0.0), (1, 1.0), (2, 0.0)}
    for arm in arms:
        warm = [each for each in arm.asked if each not in CASES]
        wanted = {kind for kind in kinds if kind[0] <= arm.most_rows}
        assert {(case.rows, case.temperature) for case in warm} == wanted
        assert arm.asked[: len(warm)] == warm
    found_lines = {(line.group, line.arm): line for line in lines(found, judge(found, 0, no_gap), 0)}
    line = found_lines["chat", "lookup"]
    assert line.decode == Spread(25.0, 25.0, 25.0, 3)
    assert line.against_plain == Spread(2.5, 2.5, 2.5, 3)
    assert line.verdicts == {"identical": 2}
    assert found_lines["chat, T=1", "lookup"].verdicts == {}
    assert found_lines["2 rows", "lookup"].verdicts == {"identical": 2}
    assert ("2 rows", "mlx-lm") not in found_lines


@pytest.mark.parametrize("stop", range(1, 13))
def test_an_interrupt_keeps_and_shows_what_was_measured(stop: int) -> None:
    arms = [FakeArm("baseline", 10), FakeArm("lookup", 25, stop=stop)]
    found = measure(arms, CASES, trials=3, seed=0)
    assert found.interrupted
    assert sum(len(taken) for (_, arm), taken in found.turns.items() if arm == 1) == stop - 1
    judged = judge(found, 0, no_gap)
    shown = lines(found, judged, 0)
    for line in shown:
        assert line.decode is not None
        assert line.decode.median == {"baseline": 10.0, "lookup": 25.0}[line.arm]
        if line.arm == "lookup" and line.against_plain is not None:
            assert line.against_plain.median == 2.5
    values = json.loads(json.dumps(figures(found, shown, judged, str)))
    assert values["interrupted"]
    assert len(values["turns"]) == sum(map(len, found.turns.values()))
    assert all(table.columns for table in tables(shown))


def test_an_interrupt_of_the_judge_leaves_differences_unjudged() -> None:
    found = measure([FakeArm("baseline", 10), FakeArm("lookup", 25, (1, 9))], CASES, trials=1, seed=0)

    def interrupted(tokens: Sequence[int], expected: int, got: int) -> Gap:
        raise KeyboardInterrupt

    assert {each.verdict.kind for each in judge(found, 0, interrupted)} == {"identical", "unjudged"}
    assert found.interrupted


def test_the_target_is_asked_what_comes_after_the_common_tokens() -> None:
    found = measure([FakeArm("baseline", 10), FakeArm("lookup", 25, (1, 9))], CASES[:1], trials=2, seed=0)
    asked = []

    def ask(tokens: Sequence[int], expected: int, got: int) -> Gap:
        asked.append((list(tokens), expected, got))
        return gap(1.0)

    judged = judge(found, 0, ask)
    assert asked == [([1, 2, 1], 2, 9)]
    assert [each.verdict.kind for each in judged] == ["identical", "differs"]
    line = lines(found, judged, 0)[1]
    assert lossless(line.verdicts) == "0/1, 1 differs"


def test_an_arm_that_has_a_reason_to_differ_is_at_no_fault() -> None:
    stock = StockArm(cast(Stock, None), LoadSettings(kv_bits=8), (), draft=False)
    assert not StockArm(cast(Stock, None), LoadSettings(), (), draft=False).reason
    arm = FakeArm(stock.label, 25, (1, 9))
    arm.reason = stock.reason
    found = measure([FakeArm("baseline", 10), arm], CASES[:1], trials=1, seed=0)
    judged = judge(found, 0, no_gap)
    assert [each.verdict.kind for each in judged] == ["identical", "explained"]
    assert "quantizes" in told(judged[1].verdict, str)


@pytest.mark.parametrize("kind", ["tie", "differs"])
def test_what_a_tie_is_is_told_where_there_is_one(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = measure([FakeArm("baseline", 10), FakeArm("lookup", 25, (1, 9))], CASES[:1], trials=1, seed=0)
    judged = judge(found, 0, lambda *_: gap(0.0 if kind == "tie" else 1.0))
    Told(BenchmarkSettings(), found, lines(found, judged, 0), judged, str).show({})
    assert (TIE_RULE in capsys.readouterr().out) == (kind == "tie")


@pytest.mark.parametrize("stop", [1, 4])
def test_an_interrupt_says_whether_a_turn_was_complete(stop: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = measure([FakeArm("baseline", 10, stop=stop)], CASES, trials=3, seed=0)
    Told(BenchmarkSettings(), found, lines(found, [], 0), [], str).show({})
    assert ("no turn was complete" in capsys.readouterr().err) == (stop == 1)


def test_an_arm_that_drafted_nothing_has_a_row_that_says_so() -> None:
    found = measure([FakeArm("baseline", 10), FakeArm("lookup", 25)], CASES[:1], trials=1, seed=0)
    shown = [replace(line, rounds=9) for line in lines(found, [], 0)]
    rows = tables(shown)[1]
    assert rows.row_count == 1
    assert "drafted nothing" in rows.columns[3].cells


def test_any_trial_that_differs_is_the_verdict() -> None:
    found = Measurement(["baseline", "lookup"], CASES[:1], 2)
    good = FakeArm("", 10).answer(CASES[0], 0)
    bad = replace(good, answers=(Answer((1, 2, 4)),))
    found.turns = {(0, 0): [good, good], (0, 1): [good, bad]}
    assert [each.verdict.kind for each in judge(found, 0, lambda *_: gap(1.0))] == ["identical", "differs"]


def test_answers_in_a_batch_are_compared_with_those_alone() -> None:
    found = Measurement(["baseline"], CASES, 1)
    alone = FakeArm("", 10).answer(CASES[0], 0)
    batch = replace(alone, answers=(Answer((1, 2, 4)), Answer((7,))))
    found.turns = {(0, 0): [alone], (3, 0): [batch]}
    judged = judge(found, 0, lambda *_: gap(1.0))
    assert [(each.case, each.row, each.verdict.same) for each in judged] == [
        (0, 0, True),
        (3, 0, False),
        (3, 1, True),
    ]


@pytest.mark.parametrize(("rate", "loud"), [(10.5, False), (20.0, True)])
def test_a_machine_that_changes_between_trials_is_told(rate: float, loud: bool) -> None:
    found = Measurement(["baseline"], CASES[:1], 2)
    found.turns = {(0, 0): [FakeArm("", each).answer(CASES[0], 0) for each in (10.0, rate)]}
    assert ("chat" in noisy(lines(found, [], 0), "baseline")) == loud


# -- what comes with it, and what a machine tells


@pytest.mark.parametrize("content", CONTENTS)
def test_prompts_come_with_the_program(content: str) -> None:
    prompts = shipped_prompts(content)
    assert len(prompts) == len({*prompts}) >= 2
    licences = (Path(shipped_prompts.__code__.co_filename).parent / "prompts" / "README.md").read_text()
    assert f"`{content}.jsonl`" in licences


def test_linux_tells_power_and_heat(tmp_path: Path) -> None:
    files = {
        "class/power_supply/AC/type": "Mains\n",
        "class/power_supply/AC/online": "1\n",
        "class/power_supply/BAT0/status": "Charging\n",
        "class/thermal/thermal_zone0/type": "cpu\n",
        "class/thermal/thermal_zone0/temp": "61500\n",
        "class/thermal/thermal_zone1/temp": "nothing\n",
        "class/thermal/cooling_device0/temp": "5\n",
        "devices/system/cpu/cpufreq/policy0/scaling_governor": "powersave\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert linux_state(tmp_path) == {
        "power": {"AC": {"type": "Mains", "online": "1"}, "BAT0": {"status": "Charging"}},
        "temperatures": {"thermal_zone0 cpu": 61.5},
        "governors": ["powersave"],
    }


def test_what_a_system_does_not_tell_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    assert state_now(tmp_path / "nothing").keys() == {"load_average", "available_memory_bytes"}
    assert macos_state("", "") == {"power": {}, "limits": {}}


def test_macos_tells_power_and_limits() -> None:
    battery = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t87%; discharging; 4:10 remaining"
    thermal = (
        "Note: No thermal warning level has been recorded\nCPU_Scheduler_Limit \t= 100\nCPU_Speed_Limit = 80"
    )
    assert macos_state(battery, thermal) == {
        "power": {"source": "Battery Power", "charge_percent": 87},
        "limits": {"CPU_Scheduler_Limit": 100, "CPU_Speed_Limit": 80},
    }


def test_a_busy_moment_changes_no_rate_by_rounds() -> None:
    """The rate is what an undisturbed run of the same rounds takes."""

    def events(slow: int) -> list[EngineEvent]:
        landed, found = 1.0, []
        kinds = [(1, 0, 0.1), (4, 3, 0.2)] * 6
        found.append(Prefilled(9, 9, RoundReport(0.5, landed, 1, 9, 9, 0, 0, 0, 0, 0)))
        for number, (width, drafted, seconds) in enumerate(kinds):
            began, landed = landed, landed + seconds + (5.0 if number == slow else 0.0)
            source = "lookup" if drafted else ""
            report = RoundReport(began, landed, 1, width, 1, drafted, drafted, 1, 1 + drafted, 9, source)
            found.append(Committed((1,) * (1 + drafted), report))
        return found

    calm, busy = rounds_of(events(-1)), rounds_of(events(5))
    known = usual([*calm, *busy])
    assert known == {("", 1, False): pytest.approx(0.1), ("lookup", 4, False): pytest.approx(0.2)}
    assert rate_by_rounds([(busy, known)]) == pytest.approx(rate_by_rounds([(calm, known)]))
    assert rate_by_rounds([(calm, known)]) == pytest.approx(5 / 0.3)
    assert sum(each.seconds for each in busy) == pytest.approx(6 * 0.3 + 5.0)
