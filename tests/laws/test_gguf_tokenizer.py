"""The tokenizer inside a GGUF file gives the ids of the tokenizer the file was written from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from mlx_dspark.catalog.gguf.byte_bpe import PRE_TOKENIZERS, byte_bpe
from mlx_dspark.catalog.gguf.file import GGUFFile, open_gguf
from mlx_dspark.catalog.gguf.tokenizer import end_ids, gguf_tokenizer
from mlx_dspark.catalog.resolve import resolve_model
from mlx_dspark.chat.detokenize import TextDecoder
from mlx_dspark.foundation.errors import BadCheckpoint, UnsupportedModel
from mlx_dspark.foundation.paths import default_cache_dir
from tests.tiny import tiny_tokenizer
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_sentencepiece import USER_DEFINED, sentencepiece_keys, tiny_sentencepiece

from transformers.convert_slow_tokenizer import TikTokenConverter  # isort: skip
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX  # isort: skip

# Tokenizer ------------------------------------------------------------------------------------------------

DIGITS = ["1", "2", "12", "a", "Ġ", "b", "aĠ", "<|endoftext|>", "<|end|>", "<tool>"]


def digits_file(**metadata: Any) -> GGUFFile:
    """A vocabulary that merges `1` and `2`, with a control token and a user-defined token."""
    control, user, normal = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL
    base = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": DIGITS,
        "tokenizer.ggml.token_type": [normal] * 7 + [control, control, user],
        "tokenizer.ggml.merges": ["1 2", "a Ġ"],
        "tokenizer.ggml.eos_token_id": 8,
    }
    renamed = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return GGUFFile(Path("m.gguf"), base | renamed, {})


def test_smollm_splits_digits_and_gpt2_does_not() -> None:
    assert gguf_tokenizer(digits_file(), 64).encode("12a 12") == [0, 1, 3, 4, 0, 1]
    assert gguf_tokenizer(digits_file(pre="gpt-2"), 64).encode("12a") == [2, 3]


PIECES = {
    "gpt-2": "I|'|LL| say|:| don|'t| 12345| | Über|\n\n| x|=|1",
    "smollm": "I|'|LL| say|:| don|'t| |1|2|3|4|5| | Über|\n\n| x|=|1",
    "default": "I|'|LL| say|:| don|'|t| |123|45| | Über|\n\n| x|=|1",
    "llama-bpe": "I|'LL| say|:| don|'t| |123|45| | Über|\n\n| x|=|1",
    "qwen2": "I|'LL| say|:| don|'t| |1|2|3|4|5| | Über|\n\n| x|=|1",
    "tekken": "I|'LL| say|:| don|'t| |1|2|3|4|5| | Über|\n\n| x|=|1",
    "gpt-4o": "I'LL| say|:| don't| |123|45| | Über|\n\n| x|=|1",
    "deepseek-coder": "I|'|LL| say|:| don|'|t| |1|2|3|4|5| | Über|\n|\n| x|=|1",
    "deepseek-v3": "I|'LL| say|:| don|'t| |123|45| | Über|\n\n| x|=|1",
}
"""How each pre-tokenizer splits one text, by its regular expressions as they are published."""


def pieces(pre: str, text: str) -> list[str]:
    backend: Any = byte_bpe(digits_file(pre=pre), DIGITS)
    return [text[slice(*offsets)] for _, offsets in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", list(PIECES))
def test_a_named_pre_tokenizer_splits_its_way(pre: str) -> None:
    expected = PIECES[pre].split("|")
    assert pieces(pre, "".join(expected)) == expected


def test_every_kind_of_pre_tokenizer_has_an_example() -> None:
    assert {PRE_TOKENIZERS[pre] for pre in PIECES} == set(PRE_TOKENIZERS.values()) - {
        PRE_TOKENIZERS["smaug-bpe"]
    }
    assert PRE_TOKENIZERS["smaug-bpe"].splits == PRE_TOKENIZERS["llama-bpe"].splits


@given(st.text(max_size=60))
@example("I'LL  don't\r\n 1234567 ÀÉ٣٤ ǅ\u0301x")
def test_the_splits_are_those_of_transformers_tokenizers(text: str) -> None:
    published = {"qwen2": PRETOKENIZE_REGEX, "llama-bpe": TikTokenConverter().pattern}
    for pre, pattern in published.items():
        reference = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        assert pieces(pre, text) == [piece for piece, _ in reference.pre_tokenize_str(text)]


@given(st.text(max_size=40))
def test_no_split_loses_text(text: str) -> None:
    for pre in PIECES:
        assert "".join(pieces(pre, text)) == text


@pytest.mark.parametrize(
    ("pre", "expected"), [("llama-bpe", [2, 3]), ("tekken", [0, 1, 3]), ("dbrx", [0, 1, 3])]
)
def test_a_word_that_is_a_token_stays_whole_where_the_model_wants_it(pre: str, expected: list[int]) -> None:
    assert gguf_tokenizer(digits_file(pre=pre, merges=[]), 64).encode("12a") == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"pre": "llama-bpe", "bos_token_id": 7}, [7, 3]),
        ({"pre": "llama-bpe", "bos_token_id": 7, "add_bos_token": False}, [3]),
        ({"pre": "llama-bpe"}, [3]),
        ({"pre": "qwen2", "bos_token_id": 7}, [3]),
    ],
)
def test_llama_3_begins_with_bos_unless_the_file_says_otherwise(
    metadata: dict[str, Any], expected: list[int]
) -> None:
    assert gguf_tokenizer(digits_file(**metadata), 64).encode("a") == expected


def test_control_and_user_tokens_are_never_split() -> None:
    tokenizer = gguf_tokenizer(digits_file(), 64)
    ids = tokenizer.encode("a<|end|>b<tool>1")
    assert ids == [3, 8, 5, 9, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<tool>1"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, [3]),
        ({"add_bos_token": True, "bos_token_id": 7}, [7, 3]),
        ({"add_eos_token": True}, [3, 8]),
        ({"add_bos_token": True, "bos_token_id": 8, "add_eos_token": True}, [8, 3, 8]),
    ],
)
def test_text_is_wrapped_as_the_metadata_says(metadata: dict[str, Any], expected: list[int]) -> None:
    assert gguf_tokenizer(digits_file(**metadata), 64).encode("a") == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {7, 8}),
        ({"eot_token_id": 9}, {7, 8, 9}),
        ({"eom_token_id": 3}, {3, 7, 8}),
        ({"token_type": []}, {8}),
        ({"tokens": ["1", "2", "12", "a", "Ġ", "b", "aĠ", "<|eot_id|>", "<end_of_turn>", "</s>"]}, {7, 8}),
    ],
)
def test_every_end_of_sequence_id_is_found(metadata: dict[str, Any], expected: set[int]) -> None:
    assert end_ids(digits_file(**metadata)) == expected
    assert gguf_tokenizer(digits_file(**metadata), 64).eos_token_ids == expected


def test_importing_the_catalog_says_nothing() -> None:
    command = [sys.executable, "-W", "error", "-c", "import mlx_dspark.catalog.gguf.tokenizer"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(
    ("metadata", "named"), [({"model": "bert"}, "'bert'"), ({"pre": "unheard-of"}, "'unheard-of'")]
)
def test_an_unknown_tokenizer_is_refused_by_name(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named) as refusal:
        gguf_tokenizer(digits_file(**metadata), 64)
    assert "tokenizer.json" in refusal.value.next_step


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"merges": ["x y"]}, "merges"),
        ({"merges": ["1"]}, "merges"),
        ({"merges": [12]}, "merges"),
        ({"merges": "1 2"}, "merges"),
        ({"token_type": "normal"}, "token_type"),
        ({"eos_token_id": 99}, "eos_token_id 99"),
        ({"eos_token_id": "</s>"}, "eos_token_id '</s>'"),
        ({"tokens": 7}, "tokenizer.ggml.tokens"),
        ({"add_bos_token": True}, "lacks tokenizer.ggml.bos_token_id"),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_key(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(BadCheckpoint, match=named):
        gguf_tokenizer(digits_file(**metadata), 64)


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    save_tiny_gguf(path)
    return gguf_tokenizer(open_gguf(path), 512)


@given(st.text(max_size=60))
def test_the_rebuilt_tokenizer_equals_the_one_it_was_written_from(rebuilt: Any, text: str) -> None:
    assert rebuilt.encode(text) == tiny_tokenizer().encode(text)
    assert rebuilt.decode(rebuilt.encode(text)) == text


@pytest.mark.weights
def test_the_default_models_tokenizer() -> None:
    file = open_gguf(resolve_model(None, cache_dir=default_cache_dir()).path)
    tokenizer = gguf_tokenizer(file, 8192)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_ids == {0, 2}
    assert tokenizer.encode("The capital of France is Paris.") == [504, 3575, 282, 4649, 314, 7042, 30]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 1984,  ok")] == [
        "in",
        " ",
        "1",
        "9",
        "8",
        "4",
        ",",
        " ",
        " ok",
    ]
    for text in (
        "naïve café – 日本語 👩‍🚀",
        "\tdef f(x):\n\n        return x**2\n",
        "<|im_start|>user\n1+1=2<|im_end|>",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("first", ["user", "system"])
def test_the_chat_template_adds_its_system_line_unless_there_is_one(rebuilt: Any, first: str) -> None:
    messages = [{"role": first, "content": "Café 日本"}, {"role": "user", "content": "hi"}]
    text = rebuilt.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ("You are a tiny test model." in text) == (first == "user")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


# SentencePiece --------------------------------------------------------------------------------------------


def spm_file(*, leads: bool, **changes: Any) -> GGUFFile:
    return GGUFFile(Path("m.gguf"), sentencepiece_keys(leads=leads, **changes), {})


@pytest.fixture(scope="module", params=[True, False], ids=["leading-space", "bare"])
def both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The tokenizer of a GGUF file, and the SentencePiece model that it was written from."""
    return gguf_tokenizer(spm_file(leads=request.param), 64), tiny_sentencepiece(leads=request.param)


@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from(["the", " and", "  they", "thethe"]))))
@example(["theanditwhenandthe  ", "\n\n", "Ünïcode 日本 ", "aaaaaaa"])
@example([" ", " "])
def test_ids_equal_sentencepieces(both: tuple[Any, Any], parts: list[str]) -> None:
    ours, theirs = both
    text = "".join(parts)
    if any(piece in text for piece in ("<s>", "</s>", "<unk>", "<end_of_turn>", USER_DEFINED)):
        return
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)


@given(st.text(alphabet="the <b>", max_size=30))
def test_user_defined_pieces_equal_sentencepieces(text: str) -> None:
    tokenizer = gguf_tokenizer(spm_file(leads=False), 64)
    assert tokenizer.encode(text) == tiny_sentencepiece(leads=False).encode(text)


@pytest.mark.parametrize("leads", [True, False])
def test_streamed_text_equals_decoded_text(leads: bool) -> None:
    tokenizer: Any = gguf_tokenizer(spm_file(leads=leads), 512)
    ids = tokenizer.encode("they 日本 and\n the<b>end")
    ours, theirs = TextDecoder(tokenizer).start(), tokenizer.detokenizer
    text = "".join(map(ours.push, ids)) + ours.finish()
    for token in ids:
        theirs.add_token(token)
    theirs.finalize()
    assert text == theirs.text == tokenizer.decode(ids)


def test_the_keys_of_a_sentencepiece_file() -> None:
    file = spm_file(leads=True)
    for key in ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token", "add_space_prefix"):
        del file.metadata[f"tokenizer.ggml.{key}"]
    tokenizer = gguf_tokenizer(file, 64)
    assert (tokenizer.bos_token_id, tokenizer.unk_token_id) == (1, 0)
    assert tokenizer.encode("the") == [1, *tiny_sentencepiece(leads=True).encode("the")]
    end_of_turn = tiny_sentencepiece(leads=True).piece_to_id("<end_of_turn>")
    assert tokenizer.eos_token_ids == {2, end_of_turn}
    assert tokenizer.encode("the<end_of_turn>")[-1] == end_of_turn


@pytest.mark.parametrize("changes", [{"scores": [0.0]}, {"scores": []}, {"scores": 7}])
def test_damaged_scores_are_refused_by_key(changes: dict[str, Any]) -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer\.ggml\.scores"):
        gguf_tokenizer(spm_file(leads=True, **changes), 64)
