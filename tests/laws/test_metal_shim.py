"""Laws of the Metal shim: it computes what Metal defines, and finds what a kernel must not do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests import metal_shim as shim
from tests.metal_shim import gates, mlx_kernels
from tests.metal_shim.rewrite import rewritten

ADDRESS, THREAD = shim.Mode.ADDRESS, shim.Mode.THREAD
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
AT = "uint at = thread_position_in_grid.x, i = thread_index_in_threadgroup; "


def one(source: str, *arrays: mx.array, size: int = 64, **options: Any) -> Callable[[Any], mx.array]:
    """A call of a kernel with inputs a, b, ... and the output `o`, float32 [256] unless told otherwise."""
    shape, dtype = options.pop("shape", (256,)), options.pop("dtype", mx.float32)
    launch = {name: options.pop(name) for name in ("init_value", "template") if name in options}

    def call(metal_kernel: Any) -> mx.array:
        names = "abcdefgh"[: len(arrays)]
        made = metal_kernel(name="one", input_names=list(names), output_names=["o"], source=source, **options)
        return made(
            inputs=list(arrays),
            grid=(256, 1, 1),
            threadgroup=(size, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
            **launch,
        )[0]

    return call


def values(array: mx.array) -> NDArray[np.float32]:
    return np.array(array.astype(mx.float32))


A = mx.random.normal((256,), key=mx.random.key(1))


# MLX's own kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("schedule", shim.SCHEDULES)
def test_attention_of_mlx_itself_is_attention(causal: bool, schedule: str) -> None:
    keys = mx.random.split(mx.random.key(2), 3)
    shapes = ((4, 3, 64), (2, 70, 64), (2, 70, 64))
    q, k, v = (mx.random.normal(s, key=key).astype(mx.float16) for s, key in zip(shapes, keys, strict=True))
    limits = shim.Limits(threads=1024)
    ran = shim.run(lambda made: mlx_kernels.attention(made, q, k, v, causal), schedule, limits=limits)
    wide = [each.astype(mx.float32)[None] for each in (q, k, v)]
    wanted = mx.fast.scaled_dot_product_attention(*wide, scale=1 / 8, mask="causal" if causal else None)
    assert np.abs(values(ran.value) - np.array(wanted[0])).max() < 1e-3
    assert ran.launches[0].threadgroup_bytes == 4 * (32 * 32 + 32 + 32)


@pytest.mark.parametrize(("rows", "outputs", "bits"), [(5, 64, 4), (37, 40, 8)])
@pytest.mark.parametrize("schedule", shim.SCHEDULES)
def test_quantized_product_of_mlx_itself_is_a_product(
    rows: int, outputs: int, bits: int, schedule: str
) -> None:
    key, other = mx.random.split(mx.random.key(3))
    weight = mx.random.normal((outputs, 128), key=key).astype(mx.float16)
    w, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
    x = mx.random.normal((rows, 128), key=other).astype(mx.float16)
    ran = shim.run(lambda made: mlx_kernels.quantized_product(made, x, w, scales, biases, bits), schedule)
    exact = mx.dequantize(w, scales.astype(mx.float32), biases.astype(mx.float32), group_size=64, bits=bits)
    wanted = values(x) @ np.array(exact).T
    assert np.abs(values(ran.value) - wanted).max() < 2.0**-10 * np.abs(wanted).max()


# what Metal defines --------------------------------------------------------------------------------

SIMD: list[tuple[str, Callable[[NDArray[Any]], NDArray[Any]]]] = [
    ("simd_sum(x)", lambda x: np.repeat(x.sum(1, keepdims=True), 32, 1)),
    ("simd_max(x)", lambda x: np.repeat(x.max(1, keepdims=True), 32, 1)),
    ("simd_min(x)", lambda x: np.repeat(x.min(1, keepdims=True), 32, 1)),
    ("simd_broadcast(x, 5)", lambda x: np.repeat(x[:, 5:6], 32, 1)),
    ("simd_broadcast_first(x)", lambda x: np.repeat(x[:, :1], 32, 1)),
    ("simd_shuffle(x, ushort(31 - lane))", lambda x: x[:, ::-1]),
    ("simd_shuffle_xor(x, 9)", lambda x: x[:, np.arange(32) ^ 9]),
    ("simd_shuffle_rotate_down(x, 3)", lambda x: np.roll(x, -3, 1)),
    (
        "simd_shuffle_and_fill_up(x, 7.0f, 4)",
        lambda x: np.pad(x, ((0, 0), (4, 0)), constant_values=7)[:, :32],
    ),
    ("simd_prefix_inclusive_sum(x)", lambda x: np.cumsum(x, 1)),
    ("simd_prefix_exclusive_sum(x)", lambda x: np.cumsum(x, 1) - x),
    ("quad_sum(x)", lambda x: np.repeat(x.reshape(-1, 8, 4).sum(2), 4, 1)),
    ("float(simd_any(x > 2.0f))", lambda x: np.repeat((x > 2).any(1, keepdims=True), 32, 1)),
    ("float(simd_all(x > -2.0f))", lambda x: np.repeat((x > -2).all(1, keepdims=True), 32, 1)),
    ("as_type<float>(as_type<uint>(x))", lambda x: x),
    ("dot(float4(x, 1.0f, 2.0f, x), float4(x))", lambda x: x * x + 3 * x + x * x),
    ("fma(x, x, clamp(x, -1.0f, 0.5f))", lambda x: x * x + np.clip(x, -1, 0.5)),
    ("select(x, 1.5h + float(1.0bf), x < 0.0f)", lambda x: np.where(x < 0, 2.5, x)),
    ("fast::exp2(x) + precise::log(fabs(x) + 1.0f)", lambda x: np.exp2(x) + np.log1p(np.abs(x))),
]


def test_functions_are_those_of_metal() -> None:
    lines = "\n".join(f"o[{n} * 256 + at] = {text};" for n, (text, _) in enumerate(SIMD))
    source = (
        f"uint at = thread_position_in_grid.x, lane = thread_index_in_simdgroup; float x = a[at];\n{lines}"
    )
    call = one(source, A, shape=(len(SIMD) * 256,))
    x = np.array(A, np.float64).reshape(8, 32)
    for schedule in shim.SCHEDULES:
        got = values(shim.run(call, schedule).value).reshape(len(SIMD), 8, 32)
        for (text, wanted), found in zip(SIMD, got, strict=True):
            np.testing.assert_allclose(found, wanted(x), rtol=1e-5, atol=1e-5, err_msg=text)


@pytest.mark.parametrize("kind", ["float", "half"])
def test_matrices_multiply_in_float32(kind: str) -> None:
    source = f"""
        simdgroup_matrix<{kind}, 8, 8> left, right;
        simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        threadgroup {kind} held[2][64];
        uint at = thread_index_in_threadgroup;
        held[0][at] = {kind}(a[at]); held[0][32 + at] = {kind}(a[32 + at]);
        held[1][at] = {kind}(a[64 + at]); held[1][32 + at] = {kind}(a[96 + at]);
        {BARRIER}
        simdgroup_load(left, &held[0][0], 8);
        simdgroup_load(right, &held[1][0], 8, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(sum, left, right, sum);
        simdgroup_store(sum, o, 8);
    """
    left, right = np.array(A.astype(mx.float16), np.float32)[:128].reshape(2, 8, 8)
    ran = shim.run(one(source, mx.array(np.stack([left, right])).reshape(-1), size=32, shape=(64,)))
    np.testing.assert_allclose(values(ran.value).reshape(8, 8), left @ right.T + 1, rtol=1e-5, atol=1e-5)
    assert ran.launches[0].counts["matrix_products"] == 32 * 8
    assert ran.launches[0].threadgroup_bytes == 128 * (4 if kind == "float" else 2)


def test_strides_of_a_view_are_told_and_nothing_is_copied() -> None:
    held = mx.arange(4 * 40, dtype=mx.float32).reshape(4, 40)
    view = held[:, 3:35].T
    source = AT + "if (at < 128) o[at] = a[at / 4 * a_strides[0] + at % 4 * a_strides[1]];"
    ran = shim.run(one(source, view, shape=(32, 4), ensure_row_contiguous=False))
    np.testing.assert_array_equal(np.array(ran.value), np.array(view))
    given = ran.launches[0].launch.buffers
    assert (given[0].data.size, given[1].data.size) == (4 * (3 * 40 + 32), 16)


def test_small_inputs_and_numbers_come_as_metal_gives_them() -> None:
    source = "uint at = thread_position_in_grid.x; o[at] = a[at % 3] * b + N;"
    three, factor = mx.array([1.0, 2.0, 4.0]), mx.array(10.0)
    call = one(source, three, factor, template=[("N", 7)])
    expected = np.array([1, 2, 4], np.float32)[np.arange(256) % 3] * 10 + 7
    np.testing.assert_array_equal(values(shim.run(call).value), expected)
    assert "const constant float* a" in shim.captured(call)[0].source


def test_atomics_add_over_threadgroups() -> None:
    source = AT + "atomic_fetch_add_explicit(&o[i], a[at], memory_order_relaxed);"
    for mode in (shim.Mode.PLAIN, THREAD):
        ran = shim.run(one(source, mx.ones(256), shape=(64,), init_value=0, atomic_outputs=True), mode=mode)
        np.testing.assert_array_equal(values(ran.value), np.full(64, 4))


def test_a_seed_is_a_schedule() -> None:
    source = AT + "threadgroup float last[1]; last[0] = a[at]; simd_sum(1.0f); o[at] = last[0];"
    call = one(source, A)
    first = [values(shim.run(call, "random", seed=seed).value) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(first[0], first[1])
    assert (first[0] != first[2]).any()


def test_other_processors_switch_fibers_to_the_same_end() -> None:
    call = one(EXCHANGE, A)
    plain, portable = (shim.run(call, "interleaved", portable=portable) for portable in (False, True))
    np.testing.assert_array_equal(values(plain.value), values(portable.value))
    assert plain.launches[0].counts == portable.launches[0].counts


def test_traffic_is_bytes_by_buffer() -> None:
    source = f"""
        uint at = thread_position_in_grid.x, i = thread_index_in_threadgroup;
        threadgroup float held[64];
        held[i] = a[at] + a[i];
        {BARRIER}
        if (at < 128) o[at] = held[63 - i];
    """
    ran = shim.run(one(source, A), mode=shim.Mode.TRAFFIC).launches[0]
    a, o = ran.traffic["a"], ran.traffic["o"]
    assert (a.size, a.loaded, a.distinct, a.by_threadgroups) == (1024, 2048, 1024, 1024 + 3 * 256)
    assert (o.loaded, o.stored) == (0, 512)
    assert ran.threadgroup_traffic == (512, 1024)


# what is found -------------------------------------------------------------------------------------

EXCHANGE = f"""
    uint at = thread_position_in_grid.x, i = thread_index_in_threadgroup;
    threadgroup float held[64];
    float sum = 0.0f;
    for (int turn = 0; turn < 3; ++turn) {{
      held[i] = a[at] + float(turn);
      {BARRIER}
      sum += held[(i + 37) % 64];
      {BARRIER} // again
    }}
    o[at] = sum;
"""
EXCHANGED = 3 * np.roll(np.array(A).reshape(4, 64), -37, 1).reshape(-1) + 3
AGAIN = f"{BARRIER} // again"
FIRST = f"{BARRIER}\n"


def all_wrong(call: Callable[[Any], mx.array], wanted: NDArray[Any], change: tuple[str, str] | None) -> bool:
    """Whether some schedule gives other values."""
    ran = (shim.run(call, schedule, change=change, seed=5) for schedule in shim.SCHEDULES)
    return any(not np.allclose(values(each.value), wanted, atol=1e-5) for each in ran)


def test_a_sound_exchange_passes_everything() -> None:
    assert not all_wrong(one(EXCHANGE, A), EXCHANGED, None)
    for mode in shim.Mode:
        np.testing.assert_allclose(values(shim.run(one(EXCHANGE, A), mode=mode).value), EXCHANGED, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(FIRST, "\n", id="read before written"),
        pytest.param(AGAIN, "", id="written before read"),
        pytest.param(FIRST, "simdgroup_barrier(mem_flags::mem_threadgroup);\n", id="a simdgroup's barrier"),
    ],
)
def test_missing_barriers_give_wrong_values_in_some_schedule(old: str, new: str) -> None:
    assert all_wrong(one(EXCHANGE, A), EXCHANGED, (old, new))


@dataclass(frozen=True)
class Defect:
    """A kernel with something wrong, how it must be run for it to be found, and what is then said."""

    source: str
    said: str
    mode: shim.Mode = shim.Mode.PLAIN
    schedule: str = "forward"


MATRICES = "simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f); "
PRODUCT = "simdgroup_multiply_accumulate(m, m, m, m);"
DEFECTS = {
    "barrier that orders no memory": Defect(
        EXCHANGE.replace(FIRST, "threadgroup_barrier(mem_flags::mem_none);\n"), "data race", THREAD
    ),
    "exchange after a sum of lanes": Defect(
        AT + "threadgroup float t[64]; t[i] = a[at]; float s = simd_sum(a[at]); o[at] = t[i ^ 1] + s;",
        "data race",
        THREAD,
    ),
    "threadgroups write one place": Defect(AT + "o[i] = a[at];", "data race", THREAD),
    "threadgroups write one place after a barrier": Defect(
        AT + BARRIER + "o[i] = a[at];", "data race", THREAD
    ),
    "barrier in a branch": Defect(AT + f"if (i < 40) {{ {BARRIER} }} o[at] = a[at];", "deadlock|returned"),
    "barrier after a return": Defect(AT + f"if (i == 9) return; {BARRIER} o[at] = a[at];", "returned"),
    "two barriers": Defect(
        AT + f"if (i < 32) {BARRIER}\nelse\n{BARRIER} o[at] = a[at];", "different threadgroup barriers"
    ),
    "sum in a branch": Defect(
        AT + "float s = 0;\nif (i % 2) s = simd_sum(a[at]);\nelse\ns = simd_max(a[at]);\no[at] = s;", "parted"
    ),
    "product in a branch": Defect(
        AT + MATRICES + f"if (i % 2) {PRODUCT} o[at] = m.thread_elements()[0];", "without all lanes"
    ),
    "product after a return": Defect(
        AT + MATRICES + f"if (i == 5) return; {PRODUCT} o[at] = 0;", "deadlock|without all"
    ),
    "read past the end": Defect(AT + "o[at] = a[at + 1];", "byte 1024 of buffer 'a'"),
    "read before the start": Defect(
        AT + "o[at] = a[int(at) - 1];", "byte -4 of buffer 'a'", schedule="reverse"
    ),
    "read before the start, exactly": Defect(AT + "o[at] = a[int(at) - 1];", "heap-buffer-overflow", ADDRESS),
    "write past the end": Defect(AT + "o[at + 4] = a[at];", "byte 1024 of buffer 'o'"),
    "write far before the start": Defect(AT + "o[int(at) - 2000] = a[at];", "of buffer 'o'"),
    "input written": Defect(AT + "((device float*)a)[at] = 1.0f; o[at] = 0;", "input 'a' was written"),
    "write past a threadgroup's array": Defect(
        AT + "threadgroup float t[64]; threadgroup float u[64]; u[i] = 0; t[i + 1] = a[at]; o[at] = 0;",
        "past the end of threadgroup variable 't'",
    ),
    "read past a threadgroup's array": Defect(
        AT + f"threadgroup float t[64]; threadgroup float u[64]; t[i] = u[i] = 1; {BARRIER} "
        "threadgroup float* p = t; o[at] = p[i + 1];",
        "use-after-poison",
        ADDRESS,
    ),
    "too large a shift": Defect(AT + "o[at] = float(1u << (i + 1));", "shift exponent", ADDRESS),
    "too much threadgroup memory": Defect(
        AT + "threadgroup float t[8193]; t[i] = 0; o[at] = t[i];", "32772 bytes"
    ),
    "too deep a stack": Defect(AT + "volatile float t[32000]; t[0] = a[at]; o[at] = t[0];", "stack overflow"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_named(name: str) -> None:
    found = DEFECTS[name]
    with pytest.raises(shim.Fault, match=found.said):
        shim.run(one(found.source, A), found.schedule, mode=found.mode)


def test_writes_beside_a_buffer_are_found_to_the_byte() -> None:
    source = AT + "if (at < 5) o[at + 1] = a[at];"
    for schedule in ("forward", "reverse"):
        with pytest.raises(shim.Fault, match="write beside buffer 'o'"):
            shim.run(one(source, A, shape=(5,)), schedule)


def test_a_launch_of_too_many_threads_is_a_fault() -> None:
    call = one(AT + "o[at] = a[at];", A, size=256)
    with pytest.raises(shim.Fault, match="256 threads in a threadgroup, limit 128"):
        shim.run(call, limits=shim.Limits(threads=128))


@pytest.mark.parametrize(
    "source",
    [
        AT + "threadgroup float t[64]; o[at] = t[i];",
        AT + "float t[4]; o[at] = t[at % 4];",
        AT + "if (at % 2) o[at] = a[at];",
        AT + "o[at] = simd_shuffle_down(a[at], 1);",
        AT + "simdgroup_matrix<float, 8, 8> m; o[at] = m.thread_elements()[0];",
    ],
    ids=["threadgroup memory", "private memory", "output", "no such lane", "matrix"],
)
def test_what_was_never_written_is_no_number_by_luck(source: str) -> None:
    got = values(shim.run(one(source, A)).value)
    assert (~np.isfinite(got) | (np.abs(got) > 1e6)).any()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("o[0] = a[0];", "bfloat"),
        ("double x = 1; o[0] = bfloat(x);", "double"),
        ("threadgroup float t = 0; o[0] = bfloat(t);", "no initial value"),
        ("const threadgroup float t[4]; o[0] = bfloat(t[0]);", "neither a threadgroup variable"),
        ("o[0] = bfloat(unknown_function(a[0]));", "unknown_function"),
    ],
)
def test_what_is_not_metal_is_refused(source: str, said: str) -> None:
    with pytest.raises(shim.NotMetal, match=said):
        shim.run(one(source, A, dtype=mx.bfloat16))


@pytest.mark.parametrize(
    ("source", "variables", "pointers"),
    [
        ("threadgroup float red[4 * N];", ("red",), 0),
        ("threadgroup float a[2][3], b, c[4];", ("a", "b", "c"), 0),
        ("threadgroup metal::vec<T, 4> a[4];", ("a",), 0),
        ("threadgroup alignas(16) T a[N < 2 ? 1 : 2];", ("a",), 0),
        ("{ threadgroup typename S::type a[2]; }", ("a",), 0),
        ("threadgroup float* p = red + 4 * i;", (), 1),
        ("threadgroup const float* p = (const threadgroup float*)red;", (), 2),
        ("void f(threadgroup T* x, const threadgroup float& y) {}", (), 2),
        ("threadgroup float (&t)[4] = red;", (), 1),
        ("// threadgroup float a;\n/* threadgroup */ int threadgroup_size = 3;", (), 0),
    ],
)
def test_threadgroup_variables_and_pointers_are_told_apart(
    source: str, variables: tuple[str, ...], pointers: int
) -> None:
    found = rewritten(source)
    assert (found.variables, found.pointers) == (variables, pointers)
    assert found.text.count("\n") == source.count("\n")


@pytest.mark.parametrize(
    "source",
    [
        "if (x) threadgroup float a[4];",
        "static threadgroup float a[4];",
        "threadgroup",
        "threadgroup auto(x);",
    ],
)
def test_threadgroup_words_that_are_neither_are_refused(source: str) -> None:
    with pytest.raises(shim.NotMetal):
        rewritten(source)


def test_a_change_must_be_of_one_place() -> None:
    for old in ("nowhere", BARRIER):
        with pytest.raises(ValueError, match="not once"):
            shim.captured(one(EXCHANGE, A), change=(old, ""))


# gates ---------------------------------------------------------------------------------------------


def test_gates_tell_what_a_launch_takes() -> None:
    found = gates.resources(shim.captured(one(EXCHANGE, A))[0])
    assert (found.threads, found.threadgroup_bytes, found.scratch_bytes) == (64, 256, 0)
    assert 0 < found.registers < 32
    assert not found.excess()


@pytest.mark.parametrize(
    "source",
    [
        "const float* p = a; o[0] = *p;",
        "threadgroup float t[4]; device float* p = t; o[0] = *p;",
        "const constant float* p = a; o[0] = *p;",
        "threadgroup float* p = o; o[0] = *p;",
    ],
)
def test_wrong_address_spaces_are_refused(source: str) -> None:
    launch = shim.captured(one(source, A))[0]
    with pytest.raises(shim.NotMetal, match="cannot initialize a variable of type"):
        gates.resources(launch)


def test_small_inputs_are_constants_to_the_gates() -> None:
    call = one("const device float* p = a; o[0] = *p;", A[:7])
    with pytest.raises(shim.NotMetal, match="of type 'constant float"):
        gates.resources(shim.captured(call)[0])


def test_arrays_that_find_no_registers_are_excess() -> None:
    source = AT + "float t[64]; for (int k = 0; k < 64; ++k) t[k] = a[k]; o[at] = t[int(a[at])];"
    assert "not in registers" in " ".join(gates.resources(shim.captured(one(source, A))[0]).excess())


def test_many_threads_and_much_memory_are_excess() -> None:
    found = gates.Resources(threads=512, threadgroup_bytes=40_000, scratch_bytes=0, registers=128)
    assert len(found.excess()) == 3
