"""The `mlx-dspark` command: finds the command, runs it, and turns errors into sentences and exit codes.

Exit codes: 0 done, 2 the user's to mend, 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Group, Parameter

from mlx_dspark._version import __version__
from mlx_dspark.cli.flags import with_flags
from mlx_dspark.cli.show import Progress, complain, note
from mlx_dspark.foundation.errors import DsparkError
from mlx_dspark.foundation.settings import AskSettings, GenerateSettings, LoadSettings

_TOP_LEVEL_FLAGS = ("--help", "-h", "--version")

_EPILOGUE = (
    'mlx-dspark --prompt "..." is short for generate. `mlx-dspark COMMAND --help` lists its flags, '
    "and those of model and answer can be set in the environment: MLX_DSPARK_MODEL for --model, and so on."
)


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return _dispatch(arguments)
    except CycloptsError as error:
        error.verbose = False
        note(f"mlx-dspark: {error} `mlx-dspark{_command_of(error)} --help` lists what there is.")
        return 2
    except DsparkError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        note("")
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(arguments: Sequence[str]) -> int:
    flat = bool(arguments) and arguments[0].startswith("-") and arguments[0] not in _TOP_LEVEL_FLAGS
    tokens = ["generate", *arguments] if flat else list(arguments)
    code = build_app()(_joined(tokens), exit_on_error=False, print_error=False, result_action="return_value")
    return code if isinstance(code, int) else 0


def _joined(tokens: Sequence[str]) -> list[str]:
    """The same command line with `--flag -` as `--flag=-`: cyclopts takes a lone dash for another option."""
    joined: list[str] = []
    for token in tokens:
        if token == "-" and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += "=-"
        else:
            joined.append(token)
    return joined


def build_app() -> App:
    """Every command with its flags. Nothing heavy is imported until a command runs."""
    from mlx_dspark.cli.chat import chat
    from mlx_dspark.cli.demo import demo
    from mlx_dspark.cli.generate import generate

    app = App(
        name="mlx-dspark",
        help="Lossless speculative decoding for MLX: the model's own text, sooner.",
        help_epilogue=_EPILOGUE,
        help_format="plaintext",
        version=f"mlx-dspark {__version__}",
        version_flags=["--version"],
        group_commands=Group("Commands", sort_key=0),
        suppress_keyboard_interrupt=False,
    )
    app["--help"].group = app["--version"].group = "Options"
    app.command(with_flags(generate, AskSettings, LoadSettings, GenerateSettings), name="generate")
    app.command(
        with_flags(chat, LoadSettings, GenerateSettings, without=("logprobs", "chat_template")), name="chat"
    )
    app.command(export, name="export")
    app.command(demo, name="demo")
    return app


def export(
    model: Annotated[str, Parameter(help="A short name, a folder, or a repository of the hub.")],
    folder: Annotated[Path, Parameter(name="DIR", help="The folder to write; it must be new or empty.")],
    /,
    *,
    trust_remote_code: Annotated[
        bool, Parameter(negative="", help="Let a model folder that carries Python code run it.")
    ] = False,
) -> int:
    """Write a model as a standard MLX model folder."""
    from mlx_dspark.catalog.checkpoint import load_checkpoint
    from mlx_dspark.catalog.export import export_model
    from mlx_dspark.catalog.resolve import resolve_model
    from mlx_dspark.foundation.paths import default_cache_dir

    progress = Progress()
    found = resolve_model(
        model, cache_dir=default_cache_dir(), trust_remote_code=trust_remote_code, progress=progress
    )
    export_model(load_checkpoint(found, progress=progress), folder)
    progress.clear()
    note(f"Wrote {folder}. `mlx_lm.generate --model {folder}` reads it.")
    return 0


def _command_of(error: CycloptsError) -> str:
    return "".join(f" {name}" for name in error.command_chain or ())
