"""The `mlx-dspark` command: finds the command, runs it, and turns errors into sentences and exit codes.

Exit codes: 0 done, 2 the user's to mend, 130 interrupted, 141 nobody reads standard output any more.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Group, Parameter

from mlx_dspark._version import __version__
from mlx_dspark.cli.flags import with_flags
from mlx_dspark.cli.mistakes import explained
from mlx_dspark.cli.ranks import follows, refuse_ranks, report
from mlx_dspark.cli.show import Progress, note, noted_warnings
from mlx_dspark.cli.streams import ReaderGone, fill_closed_descriptors, guarded
from mlx_dspark.foundation.agent_settings import ConnectSettings, LaunchSettings
from mlx_dspark.foundation.bench_settings import BenchmarkSettings, RaceSettings
from mlx_dspark.foundation.calibrate_settings import CalibrateSettings
from mlx_dspark.foundation.doctor_settings import DoctorSettings, InspectSettings, ServerToCheck
from mlx_dspark.foundation.errors import DsparkError, UsageError
from mlx_dspark.foundation.installing import no_back_end
from mlx_dspark.foundation.kernel_settings import KernelSettings
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import (
    AskSettings,
    GenerateSettings,
    LoadSettings,
    TrainSettings,
    stray_variables,
)

ONE_ANSWER = "max_batch"
"""The knob that a command which makes one answer at a time has no use for."""
NAME_THE_MODEL = ("train", "export")
"""The commands that take a model from the command line only."""
COMPARED = ("mode", "max_draft")
"""The knobs that a command which compares ways to draft has others for."""
MEASURED = (ONE_ANSWER, "max_draft", "calibrate")
"""The knobs that `calibrate` has no use for."""
_TOP_LEVEL_FLAGS = ("--help", "-h", "--version")

ACCEPT_LENGTH = (
    "Accept length: tokens committed per verify round, the target's own included; 1 when no draft was "
    "accepted, - when nothing was drafted. Cap: the most drafts allowed in a round; the closing line tells "
    "that of most rounds that drafted and, where others had another, the least and the greatest."
)

_EPILOGUE = 'mlx-dspark --prompt "..." is short for generate. `mlx-dspark COMMAND --help` lists its flags.'
_FOR_THE_AGENT = "What the agent gets; put -- in front of its own flags."
_FLAGS_EPILOGUE = (
    "The flags of model and answer can be set in the environment: MLX_DSPARK_MODEL for --model, and so on. "
    f"{ACCEPT_LENGTH}"
)


def main() -> None:
    """Run the command line and leave with its exit code."""
    fill_closed_descriptors()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with guarded(), noted_warnings():
            return _reported(arguments)
    except ReaderGone:
        return 141


def _reported(arguments: Sequence[str]) -> int:
    """As `run`, with the streams already guarded."""
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except DsparkError as error:
        report(error, arguments)
        return error.exit_code
    except ImportError as error:
        if (told := no_back_end(error)) is None:
            raise
        report(told)
        return told.exit_code
    except KeyboardInterrupt:
        note("")
        return 130


def _dispatch(arguments: Sequence[str]) -> int:
    flat = bool(arguments) and arguments[0].startswith("-") and arguments[0] not in _TOP_LEVEL_FLAGS
    tokens = ["generate", *arguments] if flat else list(arguments)
    app = build_app()
    if tokens and tokens[0] in app and not follows() and not {*_TOP_LEVEL_FLAGS} & {*tokens}:
        for stray in _strays(tokens[0]):
            note(f"mlx-dspark: {stray}")
    try:
        code = app(_joined(tokens), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise explained(error, {name: _flags_of(app, name) for name in app if name[0] != "-"}) from error
    return code if isinstance(code, int) else 0


def _flags_of(app: App, command: str) -> set[str]:
    return {flag for argument in app[command].assemble_argument_collection() for flag in argument.names}


def _strays(command: str) -> list[str]:
    """What to say of variables that `command` does not read."""
    unread = () if command == "serve" else (ONE_ANSWER,)
    if command in NAME_THE_MODEL:
        unread = (*unread, "model")
    return stray_variables(
        unused=unread,
        also=[knob.env for section in (ServeSettings, ConnectSettings) for knob in section.knobs()],
    )


def _joined(tokens: Sequence[str]) -> list[str]:
    """The same command line with `--flag -` as `--flag=-`: cyclopts takes a lone dash for another option."""
    joined: list[str] = []
    for token in tokens:
        if (
            token == "-"
            and "--" not in joined
            and joined
            and joined[-1].startswith("--")
            and "=" not in joined[-1]
        ):
            joined[-1] += "=-"
        else:
            joined.append(token)
    return joined


def build_app() -> App:
    """Every command with its flags. Nothing heavy is imported until a command runs."""
    from mlx_dspark.cli.agents import claude, opencode, pi
    from mlx_dspark.cli.benchmark import benchmark
    from mlx_dspark.cli.calibrate import calibrate
    from mlx_dspark.cli.chat import chat
    from mlx_dspark.cli.demo import demo
    from mlx_dspark.cli.doctor import doctor
    from mlx_dspark.cli.generate import generate
    from mlx_dspark.cli.inspect import inspect
    from mlx_dspark.cli.kernels import UNUSED, kernels
    from mlx_dspark.cli.models import models, pull, rm
    from mlx_dspark.cli.race import race
    from mlx_dspark.cli.serve import serve
    from mlx_dspark.cli.train import train

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
    with_settings = {
        "generate": with_flags(generate, AskSettings, LoadSettings, GenerateSettings, without=(ONE_ANSWER,)),
        "chat": with_flags(
            chat, LoadSettings, GenerateSettings, without=(ONE_ANSWER, "logprobs", "chat_template")
        ),
        "serve": with_flags(serve, ServeSettings, LoadSettings),
        "demo": with_flags(demo, LoadSettings, without=(ONE_ANSWER,)),
        "benchmark": with_flags(benchmark, BenchmarkSettings, LoadSettings, without=(ONE_ANSWER, *COMPARED)),
        "race": with_flags(race, RaceSettings, LoadSettings, without=(ONE_ANSWER, *COMPARED)),
        "kernels": with_flags(kernels, KernelSettings, LoadSettings, without=UNUSED, positional=("model",)),
        "calibrate": with_flags(
            calibrate, CalibrateSettings, LoadSettings, without=MEASURED, positional=("model",)
        ),
    }
    for name, command in with_settings.items():
        app.command(command, name=name, help_epilogue=_FLAGS_EPILOGUE)
    for agent in (claude, pi, opencode):
        launching = with_flags(agent, ConnectSettings, LaunchSettings, rest=_FOR_THE_AGENT)
        app.command(launching, name=agent.__name__, help_epilogue="")
    app.command(with_flags(train, TrainSettings), name="train", help_epilogue="")
    looking = with_flags(inspect, InspectSettings, positional=("thing",))
    app.command(looking, name="inspect", help_epilogue="")
    app.command(with_flags(doctor, DoctorSettings, ServerToCheck), name="doctor", help_epilogue="")
    for plain in (export, models, pull, rm):
        app.command(plain, help_epilogue="")
    return app


def export(
    model: Annotated[
        str,
        Parameter(
            help="The short name smollm2-135m, a folder, a .gguf file, a hub repository, or "
            "gguf:owner/repository/file.gguf for one file of it."
        ),
    ],
    directory: Annotated[str, Parameter(name="DIR", help="The folder to write; it must be new or empty.")],
    /,
    *,
    trust_remote_code: Annotated[
        bool, Parameter(negative="", help="Let a model folder that carries Python code run it.")
    ] = False,
) -> int:
    """Write a model as a standard MLX model folder."""
    from mlx_dspark.catalog.checkpoint import load_checkpoint
    from mlx_dspark.catalog.export import check_destination, export_model
    from mlx_dspark.catalog.resolve import resolve_model
    from mlx_dspark.foundation.paths import default_cache_dir

    refuse_ranks("export")
    for name, given in (("MODEL", model), ("DIR", directory)):
        if not given:
            raise UsageError(f"{name} is empty.", "Name the model, then a folder that is new or empty.")
    folder = Path(directory).expanduser()
    check_destination(folder)
    progress = Progress()
    found = resolve_model(
        model, cache_dir=default_cache_dir(), trust_remote_code=trust_remote_code, progress=progress
    )
    checkpoint = load_checkpoint(found, progress=progress)
    export_model(checkpoint, folder)
    progress.clear()
    if checkpoint.requantized is not None:
        note(str(checkpoint.requantized))
    command = [_python(), "-m", "mlx_lm", "generate", "--model", str(folder), "--prompt", "Hello"]
    note(f"Wrote {folder}. Stock mlx-lm reads it: {shlex.join(command)}")
    return 0


def _python() -> str:
    """This Python as a command, shortened where it lies below the current folder."""
    program = Path(sys.executable)
    return str(program.relative_to(Path.cwd())) if program.is_relative_to(Path.cwd()) else str(program)
