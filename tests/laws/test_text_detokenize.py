"""Text out of tokens: the joined pieces equal one decode of all ids, for every tokenizer and all ids."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_dspark.chat.detokenize import TextDecoder, _byte_of_character
from tests.tiny import SPECIAL_TOKENS, tiny_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁the", "▁a", "a", "b", "é", "你", "▁x", "▁▁", "\n", "the", "."]


def _sentencepiece(strip: bool) -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *PIECES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")  # pyright: ignore[reportAttributeAccessIssue]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _wordpiece() -> PreTrainedTokenizerFast:
    vocab = {
        t: i
        for i, t in enumerate(["[UNK]", "[SEP]", "the", "fox", "##es", "##s", "你", "é", ".", "don", "'"])
    }
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.WordPiece(cleanup=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", unk_token="[UNK]")


MAKERS = {
    "byte level": tiny_tokenizer,
    "sentencepiece": lambda: _sentencepiece(strip=True),
    "sentencepiece, no strip": lambda: _sentencepiece(strip=False),
    "wordpiece": _wordpiece,
}


@cache
def _tokenizer(kind: str) -> Any:
    return MAKERS[kind]()


@cache
def _decoder(kind: str) -> TextDecoder:
    return TextDecoder(_tokenizer(kind))


def _pieces(kind: str, ids: list[int]) -> list[str]:
    detokenizer = _decoder(kind).start()
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


def _once(kind: str, ids: list[int]) -> str:
    return _tokenizer(kind).decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(
            ["👩‍🚀", "🇩🇪", "你好", "e\u0301", "नमस्ते", "\ufeff", "\ufffd", " the", "  ", "\r\n", "ẞ"]
        ),
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "sentencepiece, no strip"])
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_any_text_comes_out_whole(kind: str, text: str) -> None:
    ids = _tokenizer(kind).encode(text, add_special_tokens=False)
    pieces = _pieces(kind, ids)
    assert "".join(pieces) == _once(kind, ids)
    assert sum(piece.count("\ufffd") for piece in pieces) == _once(kind, ids).count("\ufffd")


@pytest.mark.parametrize("kind", ["byte level", "wordpiece"])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_ids_equal_one_decode(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(_tokenizer(kind)) - 1), max_size=40))
    assert "".join(_pieces(kind, ids)) == _once(kind, ids)


@given(raw=st.binary(max_size=24), special=st.integers(0, len(SPECIAL_TOKENS) - 1), at=st.integers(0, 24))
@settings(max_examples=300, deadline=None)
def test_any_bytes_with_a_special_token_between(raw: bytes, special: int, at: int) -> None:
    tokenizer = _tokenizer("byte level")
    alphabet = {byte: tokenizer.convert_tokens_to_ids(c) for c, byte in _byte_of_character().items()}
    ids = [alphabet[byte] for byte in raw]
    ids.insert(min(at, len(ids)), special)
    assert "".join(_pieces("byte level", ids)) == raw.decode("utf-8", "replace") == _once("byte level", ids)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_byte_fallback_equals_one_decode_where_the_bytes_are_text(data: st.DataObject) -> None:
    kind = "sentencepiece"
    ids = data.draw(st.lists(st.integers(0, len(_tokenizer(kind)) - 1), max_size=24))
    joined, once = "".join(_pieces(kind, ids)), _once(kind, ids)
    if "\ufffd" not in once:
        assert joined == once
    assert joined.count("\ufffd") <= once.count("\ufffd")


def test_byte_fallback_keeps_the_valid_part_of_a_cut_run() -> None:
    tokenizer = _tokenizer("sentencepiece")
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "好😀".encode()[:-1]])
    assert "".join(_pieces("sentencepiece", ids)) == "好\ufffd"
    assert _once("sentencepiece", ids) == "\ufffd" * 6


@pytest.mark.parametrize("text", ["👩‍🚀", "你", "é"])
def test_a_character_appears_with_its_last_token_and_not_before(text: str) -> None:
    ids = _tokenizer("byte level").encode(text, add_special_tokens=False)
    detokenizer = _decoder("byte level").start()
    shown = ""
    for i, token in enumerate(ids):
        shown += detokenizer.push(token)
        assert shown == _once("byte level", ids[: i + 1]).rstrip("\ufffd")
    assert shown == text


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_a_cut_character_is_one_replacement_at_the_end(kind: str) -> None:
    if kind == "wordpiece":
        ids = _tokenizer(kind).encode("the foxes", add_special_tokens=False)
        assert "".join(_pieces(kind, ids)) == "the foxes"
        return
    ids = _tokenizer(kind).encode("the 😀", add_special_tokens=False)[:-1]
    assert "".join(_pieces(kind, ids)).removeprefix(" ") == "the \ufffd"
