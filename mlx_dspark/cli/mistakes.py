"""What the command-line parser refuses, in this program's words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

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


def explained(error: CycloptsError, commands: Sequence[str]) -> UsageError:
    """One sentence and a next step for a command line that does not parse; `commands` are the known ones."""
    chain = "".join(f" {name}" for name in error.command_chain or ())
    help_hint = f"`mlx-dspark{chain} --help` lists what there is."
    match error:
        case UnknownCommandError(unused_tokens=[word, *_]):
            return UsageError(f"There is no command {shown(word)}.", suggestion(word, commands) or _ask(word))
        case UnusedCliTokensError(unused_tokens=[word, *_]):
            advice = _ask(word) if chain in ("", " generate") else help_hint
            if chain in (" benchmark", " race"):
                advice = f"Commas keep the values of one flag together, as in --caps derived,3. {advice}"
            return UsageError(f"{shown(word)} belongs to no flag.", advice)
        case UnknownOptionError():
            return _unknown_flag(error, help_hint)
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


def _unknown_flag(error: UnknownOptionError, help_hint: str) -> UsageError:
    name = (error.token.keyword or error.token.value).partition("=")[0]
    known = [flag for argument in error.argument_collection if argument.parse for flag in argument.names]
    return UsageError(f"There is no flag {name} here.", suggestion(name, known) or help_hint)


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
