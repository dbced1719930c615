"""From Metal to C++: the signature, threadgroup variables and literals; everything else is the header's.

Every `threadgroup` qualifier is either of a pointer or reference, where it stays, or of a variable in a
statement, which becomes a reference into the memory of the running threadgroup. What is neither is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.metal_shim.errors import NotMetal

_TOKEN = re.compile(
    r"""(?P<blank>\s+|//[^\n]*|/\*.*?\*/)
      |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      |(?P<number>\.?\d(?:[eE][+-]|[\w.])*)
      |(?P<word>[A-Za-z_]\w*)
      |(?P<sign>::|\[\[|\]\]|.)""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "<": ">", "{": "}"}
_UNKNOWN = {"double", "texture1d", "texture2d", "texture3d", "sampler", "threadgroup_imageblock"}


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True)
class Rewritten:
    """`text` as C++, the threadgroup variables in order, and how many qualifiers of pointers stayed."""

    text: str
    variables: tuple[str, ...]
    pointers: int


@dataclass(frozen=True)
class Variables:
    """A statement that declares threadgroup variables: where it is, their type, names and dimensions."""

    start: int
    end: int
    type: str
    names: tuple[tuple[str, str], ...]


def tokens(source: str) -> list[Token]:
    """Everything but white space and comments."""
    return [
        Token(str(found.lastgroup), found.group(), found.start())
        for found in _TOKEN.finditer(source)
        if found.lastgroup != "blank"
    ]


def rewritten(source: str) -> Rewritten:
    """The source with threadgroup variables in the arena and literals of Metal's types; lines keep their
    numbers. Raises `NotMetal` for what it cannot classify."""
    read = tokens(source)
    for each in read:
        if each.text in _UNKNOWN:
            raise NotMetal(f"line {_line(source, each)}: the shim knows no `{each.text}`")
    statements, pointers = _threadgroup(source, read)
    edits = [(each.start, each.end, _declared(each, number)) for number, each in enumerate(statements)]
    edits += [edit for each in read if each.kind == "number" and (edit := _literal(each))]
    text = _edited(source, edits)
    return Rewritten(text, tuple(name for each in statements for name, _ in each.names), pointers)


def rewritten_for_gates(source: str) -> str:
    """The source with threadgroup variables as clang declares them and literals of Metal's types."""
    read = tokens(source)
    edits = [
        (each.start, each.start, "static __attribute__((loader_uninitialized)) ")
        for each in _threadgroup(source, read)[0]
    ]
    edits += [edit for each in read if each.kind == "number" and (edit := _literal(each))]
    return _edited(source, edits)


def _threadgroup(source: str, read: list[Token]) -> tuple[list[Variables], int]:
    statements, pointers = [], 0
    for at, each in enumerate(read):
        if each.text != "threadgroup":
            continue
        if _qualifies_pointer(source, read, at):
            pointers += 1
        elif at == 0 or read[at - 1].text in (";", "{", "}"):
            statements.append(_statement(source, read, at))
        else:
            raise _unclear(source, each)
    return statements, pointers


def _qualifies_pointer(source: str, read: list[Token], at: int) -> bool:
    """Whether `*` or `&` follows the type that the qualifier belongs to."""
    after = _type_end(source, read, at + 1)
    while after < len(read) and read[after].text in ("const", "volatile"):
        after += 1
    if after >= len(read):
        raise _unclear(source, read[at])
    text = read[after].text
    if text == "(" and after + 1 < len(read):
        return read[after + 1].text in ("*", "&")
    return text in ("*", "&")


def _type_end(source: str, read: list[Token], at: int) -> int:
    """The index after a type: qualifiers, a name with `::`, template arguments."""
    start = at
    while at < len(read) and read[at].text in (
        "const",
        "volatile",
        "alignas",
        "unsigned",
        "signed",
        "typename",
    ):
        at = _closed(source, read, at + 1) if read[at].text == "alignas" else at + 1
    while at < len(read) and (read[at].kind == "word" or read[at].text == "::"):
        joined = read[at].text == "::" or (at + 1 < len(read) and read[at + 1].text == "::")
        at += 1
        if at < len(read) and read[at].text == "<":
            at = _closed(source, read, at)
            if at < len(read) and read[at].text == "::":
                continue
            break
        if not joined:
            break
    if at == start or at >= len(read):
        raise _unclear(source, read[start - 1])
    return at


def _closed(source: str, read: list[Token], at: int) -> int:
    """The index after the bracket that closes the one at `at`."""
    opened, depth = read[at].text, 0
    for index in range(at, len(read)):
        text = read[index].text
        if text == opened:
            depth += 1
        elif text == _CLOSING[opened]:
            depth -= 1
            if not depth:
                return index + 1
        elif text == ";":
            break
    raise _unclear(source, read[at])


def _statement(source: str, read: list[Token], at: int) -> Variables:
    begin = read[at]
    end_of_type = _type_end(source, read, at + 1)
    declared = source[read[at + 1].start : read[end_of_type - 1].end]
    names: list[tuple[str, str]] = []
    at = end_of_type
    while True:
        if read[at].kind != "word":
            raise _unclear(source, begin)
        name, first = read[at].text, read[at].end
        at += 1
        while read[at].text == "[":
            at = _closed(source, read, at)
        names.append((name, source[first : read[at - 1].end]))
        if read[at].text == ";":
            return Variables(begin.start, read[at].end, declared, tuple(names))
        if read[at].text == "=":
            raise NotMetal(f"line {_line(source, begin)}: a threadgroup variable takes no initial value")
        if read[at].text != ",":
            raise _unclear(source, begin)
        at += 1


def _declared(found: Variables, number: int) -> str:
    parts = []
    for index, (name, dimensions) in enumerate(found.names):
        type_name, key = f"shim_threadgroup_{number}_{index}", number * 64 + index
        place = f'shim::threadgroup_memory({key}, sizeof({type_name}), alignof({type_name}), "{name}")'
        parts.append(f"typedef {found.type} {type_name}{dimensions}; ")
        parts.append(f"{type_name}& {name} = *({type_name}*){place};")
    return " ".join("".join(parts).split())


def _literal(token: Token) -> tuple[int, int, str] | None:
    """Half and bfloat literals."""
    found = re.fullmatch(
        r"(\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\.\d+(?:[eE][+-]?\d+)?)(h|H|bf|BF)", token.text
    )
    if found is None:
        return None
    kind = "half" if found.group(2) in "hH" else "bfloat"
    return token.start, token.end, f"({kind}({found.group(1)}f))"


def _line(source: str, token: Token) -> int:
    return source.count("\n", 0, token.start) + 1


def _unclear(source: str, token: Token) -> NotMetal:
    rest = source[token.start : token.start + 80].split("\n")[0]
    return NotMetal(f"line {_line(source, token)}: neither a threadgroup variable nor a pointer: {rest!r}")


def _edited(source: str, edits: list[tuple[int, int, str]]) -> str:
    """The source with pieces replaced; lines keep their numbers."""
    for start, end, new in sorted(edits, reverse=True):
        source = source[:start] + new + "\n" * source[start:end].count("\n") + source[end:]
    return source
