"""`serve`: the HTTP server."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from mlx_dspark.cli.ranks import follow, follows
from mlx_dspark.cli.show import Progress, complain, note
from mlx_dspark.foundation.errors import EngineLost, UsageError
from mlx_dspark.foundation.installing import pip_install
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import LoadSettings

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def serve(settings: ServeSettings, loading: LoadSettings) -> int:
    """Serve a model over HTTP, in the ways of OpenAI's and Anthropic's APIs."""
    if follows():
        return follow(loading)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"The server needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed.",
            f"Install mlx-dspark with its extra: {pip_install('serve')}",
        )
    from mlx_dspark.serving.run import serve as run

    progress = Progress()

    def told(line: str) -> None:
        progress.clear()
        note(line)

    try:
        run(loading, settings, progress=progress, note=told)
    except EngineLost as error:
        complain(error)
        _leave(error.exit_code)
    return 0


def _leave(code: int) -> None:
    """End at once: the interpreter would wait for an engine that may never come back."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
