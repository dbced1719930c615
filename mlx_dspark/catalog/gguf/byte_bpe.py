"""Byte-level BPE tokenizers of GGUF files, and how each named pre-tokenizer splits text.

`tokenizer.ggml.pre` names the regular expressions of the model's own tokenizer.json; llama.cpp's
`src/llama-vocab.cpp` lists the names. An unknown one is refused: another split gives other tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mlx_dspark.catalog.gguf.file import FETCH_AGAIN, GGUFFile
from mlx_dspark.compat.tokenizers_errors import tokenizer_errors
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel


class PreTokenizer(NamedTuple):
    """How text is split before merging.

    splits        applied one after the other: each match is a piece of its own, and so is what lies between
    gpt2          whether GPT-2's split follows them
    whole_words   whether a piece that is a token stays whole, whatever the merges say
    begins        whether text begins with bos where the file does not say
    """

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    whole_words: bool = False
    begins: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}|{_CASED_TAIL}"
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

_NAMES = {
    PreTokenizer(_DEFAULT): "default",
    PreTokenizer(gpt2=True): "gpt-2 phi-2 mpt olmo gigachat a.x-4.0 mellum trillion exaone4",
    PreTokenizer((r"\p{N}",), gpt2=True): (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"
    ),
    PreTokenizer((_LLAMA3,), whole_words=True, begins=True): (
        "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0"
    ),
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    PreTokenizer((_QWEN2,)): "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan kormo f2llmv2 solar-open",
    PreTokenizer((_TEKKEN,), whole_words=True, begins=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2",
    PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
    PreTokenizer(_DEEPSEEK_V3): "deepseek-v3",
}
PRE_TOKENIZERS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
"""The pre-tokenizers that are known, by the value of `tokenizer.ggml.pre`."""


def pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    """How the file says that text is split; "default" where it does not. Raises UnsupportedModel."""
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    try:
        return PRE_TOKENIZERS[name]
    except (KeyError, TypeError):
        raise UnsupportedModel(
            f"{file.path} has the pre-tokenizer {name!r}, and how it splits text is not known here.",
            "Use an MLX model folder of this model, which carries its tokenizer.json.",
        ) from None


def byte_bpe(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    """The tokenizer without its special tokens.

    Raises UnsupportedModel for a pre-tokenizer that is not known, BadCheckpoint for damaged merges.
    """
    kind = pre_tokenizer(file)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in file.listed("tokenizer.ggml.merges", str)]
    try:
        with tokenizer_errors():
            model: Any = models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.whole_words)
    except (ValueError, TypeError) as error:
        raise BadCheckpoint(
            f"{file.path} has damaged tokenizer.ggml.merges: {error}.", FETCH_AGAIN
        ) from error
    backend: Any = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(file.metadata.get("tokenizer.ggml.add_space_prefix", False)),
        use_regex=kind.gpt2,
    )
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in kind.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend
