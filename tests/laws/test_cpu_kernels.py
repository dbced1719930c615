"""Laws of the CPU kernels: they equal their references, and a row does not depend on its neighbours."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.models import gemma

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.kernels import dispatch, race
from mlx_dspark.kernels.base import Floats, Source, Way
from mlx_dspark.kernels.cpu_attention import reference as attention_reference
from mlx_dspark.kernels.cpu_attention.attend import attend, takes
from mlx_dspark.kernels.cpu_blocks import matrix as blocks_matrix
from mlx_dspark.kernels.cpu_blocks.matrix import BlockedMatrix, Blocks
from mlx_dspark.kernels.cpu_blocks.reference import error_bound, exact_weight
from mlx_dspark.kernels.cpu_check import fault
from mlx_dspark.kernels.cpu_dense.matrix import Dense, DenseMatrix
from mlx_dspark.kernels.cpu_small.modules import host_module
from mlx_dspark.kernels.cpu_swiglu.module import HeldSwiglu, fused
from mlx_dspark.kernels.dispatch import CHOICES, STOCK, install_cpu_weights
from mlx_dspark.kernels.llvm import F32, LANES, Emitter
from mlx_dspark.kernels.modules import HeldEmbedding, HeldLinear
from mlx_dspark.kernels.race import RaceMemory, Timing, fastest
from tests.tiny import tiny_llama

WAYS: list[Way] = [Blocks(), Dense()]
ROWS = (1, 2, 3, 7, 8, 16, 17, 33, 200)
ODD_OUTPUTS = (1, 37, 96)


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def quantized(
    outputs: int, inputs: int, bits: int, group: int, dtype: mx.Dtype = mx.float32, mode: str = "affine"
) -> Source:
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(outputs + inputs)).astype(dtype)
    packed, scales, *biases = mx.quantize(weight, group, bits, mode=mode)
    return Source(outputs, inputs, packed, scales, biases[0] if biases else None, bits, group, mode)


def dense(outputs: int, inputs: int, dtype: mx.Dtype) -> Source:
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(outputs)).astype(dtype)
    return Source(outputs, inputs, weight)


def noise(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def relative_difference(got: mx.array, expected: mx.array) -> float:
    return float(np.max(np.abs(np.array(got) - np.array(expected))) / np.max(np.abs(np.array(expected))))


def sources() -> list[Source]:
    every = [
        quantized(outputs, 3 * group, bits, group)
        for bits in (4, 8)
        for group in (32, 64, 128)
        for outputs in ODD_OUTPUTS
    ]
    every += [dense(37, 96, dtype) for dtype in (mx.float32, mx.float16, mx.bfloat16)]
    return [*every, quantized(40, 128, 4, 64, mx.float16), quantized(40, 128, 8, 32, mx.bfloat16)]


# -- the product -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.kind)
def test_product_equals_the_exact_one_within_rounding(way: Way, source: Source) -> None:
    assert way.refusal(source) is None
    held = way.hold(source)
    weight = exact_weight(source)
    for count in ROWS:
        rows = noise(count, source.inputs)
        product = held.multiply(rows)
        assert product.dtype == np.float32
        error = np.abs(product - rows.astype(np.float64) @ weight.T)
        assert np.all(error <= error_bound(source, rows))


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.kind)
def test_a_row_does_not_depend_on_the_rows_beside_it(source: Source) -> None:
    held = BlockedMatrix(source)
    rows = noise(33, source.inputs)
    alone = np.concatenate([held.multiply(rows[i : i + 1]) for i in range(len(rows))])
    for count in range(1, len(rows) + 1):
        assert np.array_equal(held.multiply(rows[:count]), alone[:count])


def test_the_result_does_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    source = quantized(1000, 128, 4, 32)
    held = BlockedMatrix(source)
    rows = noise(19, 128)
    one = held.multiply(rows, threads=1)
    monkeypatch.setattr(blocks_matrix, "_MACS_PER_SPAN", 5000)
    for threads in (2, 3, 5):
        assert np.array_equal(held.multiply(rows, threads=threads), one)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.kind)
def test_lookup_equals_the_rows_of_the_matrix(way: Way, source: Source) -> None:
    indices = np.array([0, source.outputs - 1, source.outputs // 2, 0])
    found = way.hold(source).lookup(indices)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact_weight(source)[indices], rtol=2e-6, atol=2e-6)


def test_blocks_hold_packed_weights_in_no_more_room_than_they_took() -> None:
    source = quantized(1024, 256, 4, 64)
    assert source.scales is not None
    assert BlockedMatrix(source).nbytes == source.weight.nbytes + 2 * source.scales.nbytes


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (quantized(32, 128, 2, 32), "2-bit"),
        (
            Source(32, 128, mx.zeros((32, 16), mx.uint32), mx.zeros((32, 4), mx.uint8), None, 4, 32, "mxfp4"),
            "mxfp4",
        ),
        (dense(32, 40, mx.float32), "40"),
    ],
)
def test_blocks_refuse_what_they_cannot_hold(source: Source, word: str) -> None:
    refusal = Blocks().refusal(source)
    assert refusal is not None
    assert word in refusal


# -- modules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 1, 3, 64)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_linear_keeps_shape_type_and_bias(way: Way, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    linear = nn.QuantizedLinear(64, 40, bias=True, group_size=32, bits=4)
    linear.bias = mx.random.normal((40,))
    source = Source.of(linear)
    assert source is not None
    x = mx.random.normal(shape).astype(dtype)
    got = HeldLinear(way.hold(source), linear["bias"])(x)
    expected = linear(x.astype(mx.float32))
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert mx.allclose(
        got.astype(mx.float32), expected, rtol=1e-2 if dtype == mx.bfloat16 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_embedding_looks_up_and_is_the_tied_head(way: Way) -> None:
    embedding = nn.QuantizedEmbedding(50, 64, group_size=32, bits=8)
    source = Source.of(embedding)
    assert source is not None
    held = HeldEmbedding(way.hold(source))
    ids = mx.array([[3, 49, 0], [7, 7, 1]])
    assert mx.allclose(held(ids), embedding(ids), rtol=1e-6, atol=1e-6)
    x = mx.random.normal((2, 3, 64))
    assert mx.allclose(held.as_linear(x), embedding.as_linear(x), rtol=1e-5, atol=1e-5)


def test_exp_is_within_two_units_in_the_last_place() -> None:
    emit = Emitter("exponentials", ("x",), ("count",))
    with emit.loop(0, emit.arguments["count"], LANES) as index:
        x = emit.load(emit.arguments["x"], F32, index, LANES)
        emit.store(emit.exp(x), emit.arguments["x"], F32, index)
    function = emit.compile()
    points = np.linspace(-86.9, 87.9, 1 << 16).astype(np.float32)
    got = points.copy()
    function(got.ctypes.data, got.size)
    exact = np.exp(points.astype(np.float64))
    assert np.max(np.abs(got - exact) / np.spacing(exact.astype(np.float32))) <= 2


@pytest.mark.parametrize("dims", [16, 36, 576])
def test_norm_equals_stock(dims: int) -> None:
    norm = nn.RMSNorm(dims, eps=1e-5)
    norm.weight = mx.random.normal((dims,))
    held = host_module(norm)
    assert held is not None
    x = mx.random.normal((2, 3, dims)) * 5
    assert mx.allclose(held(x), norm(x), rtol=2e-6, atol=2e-6)
    assert mx.array_equal(held(x)[1:, 2:], held(x[1:, 2:]))


@pytest.mark.parametrize("offset", [0, 11, 5000, mx.array(7), mx.array([3, 900])], ids=str)
@pytest.mark.parametrize("dims", [16, 10])
def test_rotation_equals_stock(offset: int | mx.array, dims: int) -> None:
    rope = nn.RoPE(dims, base=100000.0, scale=0.5)
    held = host_module(rope)
    assert held is not None
    x = mx.random.normal((2, 5, 3, 16)).transpose(0, 2, 1, 3)
    expected = mx.fast.rope(x, dims, traditional=False, base=100000.0, scale=0.5, offset=offset)
    assert mx.allclose(held(x, offset=offset), expected, rtol=1e-6, atol=1e-6)


def test_an_interleaved_rotation_stays_stock() -> None:
    assert host_module(nn.RoPE(16, traditional=True)) is None


class Gated(nn.Module):
    """A feed-forward of the usual three projections with any gate."""

    def __init__(self, gate: object) -> None:
        super().__init__()
        shapes = {"gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64)}
        for name, (inputs, outputs) in shapes.items():
            source = Source.of(nn.QuantizedLinear(inputs, outputs, False, group_size=32, bits=4))
            assert source is not None
            self[name] = HeldLinear(BlockedMatrix(source))
        self._gate = gate

    def __call__(self, x: mx.array) -> mx.array:
        return self["down_proj"](self._gate(self["gate_proj"](x)) * self["up_proj"](x))  # type: ignore[operator]


def test_swiglu_is_fused_and_equal() -> None:
    module = Gated(nn.silu)
    whole = fused(module)
    assert isinstance(whole, HeldSwiglu)
    x = mx.random.normal((2, 5, 64)) * 4
    assert relative_difference(whole(x), module(x)) <= 1e-6
    assert mx.array_equal(whole(x)[:, 3:4], whole(x[:, 3:4]))


@pytest.mark.parametrize(
    "gate", [nn.gelu, nn.gelu_approx, nn.relu, lambda gate: nn.silu(mx.minimum(gate, 7.0))]
)
def test_another_gate_is_not_fused(gate: object) -> None:
    assert fused(Gated(gate)) is None


# -- attention ---------------------------------------------------------------------------------------------

Heads = namedtuple("Heads", "batch heads kv_heads head_dim")


def attention_case(heads: Heads, rows: int, depth: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, and keys and values that are slices of longer buffers."""
    queries = mx.random.normal((heads.batch, rows, heads.heads, heads.head_dim)).transpose(0, 2, 1, 3)
    room = (heads.batch, heads.kv_heads, depth + 9, heads.head_dim)
    return queries, mx.random.normal(room)[:, :, :depth], mx.random.normal(room)[:, :, :depth]


@pytest.mark.parametrize("heads", [Heads(1, 4, 2, 16), Heads(2, 3, 3, 32), Heads(1, 9, 3, 64)])
@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (1, 40), (2, 2), (5, 33), (16, 16), (7, 200)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_the_reference(heads: Heads, rows: int, depth: int, causal: bool) -> None:
    queries, keys, values = attention_case(heads, rows, depth)
    mask = "causal" if causal else None
    assert takes(queries, keys, values, mask)
    got = attend(queries, keys, values, 0.2, causal)
    expected = attention_reference.attend(queries, keys, values, 0.2, causal)
    assert mx.allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_attention_of_a_row_does_not_depend_on_the_width_or_the_threads() -> None:
    queries, keys, values = attention_case(Heads(1, 6, 2, 32), 9, 50)
    together = attend(queries, keys, values, 0.2, True)
    for row in range(9):
        seen = 50 - 9 + row + 1
        alone = attend(queries[:, :, row : row + 1], keys[:, :, :seen], values[:, :, :seen], 0.2, True)
        assert mx.array_equal(alone[:, :, 0], together[:, :, row])
    assert mx.array_equal(attend(queries, keys, values, 0.2, True, threads=3), together)


def test_attention_with_other_masks_types_or_sinks_is_left_to_mlx() -> None:
    queries, keys, values = attention_case(Heads(1, 4, 2, 16), 2, 5)
    assert not takes(queries, keys, values, mx.ones((2, 5), dtype=mx.bool_))
    assert not takes(queries, keys, values, None, sinks=mx.zeros((4,)))
    assert not takes(queries.astype(mx.float16), keys, values, None)
    assert not takes(queries[..., :10], keys[..., :10], values[..., :10], None)


# -- the choice --------------------------------------------------------------------------------------------


def tiny_quantized() -> nn.Module:
    model = tiny_llama()
    nn.quantize(model, 32, 4)
    return model


TOKENS = mx.array([[5, 9, 200, 31, 7, 7, 64]])


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("make", [tiny_quantized, tiny_llama])
def test_every_choice_computes_the_same_logits(choice: str, make, tmp_path: Path) -> None:
    model = make()
    expected = model(TOKENS)
    mx.eval(expected)
    report = install_cpu_weights(model, choice=choice, cache_dir=tmp_path)
    assert (report.choice, report.reason, report.timings) == (choice, "pinned", ())
    assert not list(tmp_path.iterdir())
    assert relative_difference(model(TOKENS), expected) <= (0.0 if choice == STOCK else 1e-5)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_bfloat16_model_computes_in_float32(choice: str, tmp_path: Path) -> None:
    model = tiny_llama()
    model.set_dtype(mx.bfloat16)
    exact = copy.deepcopy(model)
    exact.set_dtype(mx.float32)
    expected = exact(TOKENS)
    install_cpu_weights(model, choice=choice, cache_dir=tmp_path)
    logits = model(TOKENS)
    assert logits.dtype == mx.float32
    assert relative_difference(logits, expected) <= 1e-5


def test_installed_blocks_hold_every_matrix_and_fuse_the_feed_forwards(tmp_path: Path) -> None:
    model = tiny_quantized()
    report = install_cpu_weights(model, choice="blocks", cache_dir=tmp_path)
    assert report.left_stock == ()
    assert not any(Source.of(module) for module in model.modules())
    assert sum(isinstance(module, HeldSwiglu) for module in model.modules()) == 2


def test_unsupported_modules_stay_stock_and_are_named(tmp_path: Path) -> None:
    model = tiny_llama()
    two_bits = nn.Linear(64, 64, bias=False).to_quantized(32, 2)
    model.update_modules(tree_unflatten([("model.layers.0.self_attn.q_proj", two_bits)]))
    expected = model(TOKENS)
    mx.eval(expected)
    report = install_cpu_weights(model, choice="blocks", cache_dir=tmp_path)
    assert [name for name, _ in report.left_stock] == ["model.layers.0.self_attn.q_proj"]
    assert "2-bit" in dict(report.left_stock)["model.layers.0.self_attn.q_proj"]
    assert mx.allclose(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_a_gate_that_is_not_silu_still_runs(tmp_path: Path) -> None:
    mlp = gemma.MLP(64, 96)
    holder = nn.Module()
    holder.mlp = mlp
    x = mx.random.normal((1, 3, 64))
    expected = mlp(x)
    mx.eval(expected)
    install_cpu_weights(holder, choice="blocks", cache_dir=tmp_path)
    assert isinstance(holder.mlp, gemma.MLP)
    assert mx.allclose(holder.mlp(x), expected, rtol=1e-4, atol=1e-5)


def test_the_choice_is_measured_once_and_remembered(tmp_path: Path) -> None:
    said: list[str] = []
    first = install_cpu_weights(tiny_quantized(), cache_dir=tmp_path / "new", progress=said.append)
    again = install_cpu_weights(tiny_quantized(), cache_dir=tmp_path / "new", progress=said.append)
    assert first.reason == "measured"
    assert again.reason == "remembered"
    assert (again.choice, again.timings) == (first.choice, first.timings)
    assert len(said) == 1
    assert {timing.name for timing in first.timings} == set(CHOICES)
    assert all(min(t.plain_ms, t.verify_ms, t.prefill_ms) > 0 for t in first.timings)
    other = tiny_llama()
    assert install_cpu_weights(other, cache_dir=tmp_path / "new").reason == "measured"
    assert str(first).startswith(f"weights: {first.choice} (measured; ")


TIMING = '{"%s": [{"name": "stock", "plain_ms": VALUE, "verify_ms": 1, "prefill_ms": 1}]}'


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[]", '{"%s": 3}', '{"%s": [{"name": "blocks"}]}', '{"%s": []}', "[" * 200_000),
        *(TIMING.replace("VALUE", value) for value in ("-1", "0", "NaN", "Infinity", "1" + "0" * 400)),
    ],
)
def test_a_damaged_memory_is_set_aside_and_measured_anew(damage: str, tmp_path: Path) -> None:
    first = install_cpu_weights(tiny_quantized(), cache_dir=tmp_path)
    file = tmp_path / "cpu-weights.json"
    (key,) = json.loads(file.read_text())
    file.write_text(damage.replace("%s", key))
    again = install_cpu_weights(tiny_quantized(), cache_dir=tmp_path)
    assert again.reason == "measured"
    assert {timing.name for timing in again.timings} == {timing.name for timing in first.timings}
    assert (tmp_path / "cpu-weights.json.damaged").read_text() == damage.replace("%s", key)
    assert install_cpu_weights(tiny_quantized(), cache_dir=tmp_path).reason == "remembered"


def test_an_unknown_choice_is_refused_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="blocks, dense, stock"):
        install_cpu_weights(tiny_llama(), choice="fast", cache_dir=tmp_path)


def test_other_devices_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_quantized()
    monkeypatch.setattr(dispatch.mx, "default_device", lambda: mx.Device(mx.gpu))
    report = install_cpu_weights(model, cache_dir=tmp_path)
    assert report.choice is None
    assert "not the CPU" in str(report)
    assert not any(isinstance(module, HeldLinear | HeldEmbedding) for module in model.modules())


def test_without_llvmlite_blocks_are_absent_and_cannot_be_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    report = install_cpu_weights(tiny_quantized(), cache_dir=tmp_path)
    assert [name for name, _ in report.absent] == ["blocks"]
    assert report.choice in ("dense", STOCK)
    with pytest.raises(UsageError, match="llvmlite"):
        install_cpu_weights(tiny_quantized(), choice="blocks", cache_dir=tmp_path)


def test_the_dispatch_can_be_imported_without_llvmlite() -> None:
    program = "import sys; sys.modules['llvmlite'] = None; import mlx_dspark.kernels.dispatch"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_dense_weights_are_not_offered_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = namedtuple("memory", "available")(available=100_000)
    monkeypatch.setattr(dispatch.psutil, "virtual_memory", lambda: memory)
    report = install_cpu_weights(tiny_quantized(), cache_dir=tmp_path)
    assert "dense" in dict(report.absent)
    assert {timing.name for timing in report.timings} == {"blocks", STOCK}


def test_a_tenth_is_needed_to_leave_the_stock_way() -> None:
    def timing(name: str, ms: float) -> Timing:
        return Timing(name, ms, ms, ms)

    assert fastest([timing(STOCK, 10), timing("blocks", 9.5)], STOCK) == STOCK
    assert fastest([timing(STOCK, 10), timing("dense", 7), timing("blocks", 8)], STOCK) == "dense"


def test_the_key_names_model_and_versions() -> None:
    one, other = [quantized(32, 64, 4, 32)], [quantized(32, 64, 8, 32)]
    keys = {
        race.race_key(one, {"blocks": 1}),
        race.race_key(one, {"blocks": 2}),
        race.race_key(other, {"blocks": 1}),
        race.race_key(one * 2, {"blocks": 1}),
    }
    assert len(keys) == 4
    assert race.race_key(one, {"blocks": 1}) in keys


def test_the_memory_keeps_other_models(tmp_path: Path) -> None:
    memory = RaceMemory(tmp_path)
    memory.remember("one", [Timing("stock", 1.0, 2.0, 3.0)])
    memory.remember("two", [Timing("stock", 4.0, 5.0, 6.0)])
    assert memory.recall("one", ["stock"]) == [Timing("stock", 1.0, 2.0, 3.0)]
    assert memory.recall("three", ["stock"]) is None


class Astray(Dense):
    """A way whose products of some rows are off, or that fails."""

    def __init__(self, width: int | None) -> None:
        self._width = width

    def hold(self, source: Source) -> DenseMatrix:
        if self._width is None:
            raise RuntimeError("no such instruction")
        held = super().hold(source)
        right, width = held.multiply, self._width
        held.multiply = lambda rows: right(rows) * (1.001 if len(rows) == width else 1)  # type: ignore[method-assign]
        return held


@pytest.mark.parametrize(("width", "words"), [(1, "1 rows"), (6, "6 rows"), (None, "no such instruction")])
def test_a_way_that_is_wrong_here_is_refused_said_and_remembered(
    width: int | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "Dense", lambda: Astray(width))
    for reason in ("measured", "remembered"):
        report = install_cpu_weights(tiny_quantized(), cache_dir=tmp_path)
        assert report.reason == reason
        assert words in dict(report.absent)["dense"]
        assert {timing.name for timing in report.timings} == {"blocks", STOCK}
    with pytest.raises(UsageError, match=words):
        install_cpu_weights(tiny_quantized(), choice="dense", cache_dir=tmp_path)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_right_way_is_not_refused(way: Way) -> None:
    every = [*sources(), quantized(64, 128, 4, 32, mode="mxfp4"), quantized(64, 128, 6, 64)]
    assert fault(way, every) == ""


@pytest.mark.parametrize("bits", [4, 8, 0])
def test_rearranging_a_matrix_takes_little_beside_the_new_one(bits: int) -> None:
    source = quantized(8192, 256, bits, 64) if bits else dense(8192, 256, mx.float16)
    tracemalloc.start()
    held = BlockedMatrix(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 1.3 * held.nbytes


def test_a_way_far_behind_at_both_widths_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = {"near": (1.0, 9.0), "far": (9.0, 90.0), "mixed": (9.0, 9.0)}
    turns: list[str] = []

    def pass_ms(samples: object, matrices: list[str], width: int) -> float:
        turns.append(matrices[0])
        return cost[matrices[0]][width > 1]

    monkeypatch.setattr(race, "_pass_ms", pass_ms)
    one = [quantized(32, 64, 4, 32)]
    timings = race.measure(one, {name: lambda source, name=name: name for name in cost})  # type: ignore[misc]
    assert {timing.name: timing.verify_ms for timing in timings} == {"near": 9.0, "far": 90.0, "mixed": 9.0}
    assert {name: turns.count(name) for name in cost} == {"near": 7, "far": 3, "mixed": 7}
