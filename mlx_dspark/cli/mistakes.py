"""What the command-line parser refuses, in this program's words."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

from cyclopts import CycloptsError
from cyclopts.exceptions import (
    CoercionError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from mlx_dspark.foundation.errors import UsageError
from mlx_dspark.foundation.knobs import shown, suggestion
from mlx_dspark.foundation.settings import LoadSettings


def explained(error: CycloptsError, commands: Mapping[str, Collection[str]]) -> UsageError:
    """One sentence and a next step for a command line that does not parse; `commands` are the known ones with
    their flags."""
    chain = "".join(f" {name}" for name in error.command_chain or ())
    help_hint = f"`mlx-dspark{chain} --help` lists what there is."
    match error:
        case UnknownCommandError(unused_tokens=[word, *_]):
            return UsageError(
                f"There is no command {shown(word)}.", suggestion(word, list(commands)) or _ask(word)
            )
        case UnusedCliTokensError(unused_tokens=[word, *_]):
            advice = _ask(word) if chain in ("", " generate") else help_hint
            if chain in (" benchmark", " race"):
                advice = f"Commas keep the values of one flag together, as in --caps derived,3. {advice}"
            return UsageError(f"{shown(word)} belongs to no flag.", advice)
        case UnknownOptionError():
            return _unknown_flag(error, help_hint, commands)
        case MissingArgumentError():
            return _missing(error, help_hint)
        case CoercionError(token=token) if token is not None:
            called = token.keyword or "the value"
            return UsageError(
                f"{called} is {shown(token.value)}, which is not a value it takes.", f"Give {_wanted(error)}."
            )
        case RepeatArgumentError(token=token):
            return _repeated(error, token.keyword or "")
        case _:
            error.verbose = False
            return UsageError(str(error), help_hint)


def _ask(words: str) -> str:
    quoted = shlex.quote(words) if set(words) & set('"$`\\!') else f'"{words}"'
    return f"To ask something, write: mlx-dspark --prompt {quoted}"


def _unknown_flag(
    error: UnknownOptionError, help_hint: str, commands: Mapping[str, Collection[str]]
) -> UsageError:
    name = (error.token.keyword or error.token.value).partition("=")[0]
    known = [flag for argument in error.argument_collection if argument.parse for flag in argument.names]
    owners = [command for command, flags in commands.items() if name in flags]
    if owners:
        python = " and, from Python, to load()" if name in _of_load() else ""
        return UsageError(
            f"There is no flag {name} here.", f"It belongs to {_listed(owners)}{python}. {help_hint}"
        )
    return UsageError(f"There is no flag {name} here.", suggestion(name, known) or help_hint)


def _of_load() -> list[str]:
    return [knob.flag for knob in LoadSettings.knobs()]


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _repeated(error: CycloptsError, flag: str) -> UsageError:
    name = flag.removeprefix("--").removeprefix("no-")
    other = f"--{name}" if flag.startswith("--no-") else f"--no-{name}"
    if other in (error.root_input_tokens or ()):
        return UsageError(f"{other} and {flag} are both given.", "Give one of the two.")
    return UsageError(f"{flag} is given more than once.", "Give it once.")


def _missing(error: MissingArgumentError, help_hint: str) -> UsageError:
    argument = error.argument
    name = error.keyword or (argument.name if argument is not None else "")
    if name.startswith("-"):
        return UsageError(
            f"{name} is given without a value.", f"Write {name}=VALUE; so may a value begin with a dash."
        )
    return UsageError(f"{name} is missing.", help_hint)


def _wanted(error: CycloptsError) -> str:
    is_switch = isinstance(error, CoercionError) and error.target_type is bool
    return "true or false" if is_switch else "another one"
