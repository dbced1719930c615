"""SentencePiece BPE tokenizers of GGUF files (`tokenizer.ggml.model` "llama"), on the `tokenizers` library.

The file has a score for every token, and SentencePiece joins the two neighbours whose token scores best. A
merge list says the same: all pairs that make a token, in the order of the tokens' scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gguf import TokenType
from tokenizers import Tokenizer, decoders, models, normalizers

from mlx_dspark.catalog.gguf.file import FETCH_AGAIN, GGUFFile
from mlx_dspark.compat.tokenizers_errors import tokenizer_errors
from mlx_dspark.foundation.errors import BadCheckpoint

SPACE = "▁"


def sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """The tokenizer without its special tokens. Raises BadCheckpoint for missing or damaged scores.

    A space is put before the text, and before what follows a special token, unless the file says otherwise.
    """
    scores = file.listed("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise BadCheckpoint(
            f"{file.path} has {len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens.", FETCH_AGAIN
        )
    kinds = file.listed("tokenizer.ggml.token_type", int, [TokenType.NORMAL] * len(tokens))
    unknown = unknown_id(file)
    try:
        with tokenizer_errors():
            model: Any = models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=_merges(tokens, scores, kinds),
                unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
                fuse_unk=True,
                byte_fallback=True,
            )
    except (ValueError, TypeError) as error:
        raise BadCheckpoint(
            f"{file.path} has damaged tokenizer.ggml.tokens: {error}.", FETCH_AGAIN
        ) from error
    leads = leads_with_space(file)
    backend: Any = Tokenizer(model)
    prefix = [normalizers.Prepend(SPACE)] if leads else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if leads else steps)
    return backend


def leads_with_space(file: GGUFFile) -> bool:
    """Whether a space is put before text."""
    return bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))


def unknown_id(file: GGUFFile) -> int:
    """The token that stands for what has none."""
    return file.metadata.get("tokenizer.ggml.unknown_token_id", 0)


def _merges(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a normal token; the best token first, of equals the earlier one."""
    known = set(tokens)
    normal = [i for i, kind in zip(range(len(tokens)), kinds, strict=False) if kind == TokenType.NORMAL]
    normal.sort(key=lambda index: (-scores[index], index))
    return [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, normal)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
