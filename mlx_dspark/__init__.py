"""Lossless speculative decoding for MLX.

    import mlx_dspark

    session = mlx_dspark.load()                      # a small default model
    print(session.generate("Why is the sky blue?").text)

Importing this is cheap: what a name needs is imported when the name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_dspark._version import __version__

if TYPE_CHECKING:
    from mlx_dspark.foundation.errors import DsparkError
    from mlx_dspark.serving.run import run_server
    from mlx_dspark.session import (
        Result,
        Session,
        dflash_generate,
        greedy_generate,
        load,
        load_dflash_pair,
        load_pair,
        lookup_generate,
        speculative_generate,
    )

__all__ = [
    "DsparkError",
    "Result",
    "Session",
    "__version__",
    "dflash_generate",
    "greedy_generate",
    "load",
    "load_dflash_pair",
    "load_pair",
    "lookup_generate",
    "run_server",
    "speculative_generate",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"DsparkError": "foundation.errors", "run_server": "serving.run"}.get(name, "session")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
