"""The tokenizer, chat template and end-of-sequence ids inside a GGUF file.

Built here and not by transformers, whose own GGUF conversion reports `<|im_start|>` as the end of sequence,
cuts words that Llama 3 keeps whole, and splits text GPT-2's way where it does not know the file's.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section Tokenizer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gguf import TokenType
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, processors

from mlx_dspark.catalog.gguf.byte_bpe import byte_bpe, pre_tokenizer
from mlx_dspark.catalog.gguf.file import FETCH_AGAIN, GGUFFile
from mlx_dspark.catalog.gguf.sentencepiece import leads_with_space, sentencepiece
from mlx_dspark.compat.transformers_import import PreTrainedTokenizerFast
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel
from mlx_dspark.foundation.numbers import brief, is_whole

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ENDS = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "</s>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Control tokens that end a turn or a document, under whatever key the file has them or none."""
_SPM_IDS = {"bos": 1, "eos": 2, "unknown": 0}
"""What the ids of SentencePiece files are where the metadata does not say."""


def gguf_tokenizer(file: GGUFFile, context: int) -> TokenizerWrapper:
    """The tokenizer of a GGUF file, with its chat template and every end-of-sequence id.

    Raises UnsupportedModel for another kind of tokenizer or pre-tokenizer, BadCheckpoint for missing or
    damaged keys.
    """
    tokens = _tokens(file)
    backend = _backend(file, tokens)
    _add_special_tokens(backend, file, tokens)
    _add_end_markers(backend, file, tokens)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=_template(file),
        name_or_path=str(file.path),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **_named_tokens(file, tokens),
    )
    detokenizer: Any = BPEStreamingDetokenizer
    if _is_spm(file):
        detokenizer = partial(SPMStreamingDetokenizer, trim_space=leads_with_space(file))
    return TokenizerWrapper(tokenizer, detokenizer, eos_token_ids=sorted(end_ids(file)))


def end_ids(file: GGUFFile) -> frozenset[int]:
    """Every token that ends an answer: those the metadata names, and the control tokens known to end one.

    `<|endoftext|>` and its like separate documents in pretraining: after one the model begins a text nobody
    asked for. llama.cpp stops there too, although chat models name only their end of turn.
    """
    named = {_id(file, key.removesuffix("_token_id")) for key in _END_KEYS}
    kinds = file.metadata.get("tokenizer.ggml.token_type", ())
    pairs = zip(_tokens(file), kinds, strict=False)
    known = {
        index for index, (token, kind) in enumerate(pairs) if kind == TokenType.CONTROL and token in _ENDS
    }
    return frozenset(index for index in named | known if index is not None)


def _is_spm(file: GGUFFile) -> bool:
    return file.need("tokenizer.ggml.model") == "llama"


def _tokens(file: GGUFFile) -> list[str]:
    return file.listed("tokenizer.ggml.tokens", str)


def _kinds(file: GGUFFile) -> list[int]:
    return file.listed("tokenizer.ggml.token_type", int, [])


def _backend(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    kind = file.need("tokenizer.ggml.model")
    if kind == "llama":
        return sentencepiece(file, tokens)
    if kind == "gpt2":
        return byte_bpe(file, tokens)
    raise UnsupportedModel(
        f"{file.path} has a tokenizer of kind {kind!r}.",
        "Use an MLX model folder of this model, which carries its tokenizer.json.",
    )


def _template(file: GGUFFile) -> str | None:
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BadCheckpoint(
            f"tokenizer.chat_template in {file.path} is {brief(template)}, not a string.", FETCH_AGAIN
        )
    return template


def _add_special_tokens(backend: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    """Tokens that are found in text as a whole, ahead of everything else."""
    added = [
        AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, _kinds(file), strict=False)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED) and token
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_end_markers(backend: Any, file: GGUFFile, tokens: list[str]) -> None:
    """Wrap encoded text in bos and eos where the metadata, or else the kind of tokenizer, asks for it."""
    usual = {"bos": _is_spm(file) or pre_tokenizer(file).begins, "eos": False}
    marks = {}
    for name, default in usual.items():
        asked = file.metadata.get(f"tokenizer.ggml.add_{name}_token")
        if asked or (asked is None and default and _id(file, name) is not None):
            marks[name] = _token(file, tokens, name)
    if not marks:
        return
    template = " ".join(filter(None, [marks.get("bos"), "$A", marks.get("eos")]))
    backend.post_processor = processors.TemplateProcessing(
        single=template,
        pair=template + " " + template.replace("$A", "$B"),
        special_tokens=[(token, tokens.index(token)) for token in set(marks.values())],
    )


def _named_tokens(file: GGUFFile, tokens: list[str]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return {
        f"{name}_token": _token(file, tokens, key)
        for key, name in names.items()
        if _id(file, key) is not None
    }


def _id(file: GGUFFile, name: str) -> int | None:
    """The id of the token called `name`; None where the file has none."""
    key = f"tokenizer.ggml.{name}_token_id"
    default = _SPM_IDS.get(name) if _is_spm(file) else None
    index = file.metadata.get(key, default)
    if index is not None and not (is_whole(index) and 0 <= index < len(file.need("tokenizer.ggml.tokens"))):
        raise BadCheckpoint(
            f"{file.path} has {key} {brief(index)}, beyond its {len(_tokens(file))} tokens.", FETCH_AGAIN
        )
    return index


def _token(file: GGUFFile, tokens: list[str], name: str) -> str:
    index = _id(file, name)
    if index is None:
        raise BadCheckpoint(
            f"{file.path} asks for {name} around text and lacks tokenizer.ggml.{name}_token_id.", FETCH_AGAIN
        )
    return tokens[index]
