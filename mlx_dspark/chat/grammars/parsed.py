"""Sections whose text one of mlx-lm's tool parsers reads as a whole."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from typing import Any

from mlx_dspark.chat.messages import template_tools
from mlx_dspark.chat.script import Broken, Calls, Grammar, Schemas, Script, Until
from mlx_dspark.foundation.chat import Tool

Parser = Callable[[str, Any], Any]
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError, MemoryError)
_PYTHON_STRING = re.compile(r"""\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'""", re.DOTALL)


def parsed(
    name: str,
    opener: str,
    closer: str,
    parse: Parser,
    *,
    tidy: Callable[[str], str] = str,
    whole: Callable[[str], bool] = bool,
) -> Grammar:
    """The grammar of a parser that takes the text between two marks; without `closer`, up to the end.

    `tidy` makes of a text what the parser takes. `whole` says whether it is calls from beginning to end,
    where the parser would pass over what is not.
    """

    def read(opened: str, tools: Schemas) -> Script:
        del opened
        text = tidy((yield Until(closer, or_all=not closer)))
        calls = _calls(parse, text, tools) if whole(text) else ()
        if not calls:
            raise Broken
        yield Calls(calls)

    return Grammar(name, (opener,), read, (closer,) if closer else ())


def of_mlx_lm(module: str) -> Grammar:
    """The grammar of a module of `mlx_lm.tool_parsers`."""
    found = importlib.import_module(f"mlx_lm.tool_parsers.{module}")
    opener, closer, parse = found.tool_call_start, found.tool_call_end, found.parse_tool_call
    return parsed(module, opener, closer, parse, **_MORE.get(module, {}))


def _calls(parse: Parser, text: str, tools: Schemas) -> tuple[tuple[str, Any], ...]:
    declared = template_tools([Tool(name, "", schema) for name, schema in tools.items()])
    try:
        found = parse(text, declared)
        calls = found if isinstance(found, list) else [found]
        return tuple((call["name"], call["arguments"]) for call in calls)
    except _FAULTS as error:
        raise Broken from error


def _one_line(text: str) -> str:
    """Python with the line breaks within its strings, which models write bare, escaped."""
    return _PYTHON_STRING.sub(lambda found: found[0].replace("\n", "\\n").replace("\r", "\\r"), text)


def _is_python(text: str) -> bool:
    """Whether the text is a list of calls with named arguments, in Python's syntax."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except _FAULTS:
        return False
    return isinstance(body, ast.List) and all(_is_named_call(node) for node in body.elts)


def _is_named_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and not node.args and all(keyword.arg for keyword in node.keywords)


_MORE: dict[str, dict[str, Any]] = {
    "pythonic": {"tidy": _one_line, "whole": _is_python},
}
"""What is to be known of a parser beside its marks."""
