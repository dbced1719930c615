"""The HTTP server: one stream of events from the engine, and dialects that translate it.

    run_server(port=8080)                # serves the default model until it is asked to end

What a request passes: `guard` (who asks, how much), the dialect's `decode`, `host` (which model), `generate`
(answers under way, as events), the dialect's encoder, `streaming` (frames, or their fold).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_dspark.serving.run import run_server

__all__ = ["run_server"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlx_dspark.serving import run

    return run.run_server
