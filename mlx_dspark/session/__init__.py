"""The public face: load a model once, then ask it.

session = load("smollm2-135m")
for event in session.stream("Hi!"):     # typed events; Text events carry the answer
    ...
result = session.generate("Hi!")        # the same stream, folded
"""

from mlx_dspark.session.functions import (
    dflash_generate,
    greedy_generate,
    lookup_generate,
    speculative_generate,
)
from mlx_dspark.session.pair import load_dflash_pair, load_pair
from mlx_dspark.session.result import Result, SessionEvent, SourceCount
from mlx_dspark.session.session import Session, load

__all__ = [
    "Result",
    "Session",
    "SessionEvent",
    "SourceCount",
    "dflash_generate",
    "greedy_generate",
    "load",
    "load_dflash_pair",
    "load_pair",
    "lookup_generate",
    "speculative_generate",
]
