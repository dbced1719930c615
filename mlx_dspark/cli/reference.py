"""The reference page of the command line, written from the declared knobs.

python -m mlx_dspark.cli.reference          print the page, docs/reference/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_dspark.cli.flags import negative_of
from mlx_dspark.cli.main import ACCEPT_LENGTH, ONE_ANSWER
from mlx_dspark.foundation.agent_settings import ConnectSettings, LaunchSettings
from mlx_dspark.foundation.bench_settings import BenchmarkSettings, RaceSettings
from mlx_dspark.foundation.calibrate_settings import CalibrateSettings
from mlx_dspark.foundation.doctor_settings import DoctorSettings, InspectSettings, ServerToCheck
from mlx_dspark.foundation.kernel_settings import KernelSettings
from mlx_dspark.foundation.knobs import Knob, Settings, Switch
from mlx_dspark.foundation.serve_settings import ServeSettings
from mlx_dspark.foundation.settings import AskSettings, GenerateSettings, LoadSettings, TrainSettings
from mlx_dspark.session.result import Result

_OPENING = f"""\
# Command line

Written by `python -m mlx_dspark.cli.reference`; edit the declarations in `mlx_dspark/foundation/settings.py`.

| Command | What it does |
|---|---|
| `mlx-dspark generate` | answers one prompt; also the bare form `mlx-dspark --prompt "..."` |
| `mlx-dspark chat` | holds a conversation; Ctrl-C stops the answer, Ctrl-D leaves, `/help` lists the rest |
| `mlx-dspark serve` | answers over HTTP, as the APIs of OpenAI and Anthropic do ([how](../serving.md)) |
| `mlx-dspark claude` | starts Claude Code on a running server ([how](../agents.md)) |
| `mlx-dspark pi`, `mlx-dspark opencode` | starts pi, or OpenCode, in the same way |
| `mlx-dspark export MODEL DIR` | writes a model as a standard MLX model folder |
| `mlx-dspark demo` | answers a prompt, then races plain against speculative decoding on it |
| `mlx-dspark benchmark` | measures every way to draft against plain decoding ([how](../benchmark.md)) |
| `mlx-dspark race` | ways to draft side by side on one prompt, and whether they wrote the same |
| `mlx-dspark calibrate MODEL` | measures what drafts cost on this machine, and prints the curves |
| `mlx-dspark kernels MODEL` | which kernels it runs on here; `--check` tries all ([more](../kernels.md)) |
| `mlx-dspark inspect THING` | what a drafter or a model is, its [pair](../pairs.md), and if it would run |
| `mlx-dspark doctor` | checks of this machine, and with `--pair MODEL` of a pair and its acceptance |
| `mlx-dspark train` | makes a drafter for a model, from the model's own answers |
| `mlx-dspark models` | models that drafters are known for, and what fits here ([more](../models.md)) |
| `mlx-dspark models --local` | every model found on this machine, with its place |
| `mlx-dspark pull MODEL` | fetches a model, or with `--drafter` a drafter, and prints where it lies |
| `mlx-dspark rm MODEL` | takes a model out of the hub's cache, and nothing out of any other folder |
| `mlx-dspark --version`, `--help` | the version; every command |

`python -m mlx_dspark` is the same program. Text goes to standard output, everything else to standard error.
`export` takes `--trust-remote-code`, which lets a model folder that carries Python code run it, and `pull`
takes it to fetch one. `pull` takes `--no-memory-guard` too, `models` takes `--json`, and `rm` asks unless
it is given `--yes`.

| Exit code | Meaning |
|---|---|
| 0 | done |
| 2 | something that the message says how to mend |
| 70 | `serve`: the engine ended or delivered nothing for too long |
| 130 | interrupted with Ctrl-C |
| 141 | whoever read standard output has closed it, as in `mlx-dspark --help \\| head -1` |

A flag wins over the environment, the environment over the default. A switch in the environment is on as
`true`, `1`, `yes` or `on`, and off as `false`, `0`, `no` or `off`. From Python the same names, with
underscores, are arguments of `load` (model and drafting), `Session.generate` and `Session.stream` (answer);
`load` also takes `max_batch`, how many threads one session answers at once (1), and `run_server` those of the
server too. The variables are read by the
command line only; one that begins with `MLX_DSPARK_` and is none of these is told on standard error.

`MLX_DSPARK_CACHE_DIR` names the folder of the default model and of what was found out about machine and
models (`cpu-weights.json`, `kernels.json`, `faithful.json`, `calibration.json`), and is read from Python too;
without it that is `~/.cache/mlx_dspark`. Models of the hub are in the hub's own cache, which `HF_HOME` moves.
`MLX_DSPARK_MODEL_DIRS` names more folders of models, separated as in `PATH`, and is read from Python too.

The closing line counts rounds, forward passes of the target, and says how many of them read the prompt.
{ACCEPT_LENGTH} `context full` in place of `length` says that prompt and answer fill the model's context.
"""

_TAKEN_BY = {
    AskSettings: "`generate`",
    ServeSettings: "`serve`, together with `--max-batch` (1): most answers generated at once, as one batch",
    LoadSettings: (
        "`generate`, `chat`, `serve`, `demo` (there without `--mode baseline`), `calibrate` (there without "
        "`--mode baseline`, `--max-draft` and `--calibrate`), `benchmark` and `race` (there without `--mode` "
        "and `--max-draft`); `kernels` takes those of them that decide about kernels"
    ),
    GenerateSettings: "`generate`, `chat` (there without `--logprobs` and `--chat-template`)",
    ConnectSettings: "`claude`, `pi`, `opencode`",
    LaunchSettings: "`claude`, `pi`, `opencode`",
    CalibrateSettings: "`calibrate`",
    KernelSettings: "`kernels`",
    BenchmarkSettings: "`benchmark`",
    RaceSettings: "`race`",
    InspectSettings: "`inspect`",
    DoctorSettings: "`doctor`",
    ServerToCheck: "`doctor`",
    TrainSettings: "`train`",
}


def page() -> str:
    """The whole page as Markdown."""
    sections = [_section(section, taken_by) for section, taken_by in _TAKEN_BY.items()]
    return "\n".join([_OPENING, *sections, _json_fields()])


def _section(section: type[Settings], taken_by: str) -> str:
    return "\n".join(_section_lines(section, taken_by)) + "\n"


def _section_lines(section: type[Settings], taken_by: str) -> Iterator[str]:
    yield f"## {section.group}\n\nTaken by {taken_by}.\n"
    yield "| Flag | Environment | Takes | Default | Meaning |"
    yield "|---|---|---|---|---|"
    for knob in (knob for knob in section.knobs() if knob.name != ONE_ANSWER):
        cells = [
            _flags(knob),
            f"`{knob.env}`" if knob.env else "",
            _takes(knob),
            knob.shown_default,
            knob.about.help,
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _json_fields() -> str:
    """What `--json` prints, from the declarations of Result."""
    weights = "How the CPU back end holds the weights: `choice`, the `reason` for it, `timings` of the race."
    kernels = "The names of the kernels of ours that the model runs on, on a GPU."
    about = {"model": "The model's name.", "weights": weights, "kernels": kernels}
    meanings = about | Result.meanings()
    rows = [f"| `{name}` | {meaning} |" for name, meaning in meanings.items()]
    return "\n".join(["## Fields of `generate --json`\n", "| Field | Meaning |", "|---|---|", *rows, ""])


def _flags(knob: Knob) -> str:
    negative = negative_of(knob)
    return f"`{knob.flag}`" + (f", `{negative}`" if negative else "")


def _takes(knob: Knob) -> str:
    return "on or off" if isinstance(knob.kind, Switch) else knob.kind.want


if __name__ == "__main__":
    print(page(), end="")
