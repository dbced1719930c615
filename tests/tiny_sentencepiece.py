"""A tiny SentencePiece tokenizer, and the GGUF keys that llama.cpp's converter writes for it."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any

import sentencepiece
from gguf import TokenType

from tests.tiny import CHATML, VOCAB

_TEXT = """
the and of to in is that it for was on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some
so these would other into has more her two like him see time could no make than first been its who now
"""
USER_DEFINED = "<b>"


@lru_cache
def tiny_sentencepiece(*, leads: bool) -> Any:
    """A BPE model of VOCAB pieces with byte fallback; `leads`: a space is put before the text."""
    model = io.BytesIO()
    words = _TEXT.split()
    sentences = [" ".join(words[start : start + 9]) for start in range(0, len(words), 3)] * 4
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=leads,
        user_defined_symbols=[USER_DEFINED],
        control_symbols=["<end_of_turn>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_keys(*, leads: bool, **changes: Any) -> dict[str, Any]:
    """The `tokenizer.` keys of a GGUF file with that tokenizer; `changes` are of `tokenizer.ggml.` keys."""
    model = tiny_sentencepiece(leads=leads)
    ids = range(model.get_piece_size())
    keys = {
        "model": "llama",
        "pre": "default",
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [float(model.get_score(i)) for i in ids],
        "token_type": [int(_kind(model, i)) for i in ids],
        "bos_token_id": model.bos_id(),
        "eos_token_id": model.eos_id(),
        "unknown_token_id": model.unk_id(),
        "add_bos_token": False,
        "add_space_prefix": leads,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()} | {
        "tokenizer.chat_template": CHATML
    }


def _kind(model: Any, index: int) -> TokenType:
    if model.is_unknown(index):
        return TokenType.UNKNOWN
    if model.is_control(index):
        return TokenType.CONTROL
    if model.is_byte(index):
        return TokenType.BYTE
    return TokenType.USER_DEFINED if model.id_to_piece(index) == USER_DEFINED else TokenType.NORMAL
