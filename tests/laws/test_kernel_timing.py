"""Laws of a race on a device that computes beside the host: its time decides, whatever the host's is."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.framework import bench as benches
from mlx_dspark.kernels.framework import rows
from mlx_dspark.kernels.framework.after import numbers_of, queries_of
from mlx_dspark.kernels.framework.bench import Bench, GpuQueue
from mlx_dspark.kernels.framework.kernel import AttentionKernel, AttentionShape, Case, ExpertsKernel
from mlx_dspark.kernels.framework.probe import Effort, judge
from mlx_dspark.kernels.framework.registry import ENTRIES, Entry
from mlx_dspark.kernels.framework.rows import RowsKernel
from mlx_dspark.kernels.framework.shapes import MatrixShape, exact_product
from mlx_dspark.kernels.framework.timing import COPIES_BYTES, MOST_COPIES, Chain, copies, nbytes
from mlx_dspark.kernels.framework.verdict import Verdict
from tests.scripted_kernels import SHAPE, SIZE, Clock, Product, Scripted
from tests.simulated_device import US, SimulatedDevice

CASE = Case(SHAPE, 4)
QUICK = Effort(races=9, sustained=0.01)

HOSTS = {
    "quick": SimulatedDevice(host=2 * US),
    "slow": SimulatedDevice(host=40 * US),
    "very slow": SimulatedDevice(host=300 * US),
    "jittery": SimulatedDevice(host=30 * US, jitter=1.0),
    "pausing": SimulatedDevice(host=30 * US, jitter=0.5, pauses=0.01),
    "with a short queue": SimulatedDevice(host=20 * US, room=8),
}


def judged(
    host: str,
    mine: float,
    stock: float,
    *,
    asynchronous: bool = True,
    effort: Effort = QUICK,
    **script: Any,
) -> Verdict:
    """The verdict where a kernel takes `mine` and MLX `stock` microseconds of the device."""
    device = replace(HOSTS[host])
    kernel = Scripted(device, costs={"wide": mine * US}, stock_cost=stock * US, **script)
    return judge(kernel, CASE, device.bench(asynchronous=asynchronous), effort)


# what is timed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("mine", "stock"), [(4, 23), (16, 180), (20, 22), (400, 2000), (30000, 40000)])
def test_the_times_are_those_of_the_device(host: str, mine: float, stock: float) -> None:
    found = judged(host, mine, stock)
    assert found.state == "live", found.reason
    assert found.speed_up == pytest.approx(stock / mine, rel=0.05)
    assert found.kernel_us == pytest.approx(mine, rel=0.05)
    assert found.stock_us == pytest.approx(stock, rel=0.05)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(("mine", "stock"), [(5, 4), (23, 23), (2000, 400)])
def test_a_kernel_that_is_no_faster_on_the_device_is_not_admitted(
    host: str, mine: float, stock: float
) -> None:
    found = judged(host, mine, stock)
    assert found.state == "slower"
    assert "times as fast as MLX" in found.reason


def test_evaluations_as_a_whole_would_not_tell_what_the_device_does() -> None:
    found = judged("slow", 4, 12, asynchronous=False)
    assert found.state == "slower"
    assert found.kernel_us > 40


def test_the_fastest_geometry_of_the_device_is_chosen() -> None:
    device = SimulatedDevice(jitter=0.5)
    kernel = Scripted(device, costs={"first": 6 * US, "second": 4 * US, "third": 9 * US}, stock_cost=20 * US)
    assert judge(kernel, CASE, device.bench(), QUICK).geometry == repr("second")


def test_a_refused_geometry_is_left_for_the_next() -> None:
    device = SimulatedDevice()
    kernel = Scripted(device, refused=["wide"])
    found = judge(kernel, CASE, device.bench(), QUICK)
    assert (found.state, found.geometry, len(found.refusals)) == ("live", repr("small"), 1)


# the host -----------------------------------------------------------------------------------------


class Costly(Scripted):
    """Building its launches costs the host `more` seconds."""

    more = 0.0

    def launch(self, inputs: Product, geometry: Hashable) -> mx.array:
        assert isinstance(self.clock, SimulatedDevice)
        self.clock.seconds += self.more
        return super().launch(inputs, geometry)


@pytest.mark.parametrize(("more", "state"), [(0, "live"), (15, "live"), (60, "costly")])
def test_a_launch_may_cost_the_host_no_more_than_mlx_costs_the_device(more: float, state: str) -> None:
    device = SimulatedDevice(host=20 * US)
    kernel = Costly(device, costs={"wide": 5 * US}, stock_cost=20 * US)
    kernel.more = more * US
    found = judge(kernel, CASE, device.bench(), QUICK)
    assert found.state == state
    assert ("the host" in found.reason) is (state == "costly")
    assert found.kernel_host_us - found.stock_host_us == pytest.approx(more, abs=1)
    assert found.stock_host_us == pytest.approx(20, rel=0.05)


def test_a_timing_in_which_the_host_was_late_does_not_count() -> None:
    device = SimulatedDevice()
    kernel = Scripted(device, costs={"wide": 5 * US})
    chain = Chain(kernel, [kernel.draw(CASE, 0)], device.bench(), device, 48)

    def wide(inputs: Any) -> mx.array:
        return kernel.launch(inputs, "wide")

    assert chain.settle([wide])
    found = chain.time(wide)
    assert found is not None
    assert found.device == pytest.approx(5 * US, rel=0.05)
    device.pauses, device.pause = 1.0, 1e-3
    assert chain.time(wide) is None
    device.pauses = 0.0
    assert chain.time(wide) is not None
    device.wake = 1e-3
    assert chain.time(wide) is None


class Waiting(SimulatedDevice):
    """A queue whose host waits until the device is done."""

    def begin(self, array: mx.array) -> None:
        super().begin(array)
        self.seconds = max(self.seconds, self.free)


def test_a_device_that_the_host_has_to_wait_for_is_timed_as_a_whole() -> None:
    device = Waiting()
    kernel = Scripted(device, costs={"wide": 800 * US, "small": 500 * US}, stock_cost=1000 * US)
    found = judge(kernel, CASE, device.bench(), QUICK)
    assert (found.state, found.geometry) == ("live", repr("small"))
    assert (found.kernel_host_us, found.stock_host_us) == (0, 0)
    assert found.kernel_us == pytest.approx(530, rel=0.1)


# steady -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow", "state", "said"),
    [
        (lambda seconds, late: seconds + (105.0 if late == 100 else 0.0), "stalled", "105"),
        (lambda seconds, late: seconds * (8 if late > 0 else 1), "slower", "sustained run"),
        (lambda seconds, late: seconds * (2.9 if late > 0 else 1), "live", ""),
    ],
    ids=["stalls", "slumps", "slumps, and is faster than MLX"],
)
def test_a_stall_and_a_slump_are_noticed_on_a_device_too(slow: Any, state: str, said: str) -> None:
    def launches(sustained: float, slow: Any) -> tuple[Verdict, int]:
        device, effort = SimulatedDevice(), Effort(sustained=sustained)
        kernel = Scripted(device, costs={"wide": 5 * US}, stock_cost=20 * US, slow=slow)
        return judge(kernel, CASE, device.bench(), effort), kernel.launches

    _, before = launches(0.0, lambda seconds, number: seconds)
    found, _ = launches(0.2, lambda seconds, number: slow(seconds, number - before))
    assert found.state == state
    assert said in found.reason


# what it costs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["quick", "slow", "with a short queue"])
@pytest.mark.parametrize("mine", [4, 400, 5000])
def test_a_case_takes_about_as_long_as_its_efforts_say(host: str, mine: float) -> None:
    device, effort = replace(HOSTS[host]), Effort(sustained=0.1)
    costs: dict[Hashable, float] = dict.fromkeys(range(40), mine * US)
    judge(Scripted(device, costs=costs, stock_cost=3 * mine * US), CASE, device.bench(), effort)
    assert device.seconds < effort.choosing + effort.seconds + effort.sustained + 1.0


def test_geometries_after_the_first_that_is_right_are_tried_for_a_while_only() -> None:
    clock, tried = Clock(), set[Hashable]()

    def noted(out: mx.array, number: int, geometry: Hashable) -> mx.array:
        tried.add(geometry)
        return out + 1 if geometry in (0, 1) else out

    kernel = Scripted(clock, costs=dict.fromkeys(range(60), 0.01), stock_cost=0.02, spoil=noted)
    assert judge(kernel, CASE, clock.bench(), Effort(choosing=0.3)).state == "live"
    assert 4 < len(tried) < 20
    tried.clear()
    assert judge(kernel, CASE, clock.bench(), Effort(choosing=0.0)).state == "live"
    assert tried <= {0, 1, 2, 3}


@pytest.mark.parametrize("size", [1, 1000, 1 << 22, 1 << 26])
def test_copies_are_many_of_what_is_small_and_two_of_what_is_large(size: int) -> None:
    class Sized(Scripted):
        def draw(self, case: Case, seed: int) -> Product:
            return Product(mx.zeros((size, SIZE)), mx.zeros((SIZE, SIZE)))

    clock = Clock()
    kernel = Sized(clock)
    held = copies(kernel, CASE, [kernel.draw(CASE, 0)], clock.bench())
    assert 2 <= len(held) <= MOST_COPIES
    assert len(held) == 2 or sum(map(nbytes, held)) <= COPIES_BYTES
    assert len(held) == MOST_COPIES or 2 * sum(map(nbytes, held)) > COPIES_BYTES


def test_the_size_of_inputs_is_that_of_all_their_arrays() -> None:
    source = MatrixShape(64, 128, 4, 32, mx.float16).draw(0)
    assert nbytes((mx.zeros((3, 5)), 7, None, "causal", [source])) == 60 + 64 * 64 + 2 * 64 * 4 * 2


# what depends on what -----------------------------------------------------------------------------


def test_each_launch_of_a_chain_is_on_the_next_copy_and_on_what_the_last_one_made() -> None:
    device = SimulatedDevice()
    kernel = Scripted(device, costs={"wide": 5 * US})
    held = [kernel.draw(CASE, seed) for seed in range(3)]
    chain = Chain(kernel, held, device.bench(), device, 8)
    taken: list[Product] = []
    made: list[mx.array] = []

    def noted(inputs: Product) -> mx.array:
        taken.append(inputs)
        made.append(kernel.launch(inputs, "wide") / SIZE)
        return device.cost(made[-1], 0.0)

    assert chain.settle([noted])
    for timing in (chain.time, chain.run):
        taken.clear()
        made.clear()
        timing(noted)
        assert len(taken) == 8
        assert all(inputs.weight is held[number % 3].weight for number, inputs in enumerate(taken))
        assert all(mx.array_equal(inputs.x, out) for inputs, out in zip(taken[1:], made, strict=False))


def case_of(kernel: Any) -> list[Case]:
    if isinstance(kernel, AttentionKernel):
        return [kernel.case(AttentionShape(8, 2, 64, mx.float16, 32, sinks), 2) for sinks in (False, True)]
    experts = 4 if isinstance(kernel, ExpertsKernel) else 0
    shapes = [MatrixShape(*sizes, 4, 64, mx.float16, experts) for sizes in ((128, 512), (512, 128))]
    return [Case(str(shape), 3) for shape in shapes]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_inputs_after_a_result_are_the_same_but_for_what_is_made_of_it(entry: Entry) -> None:
    kernel = entry.kernel()
    for case in case_of(kernel):
        inputs = kernel.draw(case, 0)
        out = mx.random.normal(kernel.reference(inputs).shape).astype(mx.float16)
        made, other = kernel.after(inputs, out), kernel.after(inputs, out + 1)
        differ = [name for name in inputs._fields if getattr(made, name) is not getattr(inputs, name)]
        assert len(differ) == 1
        before, after, again = (getattr(each, differ[0]) for each in (inputs, made, other))
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert mx.allclose(again, after + 1, rtol=1e-2, atol=1e-2)
        assert np.isin(np.array(after), np.array(out)).all()


def test_numbers_of_a_result_are_its_first_and_again_where_there_are_too_few() -> None:
    out = mx.arange(6).reshape(2, 3)
    assert numbers_of(out, (2, 2)).tolist() == [[0, 1], [2, 3]]
    assert numbers_of(out, (2, 4)).tolist() == [[0, 1, 2, 3], [4, 5, 0, 1]]
    attended = mx.random.normal((1, 4, 3, 8))
    assert mx.array_equal(queries_of(attended), attended)


# a real queue -------------------------------------------------------------------------------------


def test_a_chain_runs_on_a_queue_of_mlx_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's streams are queues on the CPU too, where times say nothing."""
    monkeypatch.setattr(benches, "_SIZES", (128,))
    queue, x = GpuQueue(), mx.random.normal((3, 5))
    busy = queue.busy(x, 1e-3)
    queue.begin(busy)
    assert mx.array_equal(busy, x)
    kernel = Scripted(Clock(), costs={"wide": 0.0})
    found = judge(kernel, CASE, Bench(queue=queue), Effort(races=5, seconds=0.0, sustained=0.01))
    assert found.state in ("live", "costly", "slower"), found.reason
    assert found.kernel_us > 0


# references ---------------------------------------------------------------------------------------


def test_a_matrix_is_dequantized_once_for_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, shape = RowsKernel(), MatrixShape(64, 128, 4, 32, mx.float16)
    exact: list[int] = []

    def counted(x: mx.array, source: Source) -> Any:
        exact.append(len(x))
        return exact_product(x, source)

    monkeypatch.setattr(rows, "exact_product", counted)
    for width in (1, 4, 16):
        for seed in (0, 1):
            inputs = kernel.draw(Case(str(shape), width), seed)
            assert inputs.x.shape == (width, 128)
            wanted = exact_product(inputs.x, inputs.source)
            assert np.allclose(kernel.reference(inputs), wanted, rtol=1e-6, atol=1e-6)
    assert exact == [16, 16]
    inputs = kernel.draw(Case(str(shape), 4), 0)
    other = inputs._replace(x=inputs.x * 2)
    assert np.allclose(kernel.reference(other), 2 * kernel.reference(inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("experts", [0, 4])
def test_draws_differ_by_shape_and_seed_and_by_nothing_else(experts: int) -> None:
    kernel = RowsKernel()
    cases = [Case(str(MatrixShape(64, 128, bits, 32, mx.float16, experts)), 20) for bits in (4, 8)]
    cases += [Case(case.shape, 3) for case in cases]
    drawn = {(case, seed): kernel.draw(case, seed) for case in cases for seed in (0, 1, 2)}
    for (case, seed), inputs in drawn.items():
        assert MatrixShape.of(inputs.source, inputs.x.dtype) == MatrixShape.parse(case.shape)
        again = kernel.draw(case, seed)
        assert mx.array_equal(again.x, inputs.x)
        assert mx.array_equal(again.source.weight, inputs.source.weight)
    assert len({str(inputs.source.weight[..., 0].tolist()) for inputs in drawn.values()}) == 6
