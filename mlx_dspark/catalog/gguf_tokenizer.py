"""The tokenizer, chat template and end-of-sequence ids inside a GGUF file.

Built here and not by transformers, whose own GGUF conversion reports `<|im_start|>` as the end of sequence.
Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section Tokenizer.
"""

from __future__ import annotations

from typing import Any

from gguf import TokenType
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mlx_dspark.catalog.gguf_file import FETCH_AGAIN, GGUFFile
from mlx_dspark.compat.tokenizers_errors import tokenizer_errors
from mlx_dspark.compat.transformers_import import PreTrainedTokenizerFast
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel

_DIGIT_BY_DIGIT = {"smollm": True, "gpt-2": False, "default": False}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_OF_DOCUMENT = "<|endoftext|>"


def gguf_tokenizer(file: GGUFFile, context: int) -> TokenizerWrapper:
    """The byte-level BPE tokenizer of a GGUF file, with its chat template and every end-of-sequence id.

    Raises UnsupportedModel for another kind of tokenizer or pre-tokenizer, BadCheckpoint for missing keys.
    """
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(file, tokens),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        name_or_path=str(file.path),
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **_named_tokens(file, tokens),
    )
    detokenizer: Any = BPEStreamingDetokenizer
    return TokenizerWrapper(tokenizer, detokenizer, eos_token_ids=sorted(end_ids(file)))


def end_ids(file: GGUFFile) -> frozenset[int]:
    """Every token that ends an answer: those the metadata names, and the control token `<|endoftext|>`.

    `<|endoftext|>` separates documents in pretraining: after it the model begins a text nobody asked for.
    llama.cpp stops there too, although chat models name only their end of turn.
    """
    named = {file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS}
    kinds = file.metadata.get("tokenizer.ggml.token_type", ())
    pairs = zip(file.need("tokenizer.ggml.tokens"), kinds, strict=False)
    document = {index for index, pair in enumerate(pairs) if pair == (_END_OF_DOCUMENT, TokenType.CONTROL)}
    return frozenset(index for index in named | document if index is not None)


def _backend(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    kind, pre = file.need("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _DIGIT_BY_DIGIT:
        raise UnsupportedModel(
            f"{file.path} has a tokenizer of kind {kind!r} with the pre-tokenizer {pre!r}.",
            "Use an MLX model folder of this model, which carries its tokenizer.json.",
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    try:
        with tokenizer_errors():
            backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except (ValueError, TypeError) as error:
        raise BadCheckpoint(
            f"{file.path} has damaged tokenizer.ggml.merges: {error}.", FETCH_AGAIN
        ) from error
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False))
    )
    steps = [pre_tokenizers.Digits(individual_digits=True)] if _DIGIT_BY_DIGIT[pre] else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    backend.decoder = decoders.ByteLevel()
    _add_special_tokens(backend, file, tokens)
    _add_end_markers(backend, file, tokens)
    return backend


def _add_special_tokens(backend: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    kinds = file.metadata.get("tokenizer.ggml.token_type", ())
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == TokenType.CONTROL:
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == TokenType.USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])


def _add_end_markers(backend: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    """Wrap encoded text in bos and eos where the metadata asks for it."""
    marks = {}
    for name in ("bos", "eos"):
        if file.metadata.get(f"tokenizer.ggml.add_{name}_token", False):
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
        if f"tokenizer.ggml.{key}_token_id" in file.metadata
    }


def _token(file: GGUFFile, tokens: list[str], name: str) -> str:
    key = f"tokenizer.ggml.{name}_token_id"
    index = file.need(key)
    if index >= len(tokens):
        raise BadCheckpoint(f"{file.path} has {key} {index}, beyond its {len(tokens)} tokens.", FETCH_AGAIN)
    return tokens[index]
