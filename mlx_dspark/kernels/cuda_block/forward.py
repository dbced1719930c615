"""The kernel as a drafter's forward: which drafters it takes, and that it is right on this device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any, Protocol

import mlx.core as mx

from mlx_dspark.kernels.base import Source
from mlx_dspark.kernels.cuda_common.build import File, templated

THREADS = 256

BLOCKS = 64
"""Blocks of a launch: all must run at once, since they wait for each other."""

TAIL = 32
"""Most observed positions that may wait to be absorbed into the context; they are read anew by each call."""

MOST_NUMBERS = 1 << 25
"""Drafters of more weights are bound by reading them, and not by launches."""

_HALVES = (mx.float16, mx.bfloat16)
_TOLERANCE = 3e-2
_MARKS = count(random.SystemRandom().randrange(1, 1 << 30))


@dataclass(frozen=True)
class Dimensions:
    """What the kernel is compiled for; `features` and `hidden` are the widths of its inputs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    wide: int
    features: int
    eps: float
    scale: float
    causal: bool

    def refusal(self) -> str:
        """Why the kernel does not take such a drafter; empty where it does."""
        if self.head_dim % 64 or self.hidden % 64 or self.wide % 64 or self.features % 64:
            return "a width is no multiple of 64"
        if self.heads % self.kv_heads:
            return "the heads do not share keys evenly"
        return ""

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def projected(self) -> int:
        return self.queries + 2 * self.keys

    def scratch(self, slots: int, blocks: int) -> int:
        """Floats between the phases, and a flag of every block for each meeting."""
        context = TAIL * (self.hidden + self.layers * 2 * self.keys)
        streams = (self.layers + 1) * self.hidden
        each = self.projected + self.queries + self.hidden + self.wide
        meetings = 2 + 5 * self.layers
        return context + slots * (streams + self.layers * each) + meetings * blocks


class Layer(Protocol):
    """A layer's matrices and norms, as `weights_of` reads them from a drafter's."""

    @property
    def matrices(self) -> Sequence[Source | None]:
        """Queries, keys, values, output, gate, up, down."""
        ...

    @property
    def norms(self) -> Sequence[mx.array]:
        """Before attention and before the MLP `[hidden]`, of queries and of keys `[head_dim]`."""
        ...


@dataclass(frozen=True)
class Weights:
    """All matrices of a drafter one after another, and all norms: what every call reads."""

    words: mx.array
    scales: mx.array | None
    biases: mx.array | None
    norms: mx.array
    bits: int
    group: int
    dtype: mx.Dtype

    @property
    def arrays(self) -> list[mx.array]:
        packed = [self.scales, self.biases] if self.scales is not None else []
        return [self.words, *(each for each in packed if each is not None), self.norms]


def weights_of(
    fusion: Source | None,
    layers: Sequence[Layer],
    norms: Sequence[mx.array],
    frequencies: Sequence[float],
) -> Weights | None:
    """The weights in the kernel's order; None for forms that it does not read.

    `norms` are those of the fused features and of the last stream; `frequencies` turn each pair of a head.
    """
    sources = [fusion, *(source for layer in layers for source in layer.matrices)]
    held = [source for source in sources if source is not None]
    if len(held) < len(sources) or sum(source.weights for source in held) > MOST_NUMBERS:
        return None
    first = held[0]
    dtype = first.weight.dtype if first.scales is None else first.scales.dtype
    forms = {(each.bits, each.group_size, each.mode, each.biases is None) for each in held}
    if len(forms) > 1 or dtype not in _HALVES or not _read(first):
        return None
    scales = biases = None
    if first.bits:
        scales = mx.concatenate([_flat(each.scales) for each in held])
        biases = mx.concatenate([_flat(each.biases) for each in held])
    words = mx.concatenate([each.weight.flatten().view(mx.uint32) for each in held])
    flat = [*norms, mx.array(list(frequencies)), *(norm for layer in layers for norm in layer.norms)]
    numbers = mx.concatenate([each.flatten().astype(mx.float32) for each in flat])
    found = Weights(words, scales, biases, numbers, first.bits or 16, first.group_size or 8, dtype)
    mx.eval(found.arrays)
    return found


def _read(source: Source) -> bool:
    if not source.bits:
        return True
    return source.bits in (4, 8) and source.mode == "affine" and source.biases is not None


def _flat(array: mx.array | None) -> mx.array:
    assert array is not None
    return array.flatten()


@dataclass(frozen=True)
class Context:
    """A row's context as a call reads it. `keys` and `values` `[1, kv_heads, capacity, head_dim]` per layer
    hold positions `begin` to `begin + seen`; `features` `[tail, features]` are of the positions after them
    (None: of none), and the block begins at `position`."""

    keys: Sequence[mx.array]
    values: Sequence[mx.array]
    begin: int
    seen: int
    features: mx.array | None
    position: int


@dataclass(frozen=True)
class BlockForward:
    """A block's embeddings to its normed hidden states, in one launch."""

    dimensions: Dimensions
    weights: Weights
    blocks: int = BLOCKS

    def __call__(self, embedded: mx.array, context: Context) -> mx.array:
        """`[1, slots, hidden]` to the same, in the weights' dtype."""
        shape, slots = self.dimensions, embedded.shape[1]
        tail = 0 if context.features is None else context.features.shape[0]
        assert tail <= TAIL
        capacity = context.keys[0].shape[2]
        numbers = [context.seen, context.begin, tail, context.position, capacity, next(_MARKS) & 0x7FFFFFFF]
        features = context.features
        if features is None:
            features = _nothing(shape.features, self.weights.dtype)
        out = _kernel(shape, self.weights.bits, self.weights.group, slots)(
            inputs=[
                features,
                embedded.astype(self.weights.dtype),
                mx.array(numbers, mx.int32),
                *self.weights.arrays,
                *context.keys,
                *context.values,
            ],
            template=[("T", self.weights.dtype)],
            grid=(self.blocks * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(1, slots, shape.hidden), (shape.scratch(slots, self.blocks),)],
            output_dtypes=[self.weights.dtype, mx.float32],
        )
        return out[0]

    def empty(self) -> mx.array:
        """Keys or values of a layer whose context is empty."""
        return _no_context(self.dimensions.kv_heads, self.dimensions.head_dim, self.weights.dtype)


def near(got: mx.array, wanted: mx.array) -> bool:
    """Whether the kernel's hidden states are those of the model's own operations, up to rounding."""
    apart = mx.max(mx.abs(got.astype(mx.float32) - wanted.astype(mx.float32)))
    return bool((apart <= _TOLERANCE * mx.max(mx.abs(wanted.astype(mx.float32)))).item())


def names(layers: int, packed: bool) -> list[str]:
    """The kernel's inputs, in their order."""
    held = ["words", *(["scales", "biases"] if packed else []), "norms"]
    buffers = [f"{kind}_{layer}" for kind in ("keys", "values") for layer in range(layers)]
    return ["features", "embedded", "at", *held, *buffers]


def defines(shape: Dimensions, bits: int, group: int, slots: int) -> str:
    """What is known before compiling; follows the header."""
    numbers = {
        "LAYERS": shape.layers,
        "HIDDEN": shape.hidden,
        "HEADS": shape.heads,
        "KV_HEADS": shape.kv_heads,
        "D": shape.head_dim,
        "WIDE": shape.wide,
        "FEATURES": shape.features,
        "SLOTS": slots,
        "TAIL": TAIL,
        "BITS": bits,
        "GROUP": group,
        "CAUSAL": int(shape.causal),
        "EPS": f"{shape.eps!r}f",
        "SCALE": f"{shape.scale!r}f",
        "KEYS": ", ".join(f"keys_{layer}" for layer in range(shape.layers)),
        "VALUES": ", ".join(f"values_{layer}" for layer in range(shape.layers)),
    }
    if bits == 16:
        numbers |= {"scales": "static_cast<const T*>(nullptr)", "biases": "static_cast<const T*>(nullptr)"}
    return "".join(f"#define {name} {value}\n" for name, value in numbers.items())


@cache
def _kernel(shape: Dimensions, bits: int, group: int, slots: int) -> Any:
    header = [File("cuda_block", "parts.cuh"), defines(shape, bits, group, slots)]
    inputs = names(shape.layers, bits != 16)
    return templated("block_forward", header, File("cuda_block", "forward.cu"), inputs, ["hidden", "scratch"])


@cache
def _nothing(width: int, dtype: mx.Dtype) -> mx.array:
    return _zeros((1, width), dtype)


@cache
def _no_context(kv_heads: int, head_dim: int, dtype: mx.Dtype) -> mx.array:
    return _zeros((1, kv_heads, 1, head_dim), dtype)


def _zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    made = mx.zeros(shape, dtype)
    mx.eval(made)
    return made
