"""Laws of the dispatch: a model computes what it computed, by kernels where they were admitted and by MLX
elsewhere, and nothing that a kernel does keeps a model from loading or reaches another one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

import mlx_dspark
from mlx_dspark.cli.main import run
from mlx_dspark.contracts import Logits
from mlx_dspark.engine.engine import Engine
from mlx_dspark.engine.scheduler import Scheduler
from mlx_dspark.foundation.curves import CostCurves, DraftPoint, VerifyPoint
from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.events import Committed, RoundReport
from mlx_dspark.foundation.request import GenerateRequest
from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.dispatch import kernel_set
from mlx_dspark.kernels.framework import offer as offers
from mlx_dspark.kernels.framework import trial
from mlx_dspark.kernels.framework.kernel import (
    AttentionKernel,
    AttentionShape,
    Case,
    Checked,
    ExpertsKernel,
    MatrixKernel,
)
from mlx_dspark.kernels.framework.live import LiveKernels
from mlx_dspark.kernels.framework.offer import Offer, Wanted
from mlx_dspark.kernels.framework.plan import Admitted, Switchboard
from mlx_dspark.kernels.framework.probe import Effort, judge, largest_error
from mlx_dspark.kernels.framework.registry import ENTRIES, Entry, back_end_here, entries_of
from mlx_dspark.kernels.framework.shapes import MatrixShape
from mlx_dspark.kernels.framework.store import FILE
from mlx_dspark.kernels.framework.trial import Job
from mlx_dspark.kernels.framework.verdict import Verdict
from mlx_dspark.kernels.framework.watch import SLOW_ROUNDS, SlowRounds
from mlx_dspark.kernels.gpu_modules import KernelLinear, KernelSwitchLinear
from mlx_dspark.kernels.metal_attention.cases import MetalAttention
from mlx_dspark.kernels.metal_small_m.kernel import MetalSmallM
from mlx_dspark.kernels.wide_gemm.kernel import WideExperts, WideGemm
from mlx_dspark.session.placed import watched
from mlx_dspark.targets.dense.target import DenseTarget
from mlx_dspark.targets.load import target_of
from tests import metal_shim as shim
from tests import scripted_kernels
from tests.admin_server import admin_server, load
from tests.fakes import stock_greedy
from tests.scripted_kernels import Attending, Doubled
from tests.tiny import save_tiny, tiny_config, tiny_llama, tiny_model, tiny_qwen3
from tests.tiny_drafters import save_tiny_dspark

ENTRY = Entry("doubled", ("metal",), "tests.scripted_kernels:current", "small_m", unproven=("M5",))
ATTENDING = Entry("attending", ("metal",), "tests.scripted_kernels:current", "multirow_attn")


class Probed:
    """In place of the probe: what is live is said, not tried. Counts the cases it is asked about."""

    def __init__(self, *widths: int, state: str = "live", geometry: str = "('laid', 2)") -> None:
        self.widths, self.state, self.geometry = widths, state, geometry
        self.asked: list[Case] = []
        self.raises: Exception | None = None

    def __call__(
        self, jobs: Sequence[Job], *, budget: float, progress: Any = None
    ) -> Iterator[tuple[Job, Verdict]]:
        assert 0 < budget <= offers.BUDGET
        if self.raises is not None:
            raise self.raises
        for number, job in enumerate(jobs, start=1):
            self.asked.append(job.case)
            good = job.case.width in self.widths
            state: Any = self.state if good else "slower"
            yield job, Verdict(state, "" if state == "live" else "as told", self.geometry, 1.0, 2.0, 1e-5)
            progress(number, len(jobs))


@pytest.fixture
def kernel() -> Iterator[Doubled]:
    made = Doubled()
    scripted_kernels.MADE["kernel"] = made
    yield made
    scripted_kernels.MADE.clear()


@pytest.fixture
def attending() -> Iterator[Attending]:
    made = Attending()
    scripted_kernels.MADE["kernel"] = made
    yield made
    scripted_kernels.MADE.clear()


def quantized(seed: int = 0, bits: int = 4) -> nn.Module:
    model = tiny_llama(seed=seed)
    nn.quantize(model, 32, bits)
    return model


def entry_of(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


def offered(
    model: nn.Module,
    folder: Path,
    probe: Probed,
    wanted: Wanted | None = None,
    *,
    device: str = "Apple M2",
    entry: Entry = ENTRY,
) -> LiveKernels:
    offer = Offer(wanted or Wanted(), folder, back_end="metal", device=device, entries=[entry], probe=probe)
    offer.place(model)
    return offer.live


def linear(model: nn.Module) -> KernelLinear:
    return next(module for module in model.modules() if isinstance(module, KernelLinear))


# modules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_a_module_asks_the_kernel_for_the_rows_it_serves_and_mlx_for_others(
    bias: bool, kernel: Doubled, tmp_path: Path
) -> None:
    kernel.adding = 1.0
    holder = nn.Sequential(nn.QuantizedLinear(64, 96, bias=bias, group_size=32, bits=4))
    stock: Any = holder.layers[0]
    if bias:
        stock.bias = mx.random.normal((96,))
    offered(holder, tmp_path, Probed(4, 8))
    placed = holder.layers[0]
    assert type(placed) is KernelLinear
    for rows in range(1, 12):
        x = mx.random.normal((rows, 64))
        served = rows in (4, 5, 6, 7, 8)
        difference = np.array(placed(x) - stock(x))
        assert np.allclose(difference, 1.0 if served else 0.0, atol=1e-5), rows
    assert kernel.rows == [4, 5, 6, 7, 8]
    for shape in ((2, 3, 64), (6, 64), (1, 6, 64), (3, 1, 2, 64)):
        x = mx.random.normal(shape)
        assert placed(x).shape == stock(x).shape
        assert np.allclose(np.array(placed(x) - stock(x)), 1.0, atol=1e-5)
    half = mx.random.normal((4, 64)).astype(mx.float16)
    assert mx.array_equal(placed(half), stock(half))
    assert placed(mx.zeros((0, 64))).shape == (0, 96)


@pytest.mark.parametrize(
    ("admitted", "served"),
    [
        ((), ()),
        ((2,), (2,)),
        ((2, 4), (2, 3, 4)),
        ((4,), (4,)),
        ((2, 8), (2, 8)),
        ((2, 4, 8), (2, 3, 4, 5, 6, 7, 8)),
    ],
)
def test_numbers_of_rows_between_two_that_were_tried_need_both(
    admitted: tuple[int, ...], served: tuple[int, ...]
) -> None:
    plan = Admitted(Doubled(), (2, 4, 8), {width: ("laid", width) for width in admitted})
    assert tuple(rows for rows in range(2, 20) if plan.at(rows) is not None) == served
    assert all(plan.at(rows) == ("laid", min(w for w in (2, 4, 8) if w >= rows)) for rows in served)


def test_one_row_is_served_only_where_it_was_tried() -> None:
    plan = Admitted(Doubled(), (1, 2), {2: ("laid", 2)})
    assert plan.at(1) is None
    assert Admitted(Doubled(), (2, 4), {2: ("laid", 2), 4: ("laid", 4)}).at(1) is None
    assert Admitted(Doubled(), (1, 2), {1: ("laid", 1)}).at(1) == ("laid", 1)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_a_placed_model_writes_the_same_text(make: Any, kernel: Doubled, tmp_path: Path) -> None:
    model = make()
    nn.quantize(model, 32, 4)
    prompt = [5, 9, 200, 31, 7]
    wanted = stock_greedy(model, prompt, 24)
    offered(model, tmp_path, Probed(2, 4, 8))
    target = target_of(model, tiny_config("llama" if make is tiny_llama else "qwen3"))
    events = list(Engine(target, None).stream(GenerateRequest(tuple(prompt), 24)))
    assert [token for event in events if isinstance(event, Committed) for token in event.tokens] == wanted
    assert kernel.rows


def test_a_placed_model_holds_what_it_held(kernel: Doubled, tmp_path: Path) -> None:
    model, same = quantized(), quantized()
    offered(model, tmp_path, Probed(2, 4, 8))
    mine, theirs = dict(tree_flatten(model.parameters())), dict(tree_flatten(same.parameters()))
    assert mine.keys() == theirs.keys()
    assert all(mx.array_equal(mine[name], theirs[name]) for name in mine)
    names = [name for name, _ in same.named_modules()]
    assert [name for name, _ in model.named_modules()] == names
    for name, module in model.named_modules():
        wanted = Source.of(dict(same.named_modules())[name])
        got = Source.of(module)
        assert (got and got.kind) == (wanted and wanted.kind)
    model.save_weights(str(tmp_path / "weights.safetensors"))
    same.load_weights(str(tmp_path / "weights.safetensors"))


def test_new_weights_are_the_kernel_s_too(kernel: Doubled, tmp_path: Path) -> None:
    model, other = quantized(seed=0), quantized(seed=1)
    offered(model, tmp_path, Probed(2, 4, 8))
    tokens = mx.array([[5, 9, 200, 31]])
    mx.eval(model(tokens))
    model.update(other.parameters())
    assert mx.allclose(model(tokens), other(tokens), rtol=1e-5, atol=1e-5)
    assert 4 in kernel.rows
    module, x = linear(model), mx.random.normal((4, linear(model).source().inputs))
    before = module(x)
    module.weight = module.weight + 1
    assert not mx.allclose(module(x), before, rtol=1e-3, atol=1e-3)


def test_a_tied_head_is_served(kernel: Doubled, tmp_path: Path) -> None:
    holder = nn.Sequential(nn.QuantizedEmbedding(96, 64, 32, 4))
    stock = holder.layers[0]
    offered(holder, tmp_path, Probed(2, 4, 8))
    x = mx.random.normal((1, 4, 64))
    assert mx.allclose(holder.layers[0].as_linear(x), stock.as_linear(x), rtol=1e-5, atol=1e-5)
    assert kernel.rows == [4]
    assert mx.array_equal(holder.layers[0](mx.array([3, 5])), stock(mx.array([3, 5])))


def test_what_a_kernel_does_not_take_stays_as_it_is(kernel: Doubled, tmp_path: Path) -> None:
    model = quantized(bits=8)
    live = offered(model, tmp_path, probe := Probed(2, 4, 8))
    assert not any(isinstance(module, KernelLinear) for module in model.modules())
    assert (probe.asked, live.live) == ([], [])
    assert live.states[0].why == "it is not of 4 bits"


# loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("x"), ValueError("no"), MemoryError()])
@pytest.mark.parametrize("method", ["make", "refusal", "case", "geometries", "probe"])
def test_nothing_that_a_kernel_raises_keeps_a_model_from_loading(
    method: str, error: Exception, kernel: Doubled, tmp_path: Path
) -> None:
    model, wanted = quantized(), quantized()
    probe = Probed(2, 4, 8)
    if method == "make":
        scripted_kernels.MADE["kernel"] = error
    elif method == "probe":
        probe.raises = error
    else:
        kernel.raises = {method: error}
    live = offered(model, tmp_path, probe)
    tokens = mx.array([[5, 9, 200, 31]])
    assert mx.array_equal(model(tokens), wanted(tokens))
    assert live.live == []
    assert type(error).__name__ in live.states[0].why


def test_what_is_known_is_not_tried_again(kernel: Doubled, tmp_path: Path) -> None:
    first, again, newer = Probed(2), Probed(4), Probed(4)
    served = offered(quantized(), tmp_path, first).live[0].serving
    assert {case.width for case in served} == {2}
    assert offered(quantized(), tmp_path, again).live[0].serving == served
    assert (bool(first.asked), again.asked) == (True, [])
    kernel.version = 2
    assert {case.width for case in offered(quantized(), tmp_path, newer).live[0].serving} == {4}


def test_a_trial_that_could_not_be_run_is_tried_again(kernel: Doubled, tmp_path: Path) -> None:
    assert offered(quantized(), tmp_path, Probed(2, 4, 8, state="untried")).live == []
    (tmp_path / FILE).unlink(missing_ok=True)
    again = Probed(2, 4, 8)
    assert offered(quantized(), tmp_path, again).live
    assert again.asked


def test_a_launch_that_no_version_knows_is_not_used(kernel: Doubled, tmp_path: Path) -> None:
    model = quantized()
    offered(model, tmp_path, Probed(2, 4, 8, geometry="('gone', 9)"))
    assert not any(isinstance(module, KernelLinear) for module in model.modules())


def test_a_cache_that_cannot_be_written_is_said(kernel: Doubled, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    live = offered(quantized(), tmp_path / "file", Probed(2, 4, 8))
    assert live.live
    assert "cannot be written" in live.states[0].remark


@pytest.mark.parametrize(
    ("device", "small_m", "state", "served"),
    [
        ("Apple M5 Max", None, "live", False),
        ("Apple M5 Max", True, "live", True),
        ("Apple M5 Max", False, "live", False),
        ("Apple M4", None, "live", True),
        ("Apple M4", None, "slower", False),
        ("Apple M4", None, "costly", False),
        ("Apple M4", True, "costly", True),
        ("Apple M4", True, "slower", True),
        ("Apple M4", True, "wrong", False),
        ("Apple M4", True, "stalled", False),
        ("Apple M4", False, "live", False),
    ],
)
def test_which_kernels_are_used_where(
    device: str, small_m: bool | None, state: str, served: bool, kernel: Doubled, tmp_path: Path
) -> None:
    wanted = Wanted(small_m=small_m)
    probe = Probed(2, 4, 8, state=state)
    live = offered(quantized(), tmp_path, probe, wanted, device=device)
    assert bool(live.live) is served
    assert bool(live.states[0].why) is not served
    if small_m is False or (small_m is None and "M5" in device):
        assert probe.asked == []


def test_kernels_of_another_back_end_are_not_offered(kernel: Doubled, tmp_path: Path) -> None:
    for back_end in ("cuda", "cpu"):
        offer = Offer(Wanted(), tmp_path, back_end=back_end, entries=[ENTRY], probe=(probe := Probed(2)))
        offer.place(model := quantized())
        assert (probe.asked, offer.live.states) == ([], [])
        assert not any(isinstance(module, KernelLinear) for module in model.modules())


@pytest.mark.parametrize("name", ["small_m", "multirow_attn", "wide_gemm"])
def test_a_kernel_that_is_asked_for_on_a_cpu_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    asked: dict[str, Any] = {name: True}
    with pytest.raises(UsageError, match=name) as refusal:
        mlx_dspark.load(folder, **asked)
    assert refusal.value.field == name
    asked[name] = False
    with mlx_dspark.load(folder, **asked) as session:
        assert session.live_kernels == []


def test_no_registered_kernel_is_for_the_cpu() -> None:
    assert back_end_here() == "cpu"
    assert entries_of("cpu") == []
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


def case_of(kernel: Any) -> Case:
    """A small one that it takes."""
    if isinstance(kernel, AttentionKernel):
        shape = AttentionShape(8, 2, 64, mx.float16, kernel.lengths[0])
        assert kernel.refusal(shape) is None
        return kernel.case(shape, kernel.widths[1])
    experts = 4 if isinstance(kernel, ExpertsKernel) else 0
    matrix = MatrixShape(256, 512, 4, 64, mx.float16, experts)
    assert kernel.refusal(matrix.outline(), mx.float16) is None
    assert kernel.refusal(MatrixShape(256, 512, 4, 64, mx.float32, experts).outline(), mx.float16)
    return kernel.case(matrix.outline(), mx.float16, kernel.widths[1])


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_registered_kernel_keeps_the_contract(entry: Entry) -> None:
    kernel = entry.kernel()
    assert kernel.name == entry.name
    assert kernel.back_end in (*entry.back_ends, "any")
    assert isinstance(kernel, MatrixKernel) is not isinstance(kernel, AttentionKernel)
    assert isinstance(kernel, MatrixKernel | AttentionKernel)
    assert sorted(set(kernel.widths)) == list(kernel.widths)
    case = case_of(kernel)
    geometries = kernel.geometries(case)
    assert len({repr(each) for each in geometries}) == len(geometries) > 0
    inputs, again, other = (kernel.draw(case, seed) for seed in (0, 0, 1))
    wanted = kernel.reference(inputs)
    assert wanted.dtype == np.float32
    assert np.array_equal(kernel.reference(again), wanted)
    assert not np.array_equal(kernel.reference(other), wanted)
    assert 0 < kernel.tolerance(case) <= 2.0**-7
    if not isinstance(kernel, ExpertsKernel):  # MLX gathers in float32 only, on the CPU
        stock = np.array(kernel.stock(inputs).astype(mx.float32))
        assert largest_error(stock, wanted) < 0.03
    checked = kernel.check_cases() if isinstance(kernel, Checked) else []
    assert all(kernel.geometries(each) for each in checked)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_registered_kernel_is_placed_where_it_was_admitted(entry: Entry, tmp_path: Path) -> None:
    kernel: Any = entry.kernel()
    probe = Probed(*kernel.widths, geometry=repr(kernel.geometries(case_of(kernel))[0]))
    offer = Offer(Wanted(), tmp_path, back_end=entry.back_ends[0], device="M2", entries=[entry], probe=probe)
    if isinstance(kernel, AttentionKernel):
        assert offer.attention([AttentionShape(8, 2, 64, mx.float16, 2)], 1 << 16) is not None
    else:
        stock: Any = nn.QuantizedLinear(512, 256, group_size=64, bits=4)
        if isinstance(kernel, ExpertsKernel):
            stock = QuantizedSwitchLinear(512, 256, 4, group_size=64, bits=4)
        holder = nn.Sequential(stock)
        holder.set_dtype(mx.float16)
        offer.place(holder)
        assert type(holder.layers[0]) is not type(stock)
    assert [state.name for state in offer.live.live] == [entry.name]


# two models ---------------------------------------------------------------------------------------


def test_two_models_do_not_share_a_choice(kernel: Doubled, tmp_path: Path) -> None:
    kernel.adding = 1.0
    one, two, plain = quantized(), quantized(), quantized()
    first = offered(one, tmp_path, Probed(2, 4, 8))
    second = offered(two, tmp_path, Probed())
    off = offered(plain, tmp_path, Probed(), Wanted(small_m=False))
    stock = quantized()
    x = mx.random.normal((1, 4, linear(one).source().inputs))
    name = next(name for name, module in one.named_modules() if module is linear(one))
    modules = [dict(model.named_modules())[name] for model in (one, two, plain, stock)]
    outs = [module(x) for module in modules]
    assert np.allclose(np.array(outs[0] - outs[3]), 1.0, atol=1e-5)
    assert np.allclose(np.array(outs[1] - outs[3]), 1.0, atol=1e-5)
    assert mx.array_equal(outs[2], outs[3])
    first.switch_off("it stalled")
    assert mx.array_equal(modules[0](x), outs[3])
    assert np.allclose(np.array(modules[1](x) - outs[3]), 1.0, atol=1e-5)
    assert ([state.name for state in second.live], off.live, first.live) == (["doubled"], [], [])
    assert first.why_off(first.states[0]) == "it stalled"
    assert "off (it stalled)" in str(first)


def test_joined_models_are_switched_off_together(kernel: Doubled, tmp_path: Path) -> None:
    drafting, deciding = quantized(), quantized(seed=1)
    of_drafting = offered(drafting, tmp_path, Probed(2, 4, 8))
    live = offered(deciding, tmp_path, Probed(2, 4, 8))
    live.join(of_drafting)
    assert len(live.states) == 1
    assert live.switch_off("slow") == ["doubled"]
    assert of_drafting.board.off == {"doubled": "slow"}


def test_what_is_live_is_in_the_key_of_what_was_measured(kernel: Doubled, tmp_path: Path) -> None:
    keys = set()
    for number, widths in enumerate(((2, 4, 8), (2, 4), ())):
        live = offered(quantized(), tmp_path / str(number), Probed(*widths))
        keys.add(tuple(kernel_set(None, live)))
    kernel.version = 2
    keys.add(tuple(kernel_set(None, offered(quantized(), tmp_path / "v", Probed(2, 4, 8)))))
    assert len(keys) == 4
    assert tuple(kernel_set(None)) in keys


# attention ----------------------------------------------------------------------------------------


def attended(target: DenseTarget, folder: Path, probe: Probed, context: int = 512) -> LiveKernels:
    offer = Offer(Wanted(), folder, back_end="metal", device="Apple M2", entries=[ATTENDING], probe=probe)
    attention = offer.attention(target.attended(), context)
    if attention is not None:
        target.attend_by(attention)
    return offer.live


def logits_of(target: DenseTarget, *widths: int) -> mx.array:
    rows, outs = target.new_rows(1), []
    for number, width in enumerate(widths):
        tokens = (mx.arange(width)[None] * 7 + 11 * number) % 300
        with rows.transaction(width) as transaction:
            out = target.forward(tokens, rows).logits
            assert out is not None
            mx.eval(out)
            outs.append(out)
            transaction.commit([width])
    return mx.concatenate(outs, axis=1)


def llama_target() -> DenseTarget:
    return target_of(tiny_llama(), tiny_config("llama"), weights=None)


def test_a_target_tells_the_attentions_of_its_layers() -> None:
    config = tiny_config("llama")
    shapes = llama_target().attended()
    assert len(shapes) == config["num_hidden_layers"]
    kinds = {(shape.heads, shape.kv_heads, shape.dtype, shape.length, shape.sinks) for shape in shapes}
    assert kinds == {(config["num_attention_heads"], config["num_key_value_heads"], mx.float32, 2, False)}


def test_an_attention_is_asked_at_the_widths_and_lengths_it_serves(
    attending: Attending, tmp_path: Path
) -> None:
    target, wanted = llama_target(), logits_of(llama_target(), 3, 4, 4, 1, 20, 2, 3, 6, 2)
    attended(target, tmp_path, probe := Probed(2, 4, geometry="('laid',)"))
    assert {case.width for case in probe.asked} == {2, 4}
    assert {AttentionShape.parse(case.shape).length for case in probe.asked} == {8, 32}
    assert mx.allclose(logits_of(target, 3, 4, 4, 1, 20, 2, 3, 6, 2), wanted, rtol=1e-4, atol=1e-4)
    assert sorted(set(attending.asked)) == [(2, 34), (2, 45), (3, 37), (4, 11)]


def test_no_length_beyond_the_context_is_tried(attending: Attending, tmp_path: Path) -> None:
    attended(llama_target(), tmp_path, probe := Probed(2, 4, geometry="('laid',)"), context=16)
    assert {AttentionShape.parse(case.shape).length for case in probe.asked} == {8}


def test_two_targets_attend_each_in_its_way(attending: Attending, tmp_path: Path) -> None:
    attending.adding = 1.0
    one, two = llama_target(), llama_target()
    stock = logits_of(two, 9, 4)
    live = attended(one, tmp_path, Probed(2, 4, geometry="('laid',)"))
    assert mx.array_equal(logits_of(two, 9, 4), stock)
    assert not mx.allclose(logits_of(one, 9, 4), stock, rtol=1e-3, atol=1e-3)
    live.switch_off("it stalled")
    assert mx.array_equal(logits_of(one, 9, 4), stock)


# watching -----------------------------------------------------------------------------------------


def lively() -> LiveKernels:
    live = LiveKernels("metal", Switchboard())
    case = Case("64x64-4b-g32-float32", 4)
    live.states.append(
        scripted_state({case: Verdict("live", geometry="('laid', 1)", kernel_us=1, stock_us=2)})
    )
    return live


def scripted_state(cases: dict[Case, Verdict]) -> Any:
    from mlx_dspark.kernels.framework.live import KernelState

    return KernelState("doubled", 1, "", cases)


def rounds(*seconds: float, width: int = 4, waited: float = 0.0) -> Iterator[RoundReport]:
    at = 100.0
    for each in seconds:
        yield RoundReport(at, at + each, 1, width, 1, 8, width - 1, 1, 2, 64, "lookup", waited=waited * each)
        at += each


CURVES = CostCurves(
    verify=tuple(VerifyPoint(width=width, rows=1, depth=64, seconds=0.02, spread=0.0) for width in (1, 4)),
    draft={
        "lookup": tuple(DraftPoint(cap=cap, rows=1, depth=64, seconds=1e-9, spread=0.0) for cap in (1, 8))
    },
    overhead=0.0,
    measured_at=0.0,
)


@pytest.mark.parametrize("curves", [None, CURVES], ids=["its own rounds", "measured costs"])
@pytest.mark.parametrize(
    ("then", "off"),
    [
        ([105.0], True),
        ([2.5], True),
        ([0.02] * 100, False),
        ([0.08] * 100, False),
        ([1.5], False),
        ([0.2] * (SLOW_ROUNDS - 1) + [0.02] * 5 + [0.2] * (SLOW_ROUNDS - 1), False),
        ([0.2] * SLOW_ROUNDS, True),
    ],
)
def test_rounds_that_are_much_too_slow_switch_the_kernels_off(
    then: list[float], off: bool, curves: CostCurves | None
) -> None:
    live = lively()
    watch = SlowRounds(live, curves)
    said = [name for report in rounds(*[0.02] * 12, *then) for name in watch.see(report)]
    assert said == (["doubled"] if off else [])
    assert bool(live.board.off) is off


def test_a_first_round_that_compiles_is_no_stall_and_one_of_minutes_is() -> None:
    live = lively()
    assert not [name for report in rounds(9.0) for name in SlowRounds(live).see(report)]
    assert [name for report in rounds(105.0) for name in SlowRounds(live).see(report)] == ["doubled"]


def test_a_round_that_waited_for_its_reader_says_nothing() -> None:
    live = lively()
    watch = SlowRounds(live)
    assert not [name for report in rounds(*[0.02] * 12, 105.0, waited=0.5) for name in watch.see(report)]


def test_a_session_watches_only_where_kernels_are_live() -> None:
    seen: list[RoundReport] = []
    assert watched(None, None, [None]) is None
    assert watched(LiveKernels("cpu"), None, [None]) is None
    see = watched(live := lively(), None, [None, seen.append])
    assert see is not None
    for report in rounds(*[0.02] * 12, 105.0):
        see(report)
    assert (len(seen), list(live.board.off)) == (13, ["doubled"])


# wide products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 130])
@pytest.mark.parametrize(("bits", "group"), [(2, 64), (4, 32), (4, 128), (8, 64)])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_wide_product_is_that_of_the_exact_weights(
    dtype: mx.Dtype, bits: int, group: int, rows: int
) -> None:
    kernel = WideGemm()
    case = Case(str(MatrixShape(72, 256, bits, group, dtype)), rows)
    kernel.same_bits = False
    found = judge(kernel, case, effort=Effort(races=1, seconds=0, launches=1, sustained=0))
    assert found.state in ("live", "costly", "slower"), found.reason
    assert found.error <= kernel.tolerance(case)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_wide_product_of_experts_is_that_of_the_exact_weights(bits: int) -> None:
    kernel = WideExperts()
    kernel.same_bits = False
    case = Case(str(MatrixShape(72, 128, bits, 32, mx.float32, experts=5)), 70)
    found = judge(kernel, case, effort=Effort(races=1, seconds=0, launches=1, sustained=0))
    assert found.state in ("live", "costly", "slower"), found.reason


@pytest.mark.parametrize("bias", [False, True])
def test_experts_are_served_where_rows_are_sorted_and_as_before_elsewhere(bias: bool, tmp_path: Path) -> None:
    stock = QuantizedSwitchLinear(64, 96, 4, bias=bias, group_size=32, bits=4)
    if bias:
        stock.bias = mx.random.normal((4, 96))
    holder = nn.Sequential(stock)
    entry = Entry("wide-gemm-experts", ("metal",), entry_of("wide-gemm-experts").made_by, "wide_gemm")
    live = offered(holder, tmp_path, Probed(64, 128, geometry="('whole',)"), entry=entry)
    placed = holder.layers[0]
    assert isinstance(placed, KernelSwitchLinear)
    assert [case.width for case in live.live[0].serving] == [64, 128]
    calls: list[int] = []
    really = WideExperts.gather

    def counted(self: WideExperts, x: mx.array, *rest: Any) -> mx.array:
        calls.append(x.shape[0])
        return really(self, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WideExperts, "gather", counted)
        for rows in (8, 64, 100, 200):
            x, experts = mx.random.normal((rows, 1, 64)), mx.sort(mx.random.randint(0, 4, (rows,)))
            wanted = stock(x, experts, sorted_indices=True)
            assert mx.allclose(placed(x, experts, sorted_indices=True), wanted, rtol=1e-4, atol=1e-4)
        x, experts = mx.random.normal((2, 40, 1, 1, 64)), mx.random.randint(0, 4, (2, 40, 2))
        assert mx.array_equal(placed(x, experts), stock(x, experts))
    assert calls == [64, 100]


def test_a_wide_product_refuses_what_it_would_hold_too_much_of() -> None:
    head = MatrixShape(1 << 17, 64, 4, 32, mx.float16).outline()
    many = MatrixShape(4096, 4096, 4, 64, mx.float16, experts=64).outline()
    assert "head" in str(WideGemm().refusal(head, mx.float16))
    assert "MiB" in str(WideExperts().refusal(many, mx.float16))
    assert WideGemm().refusal(MatrixShape(4096, 4096, 4, 64, mx.float16).outline(), mx.float16) is None


def test_a_prompt_sends_one_row_through_the_vocabulary_head() -> None:
    """Of the last chunk the last row, of the others none, whatever the number of prompts at once."""
    model = tiny_llama()
    target = target_of(model, tiny_config("llama"))
    rows_seen: list[int] = []
    really = target._parts.head
    assert really is not None

    def head(hidden: mx.array) -> mx.array:
        rows_seen.append(hidden.shape[0] * hidden.shape[1])
        return really(hidden)

    object.__setattr__(target, "_parts", replace(target._parts, head=head))
    engine = Engine(target, None, prefill_chunk=16)
    list(engine.stream(GenerateRequest(tuple(range(5, 45)), 3)))
    assert set(rows_seen) == {1}
    assert len(rows_seen) == 3
    rows_seen.clear()
    with Scheduler(target, None, max_rows=3, prefill_chunk=16) as several:
        streams = [several.submit(GenerateRequest(tuple(range(5, 5 + n)), 4)) for n in (40, 9, 33)]
        assert all(list(stream) for stream in streams)
    assert max(rows_seen) <= 3
    assert sum(rows_seen) <= 3 * 4 + 3
    rows_seen.clear()
    rows = target.new_rows(1)
    with rows.transaction(8):
        assert target.forward(mx.arange(8)[None], rows, logits=Logits.NONE).logits is None
    assert rows_seen == []


def test_a_real_trial_of_a_placed_kernel_runs_in_its_own_process(tmp_path: Path) -> None:
    """The whole way, on the CPU: cases of a model, tried in a process, remembered, placed."""
    model, wanted = quantized(), quantized()
    quick = Effort(draws=1, races=5, seconds=0.05, launches=1, sustained=0.01)
    entry = Entry("wide-gemm", ("metal",), entry_of("wide-gemm").made_by, "wide_gemm")
    asked: list[int] = []

    def probe(jobs: Sequence[Job], *, budget: float, progress: Any = None) -> Iterator[tuple[Job, Verdict]]:
        few = [job for job in jobs if job.case.width == 64]
        asked.append(len(few))
        return trial.tried(few, effort=quick, budget=budget, progress=progress)

    offer = Offer(
        Wanted(wide_gemm=True), tmp_path, back_end="metal", device="Apple M2", entries=[entry], probe=probe
    )
    offer.place(model)
    assert asked[0] >= 1
    states = {found.state for found in offer.live.states[0].cases.values()}
    assert states <= {"live", "slower", "wrong"}
    tokens = mx.arange(64)[None]
    assert mx.allclose(model(tokens), wanted(tokens), rtol=1e-4, atol=1e-4)


def test_a_model_runs_on_the_metal_kernels_that_were_admitted(tmp_path: Path) -> None:
    """The whole way with the kernels' own source, in the shim: a few rows, and a few more, go through both
    kernels in every layer, and come out as in float32. The shim computes at once, so nothing is traced."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 160}
    config = tiny_config("llama", **sizes, head_dim=64)
    model = tiny_model(config)
    nn.quantize(model, 32, 4)
    model.set_dtype(mx.float16)
    exact = copy.deepcopy(model)
    exact.set_dtype(mx.float32)
    wanted = floats(logits_of(target_of(exact, config), 4, 4))

    def placed(factory: Any) -> mx.array:
        scripted_kernels.MADE.update(
            kernel=MetalSmallM(factory), second=MetalAttention(factory, lengths=(4,))
        )
        entries = [
            replace(entry_of("metal-small-m"), made_by="tests.scripted_kernels:current"),
            replace(entry_of("metal-attention"), made_by="tests.scripted_kernels:second"),
        ]
        probe = FirstGeometry(2, 3, 4)
        offer = Offer(Wanted(), tmp_path, back_end="metal", device="M2", entries=entries, probe=probe)
        offer.place(model)
        target = target_of(model, config)
        attention = offer.attention(target.attended(), 64)
        assert attention is not None
        target.attend_by(attention)
        assert [state.name for state in offer.live.live] == ["metal-small-m", "metal-attention"]
        return logits_of(target, 4, 4)

    mx.disable_compile()
    try:
        ran = shim.run(placed, "random")
    finally:
        mx.enable_compile()
    scripted_kernels.MADE.clear()
    layers = config["num_hidden_layers"]
    names = [each.launch.name for each in ran.launches][-2 * (8 * layers + 1) :]
    assert sum("small_m" in name for name in names) == 2 * (7 * layers + 1)
    assert sum("few_queries" in name for name in names) == 2 * layers
    assert largest_error(floats(ran.value), wanted) < 0.008


def floats(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32))


class FirstGeometry(Probed):
    """Says that a kernel is live in its first geometry."""

    def __call__(
        self, jobs: Sequence[Job], *, budget: float, progress: Any = None
    ) -> Iterator[tuple[Job, Verdict]]:
        for job in jobs:
            geometry = repr(trial.made(job.made_by).geometries(job.case)[0])
            state: Any = "live" if job.case.width in self.widths else "slower"
            yield job, Verdict(state, "", geometry, 1.0, 2.0)


# the whole way from settings to status ------------------------------------------------------------


@pytest.fixture
def as_metal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: Doubled) -> Probed:
    """This machine passes for a Mac whose one kernel is `doubled`."""
    probe = Probed(2, 4, 8)
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    here = {"back_end_here": lambda: "metal", "ENTRIES": (ENTRY,), "tried": probe}
    here["wrong_here"] = lambda *_: ""
    for name, value in here.items():
        monkeypatch.setattr(offers, name, value)
    return probe


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("packed") / "model", bits=4)


def test_a_loaded_model_runs_on_its_kernels_and_says_so(
    as_metal: Probed, kernel: Doubled, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "the same words the same words the same"
    with mlx_dspark.load(packed, cpu_weights="stock", small_m=False) as session:
        assert session.live_kernels == []
        wanted = session.generate(prompt, max_new_tokens=24).text
    assert (kernel.rows, as_metal.asked) == ([], [])
    told: list[str] = []
    with mlx_dspark.load(
        packed, cpu_weights="stock", progress=lambda step: told.append(step.message)
    ) as session:
        assert session.live_kernels == ["doubled"]
        assert session.generate(prompt, max_new_tokens=24).text == wanted
    assert kernel.rows
    assert f"{offers.TRYING}: doubled" in told
    line = ["--model", str(packed), "--cpu-weights", "stock", "--prompt", prompt, "--max-new-tokens", "8"]
    assert run([*line, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["kernels"] == ["doubled"]
    assert "kernels: doubled" in shown.err
    assert run([*line, "--json", "--no-small-m"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"] == []


def test_kernels_that_a_check_of_the_model_fails_with_are_switched_off(
    as_metal: Probed, kernel: Doubled, packed: Path
) -> None:
    with mlx_dspark.load(packed, cpu_weights="stock", small_m=False) as session:
        wanted = session.generate("the same words", max_new_tokens=8).text
    kernel.adding = 3.0
    with mlx_dspark.load(packed, cpu_weights="stock", max_batch=2) as session:
        assert session.live_kernels == []
        assert session.kernels is not None
        assert session.kernels.board.off == {"doubled": "a check of the model failed with it"}
        assert session.generate("the same words", max_new_tokens=8).text == wanted


def test_a_server_tells_the_kernels_of_its_model(as_metal: Probed, packed: Path) -> None:
    with admin_server() as (client, swap):
        assert load(client, packed, cpu_weights="stock", mode="lookup").status_code == 200
        model = swap.host.model
        assert model is not None
        assert client.get("/health").json()["kernels"] == ["doubled"]
        (known,) = client.get("/machine").json()["model"]["kernels"]
        assert (known["name"], known["live"], known["why_off"]) == ("doubled", True, "")
        assert {case["width"] for case in known["cases"]} == {2, 4, 8}
        live = model.session.kernels
        assert live is not None
        live.switch_off("a round took 105 s")
        assert client.get("/health").json()["kernels"] == []
        (known,) = client.get("/machine").json()["model"]["kernels"]
        assert (known["live"], known["why_off"]) == (False, "a round took 105 s")


@pytest.mark.parametrize("who", ["drafter", "draft_model"])
def test_what_drafts_has_kernels_too_and_is_switched_off_with_its_target(
    who: str, as_metal: Probed, kernel: Doubled, packed: Path, tmp_path: Path
) -> None:
    drafting = (
        save_tiny_dspark(tmp_path / "d") if who == "drafter" else save_tiny(tmp_path / "d", seed=2, bits=4)
    )
    options: Any = {who: drafting, **({"drafter_bits": 4} if who == "drafter" else {})}
    with mlx_dspark.load(packed, cpu_weights="stock", **options) as session:
        live = session.kernels
        assert live is not None
        assert session.live_kernels == ["doubled"]
        session.generate("the same words", max_new_tokens=8)
        live.switch_off("slow")
        kernel.rows.clear()
        session.generate("the same words", max_new_tokens=8)
        assert kernel.rows == []
