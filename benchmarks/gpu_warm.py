"""Have MLX compile its own quantized products for the shapes of the other benchmarks, side by side.

    python benchmarks/gpu_warm.py

MLX's CUDA back end compiles a product of 8 rows and more at its first use on a machine, some 40 seconds
each, and keeps it in a folder (MLX_PTX_CACHE_DIR names another). One after another that is minutes, in the
middle of whatever runs first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from os import cpu_count

import mlx.core as mx

ROWS = (8, 24, 64)
"""One for each size of tiles."""
HELD = (
    (4, 64, "bfloat16", 4096, 4096),
    (8, 64, "bfloat16", 4096, 4096),
    (4, 64, "bfloat16", 576, 576),
    (4, 32, "float16", 1536, 576),
    (4, 32, "float16", 576, 1536),
    (8, 32, "float16", 49152, 576),
)
"""Bits, group, type, outputs and inputs: of Qwen3-8B's shape, the shipped drafter and the default model."""


def multiply(bits: int, group: int, dtype: str, outputs: int, inputs: int, rows: int) -> None:
    kind = getattr(mx, dtype)
    held = mx.quantize(mx.random.normal((outputs, inputs)).astype(kind), group_size=group, bits=bits)
    x = mx.random.normal((rows, inputs)).astype(kind)
    mx.eval(mx.quantized_matmul(x, *held, transpose=True, group_size=group, bits=bits))


def in_a_process(asked: tuple[str, ...]) -> str:
    started = time.perf_counter()
    code = subprocess.run([sys.executable, __file__, "--one", *asked]).returncode
    return f"{' '.join(asked):<36}{time.perf_counter() - started:6.1f} s{'' if code == 0 else '  failed'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    one = parser.parse_args().one
    if one is not None:
        multiply(int(one[0]), int(one[1]), one[2], *map(int, one[3:]))
        return
    if not mx.cuda.is_available():
        parser.error("MLX's CUDA back end is not here, and no other compiles these: leave it out")
    asked = [tuple(map(str, (*held, rows))) for held, rows in product(HELD, ROWS)]
    pool = ThreadPoolExecutor(cpu_count() or 1)
    try:
        for line in pool.map(in_a_process, asked):
            print(line, flush=True)
    finally:
        pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    main()
