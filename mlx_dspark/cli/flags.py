"""From declared knobs to a command's flags. A flag's name, help and default stand in the declaration only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token

from mlx_dspark.foundation.knobs import Choice, Knob, Settings, Switch

_SWITCH = bool | None


class _Checked:
    """Tells pydantic that the value is already checked: cyclopts has it check every value against the
    annotation, which says how a flag is written, once anything has imported pydantic."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, str]:
        return {"type": "any"}


_CHECKED = _Checked()
_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def with_flags(
    run: Callable[..., int],
    *sections: type[Settings],
    without: Sequence[str] = (),
    positional: Sequence[str] = (),
    rest: str = "",
) -> Callable[..., int]:
    """A command that takes the knobs of `sections` as flags and hands `run` one object per section.

    `without` names the knobs that this command has no use for; they keep their defaults. Those named in
    `positional` may be given without their flags, in this order. `rest` is the help of all other words, which
    `run` gets as `rest`; where it is empty there may be none.
    """
    shown = [(section, knob) for section in sections for knob in section.knobs() if knob.name not in without]

    def command(*unnamed: Any, **given: Any) -> int:
        given |= dict(zip(positional, unnamed, strict=False))
        values = [
            section(
                **{
                    knob.name: given[knob.name]
                    for owner, knob in shown
                    if owner is section and knob.name in given
                }
            )
            for section in sections
        ]
        return run(*values, rest=unnamed) if rest else run(*values)

    groups = {section: Group(section.group, sort_key=order) for order, section in enumerate(sections)}
    parameters = [_parameter(knob, groups[section]) for section, knob in shown]
    first = {name: parameter for name in positional for parameter in parameters if parameter.name == name}
    parameters = [
        *(parameter.replace(kind=_EITHER) for parameter in first.values()),
        *(parameter for parameter in parameters if parameter.name not in first),
    ]
    if rest:
        described = Annotated[str, Parameter(help=rest)]
        words = inspect.Parameter("rest", inspect.Parameter.VAR_POSITIONAL, annotation=described)
        parameters = [words, *parameters]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    return command


def knob_help(knob: Knob) -> str:
    """One line of help: meaning, choices, default."""
    choices = f" {knob.kind.want.capitalize()}." if isinstance(knob.kind, Choice) else ""
    return f"{knob.about.help}{choices} [default: {knob.shown_default}]"


def negative_of(knob: Knob) -> str:
    """The flag that switches a knob off; empty where leaving the flag out does the same."""
    can_be_off = isinstance(knob.kind, Switch) and knob.default is not False
    return "--no-" + knob.flag.removeprefix("--") if can_be_off else ""


def _parameter(knob: Knob, group: Group) -> inspect.Parameter:
    switch = isinstance(knob.kind, Switch)
    described = Parameter(
        name=knob.flag,
        negative=negative_of(knob),
        help=knob_help(knob),
        show_default=False,
        env_var=knob.env or None,
        env_var_split=lambda _, text, **__: [text],
        show_env_var=False,
        group=group,
        converter=_converter(knob),
        consume_multiple=False,
    )
    kind = _SWITCH if switch else tuple[str, ...] if knob.kind.many else str
    return inspect.Parameter(
        knob.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=knob.default,
        annotation=Annotated[kind, described, _CHECKED],
    )


def _converter(knob: Knob) -> Callable[[Any, Sequence[Token]], Any]:
    """Parses and checks here, so that an error names the flag or environment name that was used."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        if isinstance(tokens[0].implicit_value, bool):
            return tokens[0].implicit_value
        called = tokens[0].keyword or knob.flag
        value = knob.kind.gather([knob.parse(token.value, called) for token in tokens])
        knob.check(value, called, written=True)
        return value

    return convert
