"""The number formats of GGUF matrices, as MLX's affine quantization in groups of 32.

Both store `scale * q + bias`, so where a format has one scale for 32 weights its blocks are only repacked:

| blocks            | weight                       | held in MLX as                          |
|-------------------|------------------------------|-----------------------------------------|
| Q4_0              | d * (q - 8)                  | 4 bits, scale d, bias -8 d              |
| Q4_1              | d * q + m                    | 4 bits, scale d, bias m                 |
| Q5_0              | d * (q - 16)                 | 8 bits, scale d, bias -16 d             |
| Q5_1              | d * q + m                    | 8 bits, scale d, bias m                 |
| Q8_0              | d * q, q in -128..127        | 8 bits of q + 128, scale d, bias -128 d |
| Q4_K, Q5_K        | (d * s) * q - (dmin * m)     | 4 or 8 bits, scale d * s, bias -dmin * m|

d, m and dmin are float16, s and m of Q4_K and Q5_K integers below 64. Their products are exact in float32 and
rounded where scales are float16. Every other format is dequantized and quantized again (`REQUANTIZED_BITS`).

Block layouts: ggml-quants of https://github.com/ggml-org/ggml, as in the `gguf` package's `gguf.quants`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as GGMLType
from gguf.quants import Q4_K

GROUP = 32

REQUANTIZED_BITS = 8
"""The width of weights that have no exact place on an affine grid over 32 of them.

A block of Q6_K, Q3_K or Q2_K scales every 16 weights by themselves and one of the IQ formats draws from a
codebook, so 32 weights share no grid, and at the file's own width MLX's rounding would lose as much again as
the file has. With 8 bits it loses a small part of that. The price is memory: 9 bits a weight with float16
scales, 10 with float32 ones. 5-bit grids take 8 bits too, since the CPU kernels hold 4 and 8.
"""


class Affine(NamedTuple):
    """`codes` uint8 `[rows, columns]` below 2**bits; `scales` and `biases` float32 `[rows, columns / 32]`."""

    codes: np.ndarray
    scales: np.ndarray
    biases: np.ndarray


class Grid(NamedTuple):
    """How one block type reads as affine groups of 32 weights.

    `read` takes bytes `[rows, bytes]`. `half` says that scales and biases are exact in float16.
    """

    bits: int
    read: Callable[[np.ndarray], Affine]
    half: bool = True


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 4 or 8 bits as MLX's words: uint32 `[rows, columns * bits / 32]`, the first code lowest."""
    packed = codes if bits == 8 else codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(packed).view(np.uint32)


def _q4_0(data: np.ndarray) -> Affine:
    """18 bytes: d, then 16 bytes of nibbles that stand for q + 8."""
    blocks = _blocks(data, 18)
    scales = _halves(blocks[..., :2])
    return _affine(_nibbles(blocks[..., 2:]), scales, scales * np.float32(-8))


def _q4_1(data: np.ndarray) -> Affine:
    """20 bytes: d and m, then 16 bytes of nibbles."""
    blocks = _blocks(data, 20)
    return _affine(_nibbles(blocks[..., 4:]), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q5_0(data: np.ndarray) -> Affine:
    """22 bytes: d, 32 fifth bits, then 16 bytes of nibbles; together they stand for q + 16."""
    blocks = _blocks(data, 22)
    scales = _halves(blocks[..., :2])
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _affine(codes, scales, scales * np.float32(-16))


def _q5_1(data: np.ndarray) -> Affine:
    """24 bytes: d and m, 32 fifth bits, then 16 bytes of nibbles."""
    blocks = _blocks(data, 24)
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _affine(codes, _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q8_0(data: np.ndarray) -> Affine:
    """34 bytes: d, then 32 signed bytes; flipping the top bit adds 128."""
    blocks = _blocks(data, 34)
    scales = _halves(blocks[..., :2])
    return _affine(blocks[..., 2:] ^ np.uint8(0x80), scales, scales * np.float32(-128))


def _q4_k(data: np.ndarray) -> Affine:
    """144 bytes for 256 weights: d, dmin, 12 bytes of s and m, then 32 bytes of nibbles for every 64."""
    blocks = _blocks(data, 144)
    return _affine(_nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)), *_k_scales(blocks))


def _q5_k(data: np.ndarray) -> Affine:
    """176 bytes for 256 weights: as Q4_K, with 32 bytes of fifth bits before the nibbles.

    Bit g of fifth byte i belongs to weight i of group g.
    """
    blocks = _blocks(data, 176)
    fifth = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little").swapaxes(-1, -2)
    nibbles = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32))
    codes = nibbles.reshape(fifth.shape) | (fifth << np.uint8(4))
    return _affine(codes, *_k_scales(blocks))


GRIDS = {
    GGMLType.Q4_0: Grid(4, _q4_0),
    GGMLType.Q4_1: Grid(4, _q4_1),
    GGMLType.Q5_0: Grid(8, _q5_0),
    GGMLType.Q5_1: Grid(8, _q5_1),
    GGMLType.Q8_0: Grid(8, _q8_0),
    GGMLType.Q4_K: Grid(4, _q4_k, half=False),
    GGMLType.Q5_K: Grid(8, _q5_k, half=False),
}


def _blocks(data: np.ndarray, size: int) -> np.ndarray:
    return data.reshape(data.shape[0], -1, size)


def _affine(codes: np.ndarray, scales: np.ndarray, biases: np.ndarray) -> Affine:
    rows = codes.shape[0]
    return Affine(*(np.ascontiguousarray(part.reshape(rows, -1)) for part in (codes, scales, biases)))


def _halves(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """The low nibbles of a run of bytes come before its high ones."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=-1)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and biases `[rows, blocks, 8]` of Q4_K and Q5_K blocks."""
    d, dmin = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    scale, least = (
        part.reshape(*d.shape, 8).astype(np.float32)
        for part in Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    )
    return d[..., None] * scale, -(dmin[..., None] * least)
