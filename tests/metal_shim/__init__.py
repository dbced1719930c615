"""Metal kernels of ours run on a CPU: the source is the one MLX generates, lanes are fibers that meet at
barriers and SIMD-group operations.

`run(call)` runs what `call(metal_kernel)` launches; `captured(call)` only records it, for the gates.
"""

from tests.metal_shim.capture import Buffer, Launch, captured
from tests.metal_shim.errors import Fault, NotMetal, ShimError
from tests.metal_shim.running import SCHEDULES, Limits, Mode, Ran, Run, Traffic, run

__all__ = [
    "SCHEDULES",
    "Buffer",
    "Fault",
    "Launch",
    "Limits",
    "Mode",
    "NotMetal",
    "Ran",
    "Run",
    "ShimError",
    "Traffic",
    "captured",
    "run",
]
