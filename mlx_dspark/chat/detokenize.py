"""Text out of token ids, one token at a time, in whole characters only.

`TextDecoder` finds out once what bytes each token of a tokenizer stands for; a `Detokenizer` then joins the
bytes of one answer through an incremental UTF-8 decoder. What it gives out, joined, equals
`tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)`, and U+FFFD appears only
for bytes that no later token could have completed.

One difference is wanted: a SentencePiece tokenizer with byte fallback replaces a whole run of byte tokens
when one of them is invalid or missing; here the valid characters of the run are kept.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol


class Tokenizer(Protocol):
    """The part of a transformers tokenizer, or of mlx-lm's wrapper around one, that turns ids into text."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> Any: ...

    def decode(
        self, token_ids: Any, *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> Any: ...

    def convert_ids_to_tokens(self, ids: Any) -> Any: ...


class Detokenizer(Protocol):
    """One answer's text. Work per token is bounded."""

    def push(self, token: int) -> str:
        """The characters that this token completed."""
        ...

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was cut off. Nothing may be pushed afterwards."""
        ...


class TextDecoder:
    """Makes detokenizers for one tokenizer. `shown` are special tokens whose text is given out too."""

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = {token: self._spelled(token) for token in shown if self._is_special(token)}
        self._piece = self._recognised()
        self._bare_start = self._piece is not None and self._drops_leading_space(self._piece)

    def start(self) -> Detokenizer:
        """A detokenizer for a new answer."""
        if self._piece is None:
            return _WindowDetokenizer(self._decode, self._is_special, self._shown)
        return _ByteDetokenizer(self._piece, self._bare_start)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that one token stands for; of a special token, those of its name."""
        if self._is_special(token):
            return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        return self._piece(token) if self._piece is not None else self._decode([token]).encode()

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _is_special(self, token: int) -> bool:
        return not self._decode([token]) and bool(self._spelled(token))

    def _spelled(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _recognised(self) -> Callable[[int], bytes] | None:
        """The first way of reading vocabulary entries as bytes that reproduces this tokenizer's own text."""
        probe = self._tokenizer.encode(_PROBE, add_special_tokens=False)
        expected = self._decode(probe)
        for reading in (_byte_level_bytes, _byte_fallback_bytes):
            piece = lru_cache(maxsize=None)(self._reader(reading))
            text = b"".join(map(piece, probe)).decode("utf-8", "replace")
            if text == expected or (text.startswith(" ") and text[1:] == expected):
                return piece
        return None

    def _reader(self, reading: Callable[[str], bytes]) -> Callable[[int], bytes]:
        def piece(token: int) -> bytes:
            if token in self._shown:
                return self._shown[token].encode()
            entry = self._tokenizer.convert_ids_to_tokens(token)
            if entry is None or self._is_special(token):
                return b""
            return entry if isinstance(entry, bytes) else reading(entry)

        return piece

    def _drops_leading_space(self, piece: Callable[[int], bytes]) -> bool:
        spaced = self._tokenizer.encode(" a", add_special_tokens=False)
        joined = b"".join(map(piece, spaced)).decode("utf-8", "replace")
        return joined.startswith(" ") and len(self._decode(spaced)) < len(joined)


_PROBE = "The quick brown, fox's  two\n\t x = {1: 'ä'}; naïve — 你好吗 é 👩‍🚀🇩🇪 .\n"


class _ByteDetokenizer:
    """Joins the bytes of tokens; `bare_start` drops the space in front of the first word."""

    def __init__(self, piece: Callable[[int], bytes], bare_start: bool) -> None:
        self._piece = piece
        self._bare_start = bare_start
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._started(self._utf8.decode(self._piece(token)))

    def finish(self) -> str:
        return self._started(self._utf8.decode(b"", final=True))

    def _started(self, text: str) -> str:
        if self._bare_start and text:
            self._bare_start = False
            return text.removeprefix(" ")
        return text


class _WindowDetokenizer:
    """For any other tokenizer: decodes a short window of tokens with and without the newest one.

    A window begins where text was whole, and at most `HELD` tokens wait for the rest of a character.
    """

    HELD = 16

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_special: Callable[[int], bool],
        shown: Mapping[int, str],
    ) -> None:
        self._decode, self._shown = decode, shown
        self._is_special = lru_cache(maxsize=None)(is_special)
        self._window: list[int] = []
        self._read = 0

    def push(self, token: int) -> str:
        if token in self._shown:
            return self._take(force=True) + self._shown[token]
        if self._is_special(token):
            return ""
        self._window.append(token)
        return self._take(force=len(self._window) - self._read > self.HELD)

    def finish(self) -> str:
        return self._take(force=True)

    def _take(self, *, force: bool) -> str:
        shown = self._decode(self._window[: self._read])
        text = self._decode(self._window)
        if not force and (text.endswith("\ufffd") or len(text) <= len(shown)):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text[len(shown) :]


def _byte_level_bytes(entry: str) -> bytes:
    """The bytes behind an entry of a byte-level BPE vocabulary; one outside its alphabet is plain text."""
    alphabet = _byte_of_character()
    if all(character in alphabet for character in entry):
        return bytes(alphabet[character] for character in entry)
    return entry.encode()


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet (GPT-2): printable Latin-1 stands for itself, the rest moves up to U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_fallback_bytes(entry: str) -> bytes:
    """The bytes behind a SentencePiece entry: `<0xNN>` is a byte, U+2581 a space."""
    if len(entry) == 6 and entry.startswith("<0x") and entry.endswith(">"):
        return bytes([int(entry[3:5], 16)])
    return entry.replace("\u2581", " ").encode()
