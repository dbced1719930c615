"""Laws of the probe: a case is admitted when it is right, faster and steady, and for nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_dspark.kernels
from mlx_dspark.kernels.framework import edition
from mlx_dspark.kernels.framework.kernel import AttentionShape, Case
from mlx_dspark.kernels.framework.probe import Effort, judge, largest_error
from mlx_dspark.kernels.framework.registry import ENTRIES, Entry
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product
from mlx_dspark.kernels.framework.store import FILE, GOOD_FOR, VerdictStore
from mlx_dspark.kernels.framework.trial import Job, tried
from mlx_dspark.kernels.framework.verdict import STATES, Verdict
from tests.scripted_kernels import SHAPE, US, Clock, Scripted

CASE = Case(SHAPE, 4)
ACTORS = "tests.scripted_kernels:"


def judged(effort: Effort | None = None, **script: Any) -> Verdict:
    clock = Clock()
    return judge(Scripted(clock, **script), CASE, clock.bench(), effort)


# right --------------------------------------------------------------------------------------------


def test_a_kernel_that_is_right_faster_and_steady_is_live() -> None:
    found = judged()
    assert (found.state, found.reason, found.refusals) == ("live", "", ())
    assert found.geometry == repr("wide")
    assert found.kernel_us == pytest.approx(500)
    assert found.speed_up == pytest.approx(2)
    assert 0 <= found.error < 1e-5


def test_the_fastest_geometry_is_chosen_wherever_it_stands() -> None:
    assert judged(costs={"first": 900 * US, "last": 300 * US}).geometry == repr("last")


def test_a_geometry_that_is_wrong_is_left_for_one_that_is_right() -> None:
    found = judged(spoil=lambda out, _, geometry: out + 1 if geometry == "wide" else out)
    assert (found.state, found.geometry) == ("live", repr("small"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, number, _: out * 1.001,
        lambda out, number, _: out + (mx.arange(out.shape[1]) == 63) * 0.1,
        lambda out, number, _: mx.where(mx.arange(out.shape[1]) == 5, mx.nan, out),
        lambda out, number, _: out if number % 2 == 0 else out * 1.01,
    ],
    ids=["a little off", "last column", "not a number", "second draw only"],
)
def test_a_kernel_that_is_wrong_is_never_admitted(spoil: Callable[..., mx.array]) -> None:
    found = judged(spoil=spoil)
    assert found.state == "wrong"
    assert "largest output" in found.reason


def test_a_result_of_another_shape_is_refused_and_not_broadcast() -> None:
    assert judged(spoil=lambda out, *_: out[:, :1]).state == "failed"


def test_a_kernel_that_becomes_wrong_in_a_long_run_is_not_admitted() -> None:
    found = judged(spoil=lambda out, number, _: out if number < 400 else out * 1.01)
    assert found.state == "wrong"
    assert "sustained" in found.reason


@pytest.mark.parametrize(("same_bits", "state"), [(True, "wrong"), (False, "live")])
def test_other_bits_than_mlx_count_where_they_must_be_the_same(same_bits: bool, state: str) -> None:
    assert judged(same_bits=same_bits, spoil=lambda out, *_: out * (1 + 1e-6)).state == state
    assert judged(same_bits=same_bits).state == "live"


def test_the_largest_error_is_a_share_of_the_largest_number() -> None:
    wanted = np.array([2.0, -4.0], np.float32)
    assert largest_error(np.array([2.0, -3.0], np.float32), wanted) == 0.25
    assert largest_error(wanted, wanted) == 0
    assert largest_error(np.array([2.0, np.inf], np.float32), wanted) > 1e20


# refused ------------------------------------------------------------------------------------------


def test_a_refused_launch_tries_the_next_geometry() -> None:
    found = judged(refused=["wide"])
    assert (found.state, found.geometry) == ("live", repr("small"))
    assert len(found.refusals) == 1
    assert "'wide'" in found.refusals[0]


def test_a_device_that_takes_no_geometry_keeps_mlx_s_way() -> None:
    found = judged(refused=["wide", "small"])
    assert (found.state, len(found.refusals)) == ("refused", 2)


@pytest.mark.parametrize("method", ["draw", "reference", "geometries", "launch", "stock", "tolerance"])
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("x"), MemoryError(), AssertionError()])
def test_whatever_a_kernel_raises_is_a_verdict(method: str, error: Exception) -> None:
    found = judged(raises={method: error})
    assert found.state == "failed"
    assert type(error).__name__ in found.reason


# fast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [980 * US, 1000 * US, 3000 * US])
def test_a_kernel_that_is_no_faster_is_not_admitted(cost: float) -> None:
    found = judged(costs={"wide": cost})
    assert (found.state, found.admitted) == ("slower", False)
    assert found.kernel_us == pytest.approx(1e6 * cost)


def test_winning_three_of_five_turns_by_far_is_not_enough() -> None:
    turns = [0.5, 0.5, 0.5, 1.5, 1.5]
    found = judged(costs={"wide": 800 * US}, slow=lambda seconds, number: seconds * turns[number // 40 % 5])
    assert found.state == "slower"
    assert "slower in" in found.reason


def test_a_slow_product_is_timed_alone() -> None:
    clock = Clock()
    kernel = Scripted(clock, costs={"wide": 0.5}, stock_cost=2.0)
    assert judge(kernel, CASE, clock.bench()).state == "live"
    assert kernel.launches < 30


# steady -------------------------------------------------------------------------------------------


def test_a_kernel_that_stalls_only_in_a_long_run_is_not_admitted() -> None:
    found = judged(slow=lambda seconds, number: seconds if number != 300 else 105.0)
    assert found.state == "stalled"
    assert "105" in found.reason


def test_a_kernel_that_slumps_in_a_long_run_is_not_admitted() -> None:
    found = judged(slow=lambda seconds, number: seconds if number < 250 else 4 * seconds)
    assert (found.state, "sustained" in found.reason) == ("slower", True)


def test_the_long_run_takes_as_long_as_it_should() -> None:
    clock = Clock()
    judge(Scripted(clock), CASE, clock.bench(), Effort(sustained=1.0))
    assert 1.0 <= clock.seconds < 1.5


# in a process of its own --------------------------------------------------------------------------

QUICK = Effort(races=5, seconds=0.1, launches=2, sustained=0.05)


def states_of(*actors: str, effort: Effort = QUICK) -> list[tuple[str, str]]:
    """By actor, in the order they were asked for; "not tried" for what was left out after another."""
    jobs = [Job(f"{ACTORS}{actor}", Case(SHAPE, width)) for width, actor in enumerate(actors, start=1)]
    found = list(tried(jobs, effort=effort, silence=1.5))
    assert [job for job, _ in found if job in jobs] == [job for job, _ in found]
    assert len(found) == len(jobs)
    by_job = dict(found)
    left_out = {job for job, verdict in found if "not tried" in verdict.reason}
    states = [f"{'not tried, ' if job in left_out else ''}{by_job[job].state}" for job in jobs]
    return list(zip(actors, states, strict=True))


def test_a_launch_that_never_comes_back_ends_its_process_and_nothing_else() -> None:
    assert states_of("good", "hanging", "chatty", "hanging", "good") == [
        ("good", "live"),
        ("hanging", "stalled"),
        ("chatty", "live"),
        ("hanging", "not tried, stalled"),
        ("good", "live"),
    ]


def test_what_mlx_takes_to_compile_its_own_is_no_stall_of_a_kernel() -> None:
    assert states_of("compiled_by_mlx", "hanging", "compiled_by_mlx") == [
        ("compiled_by_mlx", "live"),
        ("hanging", "stalled"),
        ("compiled_by_mlx", "live"),
    ]


def test_where_mlx_never_ends_nothing_is_held_against_the_kernel() -> None:
    wanted = [("never_compiled", "untried"), ("good", "live"), ("never_compiled", "not tried, untried")]
    assert (
        states_of("never_compiled", "good", "never_compiled", effort=replace(QUICK, compiling=2.0)) == wanted
    )


def test_no_load_waits_for_mlx_beyond_its_budget() -> None:
    jobs = [Job(f"{ACTORS}never_compiled", Case(SHAPE, width)) for width in (1, 2)]
    started = monotonic()
    found = list(tried(jobs, effort=replace(QUICK, compiling=600.0), silence=1.5, budget=3.0))
    assert monotonic() - started < 60.0
    assert [verdict.state for _, verdict in found] == ["untried", "untried"]


@pytest.mark.parametrize("actor", ["dying", "leaving"])
def test_a_launch_that_takes_its_process_with_it_is_a_verdict(actor: str) -> None:
    wanted = [(actor, "failed"), ("good", "live"), (actor, "not tried, failed")]
    assert states_of(actor, "good", actor) == wanted


def test_what_there_is_no_time_for_stays_untried() -> None:
    jobs = [Job(f"{ACTORS}good", Case(SHAPE, width)) for width in (1, 2, 3)]
    found = [verdict.state for _, verdict in tried(jobs, effort=QUICK, budget=0.0)]
    assert found == ["live", "untried", "untried"]


def test_a_slow_reference_is_computed_once() -> None:
    clock = Clock()
    kernel = Scripted(clock)
    really, drawn = kernel.reference, []

    def reference(inputs: Any) -> Any:
        drawn.append(inputs)
        clock.seconds += 3.0
        return really(inputs)

    kernel.reference = reference
    assert judge(kernel, CASE, clock.bench()).state == "live"
    assert len(drawn) == 1


def test_a_kernel_that_cannot_be_made_stays_untried() -> None:
    assert states_of("missing", "good") == [("missing", "untried"), ("good", "live")]


def test_without_a_process_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert states_of("good") == [("good", "untried")]


def test_a_process_that_does_not_begin_tries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_dspark.kernels.framework.trial._CHILD", "import time; time.sleep(60)")
    (found,) = (verdict for _, verdict in tried([Job(f"{ACTORS}good", CASE)], starting=0.5))
    assert found.state == "untried"


# remembered ---------------------------------------------------------------------------------------

LIVE = Verdict("live", geometry="('a', 1)", kernel_us=1.5, stock_us=3.0, error=1e-4, refusals=("no",))


def test_verdicts_on_another_text_of_a_kernel_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, kernel = VerdictStore(tmp_path, "M2"), Scripted(Clock())
    store.remember(kernel, {CASE: Verdict("live")})
    assert CASE in store.recall(kernel)
    monkeypatch.setattr("mlx_dspark.kernels.framework.store.edition", lambda *_: "another")
    assert store.recall(kernel) == {}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_edition_of_a_kernel_is_that_of_all_its_text(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path(mlx_dspark.kernels.__file__).parent
    copy = tmp_path / "kernels"
    shutil.copytree(home, copy, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = entry.kernel()
    monkeypatch.setattr(edition, "files", lambda _: copy)
    monkeypatch.setattr(edition, "_edition", edition._edition.__wrapped__)
    before = edition.edition(kernel, kernel.back_end)
    texts = [file for file in (copy / type(kernel).__module__.split(".")[2]).iterdir() if file.is_file()]
    texts += [copy / "cuda_common" / "lanes.cuh"] if kernel.back_end == "cuda" else []
    for file in texts:
        held = file.read_bytes()
        file.write_bytes(held + b"\n")
        changed = edition.edition(kernel, kernel.back_end) != before
        assert changed == (file.suffix != ".md"), file.name
        file.write_bytes(held)
    assert edition.edition(kernel, kernel.back_end) == before


def test_verdicts_are_remembered_by_device_mlx_version_kernel_version_and_case(tmp_path: Path) -> None:
    kernel, other = Scripted(Clock()), Scripted(Clock(), version=2)
    store = VerdictStore(tmp_path, "one machine")
    assert store.recall(kernel) == {}
    assert store.remember(kernel, {CASE: LIVE}) == ""
    assert store.remember(kernel, {Case(SHAPE, 8): Verdict("refused", "no")}) == ""
    assert store.recall(kernel) == {CASE: LIVE, Case(SHAPE, 8): Verdict("refused", "no")}
    assert store.recall(other) == {}
    assert VerdictStore(tmp_path, "another machine").recall(kernel) == {}
    assert VerdictStore(tmp_path).remember(other, {CASE: LIVE}) == ""
    assert store.recall(kernel)[CASE] == LIVE


@pytest.mark.parametrize("state", STATES)
def test_a_verdict_that_other_work_may_have_caused_is_found_out_anew(state: Any, tmp_path: Path) -> None:
    now = [1000.0]
    kernel, store = Scripted(Clock()), VerdictStore(tmp_path, "m", now=lambda: now[0])
    store.remember(kernel, {CASE: Verdict(state)})
    now[0] += 7 * 24 * 3600
    assert CASE in store.recall(kernel)
    now[0] += 100 * 24 * 3600
    assert (CASE in store.recall(kernel)) is (state not in GOOD_FOR)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        "nonsense",
        '{"schema": 99, "machines": {}}',
        '{"schema": 2, "machines": {"m": {"KERNEL": {"a x 1": {"state": "live"}}}}}',
        '{"schema": 2, "machines": {"m": {"KERNEL": {"a x y": %s}}}}',
        '{"schema": 2, "machines": {"m": {"KERNEL": 5}}}',
    ],
)
def test_a_damaged_file_is_set_aside(damage: str, tmp_path: Path) -> None:
    kernel, store = Scripted(Clock()), VerdictStore(tmp_path, "m")
    named = f"{kernel.name} {kernel.version} {edition.edition(kernel, kernel.back_end)}"
    text = damage.replace("%s", json.dumps({**LIVE.to_json(), "at": 0})).replace("KERNEL", named)
    file = tmp_path / FILE
    file.write_text(text)
    assert store.recall(kernel) == {}
    assert (tmp_path / f"{FILE}.damaged").read_text() == text
    assert store.remember(kernel, {CASE: LIVE}) == ""
    assert store.recall(kernel) == {CASE: LIVE}


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kernel, store = Scripted(Clock()), VerdictStore(tmp_path / "file", "m")
    assert "cannot be written" in store.remember(kernel, {CASE: LIVE})


@pytest.mark.parametrize("name", ["kernel_us", "stock_us", "error", "kernel_host_us", "stock_host_us"])
@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf"), "x", None])
def test_a_verdict_of_impossible_numbers_is_none(name: str, number: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Verdict.of({**LIVE.to_json(), name: number})


# shapes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize(
    ("bits", "group", "experts"), [(4, 64, 0), (8, 32, 0), (2, 128, 0), (4, 32, 3), (0, 0, 0)]
)
def test_a_shape_is_read_as_it_is_written_and_drawn_as_it_says(
    bits: int, group: int, experts: int, dtype: mx.Dtype
) -> None:
    shape = MatrixShape(96, 256, bits, group, dtype, experts)
    assert MatrixShape.parse(str(shape)) == shape
    for source in (shape.draw(1), shape.outline()):
        assert MatrixShape.of(source, dtype) == shape
        assert source.weight.shape[-2] == 96
        if source.scales is not None:
            whole = mx.dequantize(source.weight, source.scales, source.biases, group, bits)
            assert whole.shape == (*([experts] if experts else []), 96, 256)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_exact_product_is_mlx_s_in_float32(bits: int) -> None:
    shape = MatrixShape(72, 256, bits, 32, mx.float32)
    source, x = shape.draw(3), shape.draw_rows(5, 3)
    assert source.scales is not None
    wanted = mx.quantized_matmul(
        x, source.weight, source.scales, source.biases, transpose=True, group_size=32, bits=bits
    )
    assert largest_error(np.array(wanted), exact_product(x, source)) < 1e-6
    assert 0.1 < np.std(np.array(wanted)) < 10


def test_the_shape_of_an_attention_is_read_as_it_is_written() -> None:
    for sinks in (False, True):
        shape = AttentionShape(32, 8, 128, mx.bfloat16, 8192, sinks)
        assert AttentionShape.parse(str(shape)) == shape
    for text in ("h1-kv1-d64-s9-float64", "1x1-float16"):
        with pytest.raises(ValueError, match="no shape"):
            AttentionShape.parse(text)
