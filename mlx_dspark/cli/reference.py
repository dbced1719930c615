"""The reference page of the command line, written from the declared knobs.

python -m mlx_dspark.cli.reference          print the page, docs/reference/cli.md
"""

from __future__ import annotations

from collections.abc import Iterator

from mlx_dspark.cli.flags import negative_of
from mlx_dspark.foundation.knobs import Knob, Settings, Switch
from mlx_dspark.foundation.settings import AskSettings, GenerateSettings, LoadSettings

_OPENING = """\
# Command line

Written by `python -m mlx_dspark.cli.reference`; edit the declarations in `mlx_dspark/foundation/settings.py`.

| Command | What it does |
|---|---|
| `mlx-dspark generate` | answers one prompt; also the bare form `mlx-dspark --prompt "..."` |
| `mlx-dspark chat` | holds a conversation; Ctrl-C stops the answer, Ctrl-D leaves, `/help` lists the rest |
| `mlx-dspark export MODEL DIR` | writes a model as a standard MLX model folder |
| `mlx-dspark demo` | answers a prompt, then races plain against speculative decoding on it |
| `mlx-dspark --version`, `--help` | the version; every command |

`python -m mlx_dspark` is the same program. Text goes to standard output, everything else to standard error.
Exit codes: 0 done, 2 something that the message says how to mend, 130 interrupted.

A flag wins over the environment, the environment over the default. From Python the same names, with
underscores, are arguments of `load` (model and drafting), `Session.generate` and `Session.stream` (answer).
"""

_TAKEN_BY = {
    AskSettings: "`generate`",
    LoadSettings: "`generate`, `chat`",
    GenerateSettings: "`generate`, `chat` (there without `--logprobs` and `--chat-template`)",
}


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([_OPENING, *(_section(section, taken_by) for section, taken_by in _TAKEN_BY.items())])


def _section(section: type[Settings], taken_by: str) -> str:
    return "\n".join(_section_lines(section, taken_by)) + "\n"


def _section_lines(section: type[Settings], taken_by: str) -> Iterator[str]:
    yield f"## {section.group}\n\nTaken by {taken_by}.\n"
    yield "| Flag | Environment | Takes | Default | Meaning |"
    yield "|---|---|---|---|---|"
    for knob in section.knobs():
        cells = [
            _flags(knob),
            f"`{knob.env}`" if knob.env else "",
            _takes(knob),
            knob.shown_default,
            knob.about.help,
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flags(knob: Knob) -> str:
    negative = negative_of(knob)
    return f"`{knob.flag}`" + (f", `{negative}`" if negative else "")


def _takes(knob: Knob) -> str:
    return "" if isinstance(knob.kind, Switch) else knob.kind.want


if __name__ == "__main__":
    print(page(), end="")
