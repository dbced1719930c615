"""`kernels`: what it tells of a model, what a check tries, and what it makes of a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.cli.main import run
from mlx_dspark.doctor import kernels as doctor
from mlx_dspark.foundation.settings import LoadSettings, stray_variables
from mlx_dspark.kernels.cpu_blocks.matrix import Blocks
from mlx_dspark.kernels.framework import cpu_ways
from mlx_dspark.kernels.framework.check import cases_to_check, checkable
from mlx_dspark.kernels.framework.kernel import Case
from mlx_dspark.kernels.framework.live import KernelState
from mlx_dspark.kernels.framework.probe import Effort, judge
from mlx_dspark.kernels.framework.trial import Job, tried
from mlx_dspark.kernels.framework.verdict import Verdict
from tests.tiny import save_tiny

QUICK = Effort(draws=1, races=5, seconds=0.0, launches=1, sustained=0.0)
WAYS = [cpu_ways.blocks, cpu_ways.dense, cpu_ways.attention, cpu_ways.swiglu]
NAMES = ["cpu-weights-blocks", "cpu-weights-dense", "cpu-attention", "cpu-swiglu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("home") / "tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["kernels", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in report["kernels"]}


@pytest.mark.parametrize("make", WAYS, ids=NAMES)
def test_every_case_of_the_cpu_s_ways_agrees_with_float64(make: Any) -> None:
    kernel = make()
    for case in kernel.check_cases():
        found = judge(kernel, case, effort=QUICK)
        assert found.state in ("live", "costly", "slower"), (case, found.reason)
        assert 0 < found.error <= kernel.tolerance(case), case


@pytest.mark.parametrize("make", WAYS, ids=NAMES)
def test_a_way_that_computes_something_else_is_found(make: Any) -> None:
    kernel = make()
    really = kernel.launch
    kernel.launch = lambda inputs, geometry: really(inputs, geometry) * 1.001
    case = kernel.check_cases()[0]
    assert judge(kernel, case, effort=QUICK).state == "wrong"


@pytest.mark.parametrize("choice", ["blocks", "dense", "stock"])
def test_it_tells_what_the_model_runs_on(
    choice: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = told(capsys, str(model), "--cpu-weights", choice)
    assert (report["model"], report["back_end"], report["checked"]) == ("tiny", "cpu", False)
    kernels = by_name(report)
    assert sorted(kernels) == sorted(NAMES)
    live = {name for name, each in kernels.items() if each["live"]}
    weights = {f"cpu-weights-{choice}"} if choice != "stock" else set()
    assert live & {"cpu-weights-blocks", "cpu-weights-dense"} == weights
    assert ("cpu-attention" in live) is (choice != "stock")
    assert all(each["live"] or each["why_off"] for each in kernels.values())
    assert report["machine"]["versions"]["mlx"]


def test_the_race_at_load_is_told_in_the_same_form(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = told(capsys, str(model))["kernels"]
    assert all(each["live"] or each["why_off"] for each in kernels)
    cases = [case for each in kernels for case in each["cases"]]
    assert {case["width"] for case in cases} == {1, 8, 32}
    for case in cases:
        assert case["speed_up"] == pytest.approx(case["stock_us"] / case["kernel_us"], rel=1e-2)


def test_the_lines_say_what_is_live_and_why_others_are_not(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["kernels", "--model", str(model), "--cpu-weights", "dense"]) == 0
    shown = capsys.readouterr().out
    assert "cpu-weights-dense 1 · live" in shown
    assert f"cpu-weights-blocks {Blocks.version} · off: dense was pinned" in shown


@pytest.mark.parametrize("back_end", ["cpu", "cuda", "metal"])
def test_times_of_a_device_are_told_as_such(
    back_end: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = KernelState("a", 1, "", {Case("64x64", 1): Verdict("live", kernel_us=1, stock_us=2)})
    report = doctor.KernelReport("tiny", "here", back_end, (state,), frozenset({"a"}))
    monkeypatch.setattr(doctor, "kernel_report", lambda *_, **__: report)
    assert run(["kernels", str(model)]) == 0
    assert ("on the device alone" in capsys.readouterr().out) is (back_end != "cpu")


def few(jobs: Sequence[Job], **rest: Any) -> Iterator[tuple[Job, Verdict]]:
    """The first and the last of each kernel's jobs, in a process of their own."""
    return tried([jobs[0], jobs[-1]], **{**rest, "effort": QUICK})


def test_a_check_tries_the_model_s_own_cases_in_a_process_of_their_own(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "tried", few)
    report = told(capsys, str(model), "--check", "--cpu-weights", "blocks")
    assert (report["checked"], report["sound"]) == (True, True)
    assert [each["name"] for each in report["kernels"]] == [
        *("cpu-weights-blocks", "cpu-weights-dense", "cpu-attention", "cpu-swiglu")
    ]
    for each in report["kernels"]:
        assert len(each["cases"]) == 2
        assert all(0 < case["error"] < 1e-5 and case["kernel_us"] > 0 for case in each["cases"])
    assert by_name(report)["cpu-weights-blocks"]["live"]


def test_cases_of_the_model_are_among_those_checked(model: Path) -> None:
    asked: dict[str, list[Case]] = {}

    def noted(jobs: Sequence[Job], **_: Any) -> Iterator[tuple[Job, Verdict]]:
        for job in jobs:
            asked.setdefault(job.made_by, []).append(job.case)
            yield job, Verdict("live", kernel_us=1, stock_us=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "tried", noted)
        settings = LoadSettings(model=model, cpu_weights="blocks")
        doctor.kernel_report(settings, lambda _: None, check=True)
    config = json.loads((model / "config.json").read_text())
    hidden, inner, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes = {case.shape for case in asked["mlx_dspark.kernels.framework.cpu_ways:blocks"]}
    assert {f"{inner}x{hidden}-float32", f"{vocab}x{hidden}-float32"} <= shapes
    kinds = {case.shape for case in asked["mlx_dspark.kernels.framework.cpu_ways:swiglu"]}
    assert str(inner) in kinds


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("live", 0),
        ("slower", 0),
        ("costly", 0),
        ("refused", 0),
        ("wrong", 2),
        ("stalled", 2),
        ("failed", 2),
        ("untried", 2),
    ],
)
def test_a_fault_is_told_by_the_exit_code(
    state: Any, code: int, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scripted(jobs: Sequence[Job], **_: Any) -> Iterator[tuple[Job, Verdict]]:
        for number, job in enumerate(jobs):
            refusals = ("(8, 8): too many threads",) if state == "refused" else ()
            yield job, Verdict("live" if number else state, "as told", refusals=refusals)

    monkeypatch.setattr(doctor, "tried", scripted)
    assert run(["kernels", str(model), "--check"]) == code
    shown = capsys.readouterr()
    assert "as told" in shown.out
    assert ("at fault" in shown.err) is (code == 2)
    assert ("too many threads" in shown.out) is (state == "refused")


def test_without_llvmlite_it_says_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("check", "cpu_live"):
            patch.setattr(f"mlx_dspark.kernels.framework.{module}.find_spec", lambda name: None)
        kernels, absent = checkable("cpu")
        assert list(kernels) == ["cpu-weights-dense"]
        assert all("llvmlite" in state.why for state in absent)
        report = told(capsys, str(model), "--cpu-weights", "dense")
    assert "llvmlite" in by_name(report)["cpu-attention"]["why_off"]


def test_no_case_is_checked_twice() -> None:
    kernel = cpu_ways.swiglu()
    own = list(kernel.check_cases())
    assert cases_to_check(kernel, [*own, Case("64", 1), Case("64", 1)]) == [*own, Case("64", 1)]


def test_what_it_does_not_use_is_no_flag_of_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--drafter", "--max-draft", "--mode", "--kv-bits"):
        assert run(["kernels", str(model), flag, "auto"]) == 2
        assert flag in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--small-m"], ["--multirow-attn"], ["--wide-gemm"]])
def test_a_kernel_that_is_asked_for_and_cannot_be_had_is_refused(
    arguments: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["kernels", str(model), *arguments]) == 2
    assert f"{arguments[0]} is true, and the CPU has no such kernel" in capsys.readouterr().err
    for command in ("kernels", "generate"):
        off = arguments[0].replace("--", "--no-")
        end = ["--prompt", "a", "--max-new-tokens", "2"] if command == "generate" else []
        assert run([command, "--model", str(model), off, *end]) == 0


@pytest.mark.parametrize(
    "name", ["MLX_DSPARK_FORCE_SMALL_M", "MLX_DSPARK_FORCE_MULTIROW", "MLX_DSPARK_WIDE_GEMM"]
)
def test_the_variables_are_read_and_known(
    name: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert stray_variables() == []
    assert run(["kernels", str(model)]) == 2
    assert "the CPU has no such kernel" in capsys.readouterr().err
    monkeypatch.setenv(name, "0")
    assert run(["kernels", str(model)]) == 0
    monkeypatch.setenv(name, "perhaps")
    capsys.readouterr()
    assert run(["kernels", str(model)]) == 2
    assert name in capsys.readouterr().err


def test_generate_tells_the_kernels_that_are_live(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", str(model), "--prompt", "a", "--max-new-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == []


def test_the_exact_attention_is_mlx_s(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((2, 6, 3, 16), (2, 2, 9, 16), (2, 2, 9, 16))
    queries, keys, values = (mx.random.normal(shape, key=mx.random.key(n)) for n, shape in enumerate(shapes))
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.25, mask="causal")
    got = cpu_ways.exact_attention(*(np.array(each) for each in (queries, keys, values)))
    assert np.abs(got - np.array(wanted)).max() < 1e-5
