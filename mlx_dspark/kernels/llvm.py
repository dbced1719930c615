"""Small functions in LLVM vectors, compiled in the process: what the CPU kernels are written in.

A kernel states its vectors and loops once; LLVM lowers them to what the processor has. It needs llvmlite and
knows no MLX.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

# llvmlite has no type annotations.
Type = Any
Value = Any

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
POINTER = I8.as_pointer()

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def host_features() -> dict[str, bool]:
    """Processor features by LLVM's names; empty where LLVM cannot tell."""
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}


LANES = 16 if host_features().get("avx512f") else 8
FLOATS = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)


class Emitter:
    """One function being written: `void name(pointers..., 64-bit integers...)`.

    `pointers` and `integers` give the argument names; read them as attributes of `arguments`.
    """

    def __init__(self, name: str, pointers: Sequence[str], integers: Sequence[str]) -> None:
        self.module = ir.Module(name)
        kinds = [POINTER] * len(pointers) + [I64] * len(integers)
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), kinds), name)
        self.arguments: dict[str, Value] = dict(zip((*pointers, *integers), self.function.args, strict=True))
        self.builder: Any = ir.IRBuilder(self.function.append_basic_block("entry"))
        self._signature = ctypes.CFUNCTYPE(
            None, *[ctypes.c_void_p] * len(pointers), *[ctypes.c_int64] * len(integers)
        )

    # -- control and memory ------------------------------------------------------------------------------

    @contextmanager
    def loop(self, start: Value | int, stop: Value | int, step: int = 1) -> Iterator[Value]:
        """`for index in range(start, stop, step)`; yields the index."""
        builder = self.builder
        slot = self.local(I64)
        builder.store(integer(start), slot)
        head, body, done = (self.function.append_basic_block(name) for name in ("head", "body", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.load(slot)
        builder.cbranch(builder.icmp_signed("<", index, integer(stop)), body, done)
        builder.position_at_end(body)
        yield index
        builder.store(builder.add(index, integer(step)), slot)
        builder.branch(head)
        builder.position_at_end(done)

    def local(self, kind: Type, value: Value | None = None) -> Value:
        """A variable of the function, set here to `value`; the optimiser keeps it in a register."""
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(kind)
        if value is not None:
            self.builder.store(value, slot)
        return slot

    def at(self, base: Value, kind: Type, index: Value | int) -> Value:
        """Address of element `index` of an array of `kind` that begins at `base`."""
        typed = self.builder.bitcast(base, kind.as_pointer())
        return self.builder.gep(typed, [integer(index)])

    def load(self, base: Value, kind: Type, index: Value | int = 0, lanes: int = 0) -> Value:
        """Element `index` of `kind`, or a vector of `lanes` elements from there, without alignment."""
        place = self.at(base, kind, index)
        if lanes:
            place = self.builder.bitcast(place, ir.VectorType(kind, lanes).as_pointer())
        return self.builder.load(place, align=1)

    def store(self, value: Value, base: Value, kind: Type, index: Value | int = 0) -> None:
        place = self.builder.bitcast(self.at(base, kind, index), value.type.as_pointer())
        self.builder.store(value, place, align=1)

    # -- arithmetic --------------------------------------------------------------------------------------

    def sum_of(self, *terms: Value | int) -> Value:
        total = integer(terms[0])
        for term in terms[1:]:
            total = self.builder.add(total, integer(term))
        return total

    def product_of(self, *factors: Value | int) -> Value:
        total = integer(factors[0])
        for factor in factors[1:]:
            total = self.builder.mul(total, integer(factor))
        return total

    def broadcast(self, value: Value) -> Value:
        kind = ir.VectorType(value.type, LANES)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        return self.builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))

    def intrinsic(self, name: str, result: Type, *arguments: Value, flags: Sequence[str] = ()) -> Value:
        known = self.module.globals.get(name)
        if known is None:
            kind = ir.FunctionType(result, [argument.type for argument in arguments])
            known = ir.Function(self.module, kind, name)
        return self.builder.call(known, arguments, fastmath=flags)

    def multiply_add(self, left: Value, right: Value, addend: Value) -> Value:
        return self.intrinsic(f"llvm.fmuladd.v{LANES}f32", FLOATS, left, right, addend)

    def add_lanes(self, vector: Value) -> Value:
        """Sum of the lanes, added pairwise."""
        start = ir.Constant(F32, -0.0)
        return self.intrinsic(f"llvm.vector.reduce.fadd.v{LANES}f32", F32, start, vector, flags=("reassoc",))

    def largest_lane(self, vector: Value) -> Value:
        return self.intrinsic(f"llvm.vector.reduce.fmax.v{LANES}f32", F32, vector, flags=("nnan",))

    def exp(self, x: Value) -> Value:
        """e to the x per lane, within 2 units in the last place; beyond the range of float32 it saturates.

        2^n times a polynomial in the rest r, |r| <= ln(2) / 2, as in the Cephes library's expf.
        """
        builder = self.builder
        x = self.intrinsic(f"llvm.minnum.v{LANES}f32", FLOATS, x, floats(88.0))
        x = self.intrinsic(f"llvm.maxnum.v{LANES}f32", FLOATS, x, floats(-87.0))
        whole = self.intrinsic(f"llvm.rint.v{LANES}f32", FLOATS, builder.fmul(x, floats(1.44269504088896341)))
        rest = self.multiply_add(whole, floats(-0.693359375), x)
        rest = self.multiply_add(whole, floats(2.12194440e-4), rest)
        series = floats(1.9875691500e-4)
        for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            series = self.multiply_add(series, rest, floats(term))
        series = self.multiply_add(series, builder.fmul(rest, rest), builder.fadd(rest, floats(1.0)))
        exponent = builder.add(builder.fptosi(whole, INTS), ir.Constant(INTS, [127] * LANES))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(INTS, [23] * LANES)), FLOATS)
        return builder.fmul(series, power)

    def compile(self) -> Callable[..., None]:
        """The finished function. Calls release the interpreter lock; pointers are passed as integers."""
        self.builder.ret_void()
        return _compile(str(self.module), self.function.name, self._signature)


def integer(value: Value | int) -> Value:
    return ir.Constant(I64, value) if isinstance(value, int) else value


def floats(value: float) -> ir.Constant:
    """A vector with `value` in every lane."""
    return ir.Constant(FLOATS, [value] * LANES)


_ENGINES: list[llvm.ExecutionEngine] = []


def _compile(text: str, name: str, signature: type) -> Callable[..., None]:
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=",".join(f"{'+' if on else '-'}{key}" for key, on in sorted(host_features().items())),
        opt=3,
    )
    module = llvm.parse_assembly(text)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    return signature(engine.get_function_address(name))
