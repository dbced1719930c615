"""`… to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>`: gpt-oss. The arguments are streamed.

The header that names the tool is read by the channel parser, so the section opens with all of it.
"""

from __future__ import annotations

from mlx_dspark.chat.script import Begin, Declare, End, Grammar, Json, Match, Maybe, Schemas, Script

PREFIX = "functions."


def call_to(name: str) -> Script:
    """The body of a message to a tool."""
    yield Declare(name)
    yield Match(r"\s{0,64}\{")
    yield Begin(name)
    yield Json("{", streamed=True)
    yield End()
    yield Maybe(r"\s{0,64}<\|(?:call|end)\|>")


def read(opened: str, tools: Schemas) -> Script:
    del tools
    return call_to(opened)


HARMONY_CALLS = Grammar("harmony", (), read)
"""Has no opener of its own."""
