"""What cannot be done is refused in one short sentence that names the field or file, and nothing runs."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gpt2

import mlx_dspark
from mlx_dspark.chat.template import encode_prompt
from mlx_dspark.foundation.errors import (
    BadCheckpoint,
    ContextOverflow,
    DsparkError,
    ModelNotFound,
    RequestError,
    UsageError,
)
from mlx_dspark.foundation.knobs import Settings
from mlx_dspark.foundation.numbers import brief, is_finite
from mlx_dspark.foundation.request import GenerateRequest, SamplingParams
from mlx_dspark.foundation.settings import GenerateSettings, LoadSettings
from mlx_dspark.kernels import dispatch
from mlx_dspark.session import Session
from tests.fakes import stock_greedy
from tests.tiny import save_tiny, tiny_llama
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark

HUGE = 10**5000
LONG = "a" * 1_000_000
LONGEST_MESSAGE = 600

Damage = Callable[[Path], None]


def told(error: pytest.ExceptionInfo[Any]) -> str:
    """The message, which is short whatever was refused."""
    message = str(error.value)
    assert len(message) < LONGEST_MESSAGE
    assert error.value.next_step
    return message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("refusals")
    save_tiny(home / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_DSPARK_CACHE_DIR", str(home / "cache"))
        yield home


@pytest.fixture(scope="module")
def session(folder: Path) -> Session:
    return mlx_dspark.load(folder / "model")


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Any, Any, Any]:
    return mlx_dspark.load_pair(folder / "model")[:3]


# ------------------------------------------------------------------------------------------------- values


NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
STRANGE = [HUGE, -HUGE, LONG, b"x", object(), np.array([1, 2]), mx.array([1, 2]), {1: HUGE}, [HUGE], True]


@pytest.mark.parametrize("kind", [SamplingParams, GenerateSettings])
@pytest.mark.parametrize("name", [*NUMBERS, "seed", "logprobs", "logit_bias"])
def test_strange_values_of_a_request_are_refused(kind: type, name: str) -> None:
    for value in STRANGE:
        with pytest.raises((RequestError, UsageError)) as refusal:
            kind(**{name: value})
        assert refusal.value.field == name
        assert name in told(refusal)


@pytest.mark.parametrize("value", [None, [], [(1, 2.0)], "1=2", {1: None}, {1: 10**400}, {"a": 1.0}])
def test_a_logit_bias_that_is_none(value: Any) -> None:
    for kind in (SamplingParams, GenerateSettings):
        with pytest.raises((RequestError, UsageError), match="logit_bias"):
            kind(logit_bias=value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("mode", [np.array(["auto", "auto"]), np.str_("auto"), mx.array([1, 2]), LONG]),
        ("max_draft", [np.array([1, 2]), mx.array([1, 2]), 1.0, LONG]),
        ("drafter_bits", [4.0, np.array([4, 4]), mx.array([4, 8]), np.int64(4), True]),
        ("confidence_threshold", [HUGE, -HUGE, np.array([0.5, 0.5])]),
        ("stop", [b"", b"x", [b"x"]]),
    ],
)
def test_a_setting_has_the_type_of_its_choices(name: str, values: list[Any]) -> None:
    owner: type[Settings] = GenerateSettings if name == "stop" else LoadSettings
    for value in values:
        with pytest.raises(UsageError, match=name) as refusal:
            owner.of({name: value})
        told(refusal)


@pytest.mark.parametrize("ids", ["abc", (1.5,), (None,), (True,), (-1,), None, 5, {1: 2}, ("a",)])
def test_a_request_holds_token_ids(ids: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        GenerateRequest(ids, 1)
    assert refusal.value.field == "prompt"


def test_numbers_are_what_a_float_can_hold() -> None:
    assert all(map(is_finite, (0, -1.5, 2**64)))
    assert not any(map(is_finite, (True, HUGE, float("inf"), float("nan"), "1", None, np.float32(1))))
    for value in (HUGE, [HUGE] * 1000, {LONG: HUGE}, LONG, LONG.encode()):
        assert len(brief(value)) < LONGEST_MESSAGE / 2


# ------------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("chat_template", [True, False])
@pytest.mark.parametrize("prompt", [None, 5, object(), b"hi", {"role": "user", "content": "hi"}, "\ud800"])
def test_a_prompt_is_text_or_messages(session: Session, prompt: Any, chat_template: bool) -> None:
    with pytest.raises(RequestError) as refusal:
        session.generate(prompt, chat_template=chat_template)
    assert refusal.value.field == "prompt"
    told(refusal)


@pytest.mark.parametrize("chat_template", [True, False])
@pytest.mark.parametrize("ids", [[1, 2, 3], (5,), range(9)])
def test_token_ids_are_told_from_messages(session: Session, ids: Any, chat_template: bool) -> None:
    with pytest.raises(RequestError, match="token ids") as refusal:
        session.generate(ids, chat_template=chat_template)
    assert "text" in refusal.value.next_step
    told(refusal)


@pytest.mark.parametrize("wrong", ["hi", 1, ("user",), {"role": "user"}, ["user", 5], {"role": LONG}])
def test_what_is_no_message_is_shown(session: Session, wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\] is .*, and not a message") as refusal:
        session.generate([("user", "hi"), wrong])
    assert brief(wrong) in told(refusal)


@pytest.mark.parametrize("chat_template", [True, False])
def test_a_prompt_beyond_the_context_is_told_by_us_alone(
    session: Session, chat_template: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers too would say something, and call it an error that is to come."""
    said: list[str] = []
    logger = logging.getLogger("transformers.tokenization_utils_base")
    monkeypatch.setattr(logger, "warning", lambda message, *_: said.append(message))
    with pytest.raises(ContextOverflow):
        session.generate("no " * 5000, chat_template=chat_template)
    assert not said


def test_invalid_text_is_told_by_its_field(session: Session) -> None:
    for field, ask in {
        "system": lambda: session.generate("hi", system="\ud800"),
        "messages": lambda: session.generate([("us\ud800er", "hi")]),
    }.items():
        with pytest.raises(RequestError, match="not valid UTF-8") as refusal:
            ask()
        assert refusal.value.field == field


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        (({"max_new_tokens": 2},), {}, "settings"),
        ((5,), {}, "settings"),
        ((), {"cancelled": None}, "cancelled"),
        ((), {"cancelled": 5}, "cancelled"),
        ((), {"max_new_tokens": -HUGE}, "max_new_tokens"),
    ],
)
def test_a_stream_is_refused_before_it_runs(session: Any, arguments: Any, options: Any, field: str) -> None:
    with pytest.raises(UsageError) as refusal:
        session.stream("hi", *arguments, **options)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1/0 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ foo.bar.baz() }}",
        "{{ [].pop() }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(tmp_path: Path, folder: Path, template: str) -> None:
    model = save_tiny(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="chat template") as refusal:
        mlx_dspark.load(model, mode="baseline", cpu_weights="stock").generate("hi")
    told(refusal)


# -------------------------------------------------------------------------------------- functional face


def test_parts_that_are_none_are_refused(pair: tuple[Any, Any, Any]) -> None:
    target, tokenizer, drafter = pair
    parts = {"target": target, "tokenizer": tokenizer, "drafter": drafter}
    for field, wrong in {"drafter": 5, "tokenizer": None, "target": None}.items():
        with pytest.raises(UsageError, match=field) as refusal:
            mlx_dspark.speculative_generate(**{**parts, field: wrong}, prompt="hi")
        assert refusal.value.field == field


def test_greedy_generate_neither_draws_nor_drafts(pair: tuple[Any, Any, Any]) -> None:
    target, tokenizer, _ = pair
    for field, options in {
        "temperature": {"temperature": 1.0},
        "max_draft_tokens": {"max_draft_tokens": 3},
    }.items():
        with pytest.raises(UsageError, match=field) as refusal:
            mlx_dspark.greedy_generate(target, tokenizer, "hi", **options)
        assert refusal.value.field == field
    with pytest.raises(UsageError, match="temperature"):
        mlx_dspark.greedy_generate(target, tokenizer, "hi", settings=GenerateSettings(temperature=1.0))
    with pytest.raises(UsageError, match="max_draft_tokens"):
        mlx_dspark.speculative_generate(target, tokenizer, None, "hi", max_draft_tokens=3)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("lookup_max_draft", {"lookup_max_draft": 0}),
        ("lookup_max_draft", {"lookup_max_draft": HUGE}),
        ("lookup_max_draft", {"lookup_max_draft": True}),
        ("lookup_max_draft", {"lookup_max_draft": 2, "max_draft_tokens": 5}),
        ("lookup_long_draft", {"lookup_long_draft": None}),
        ("max_draft_tokens", {"max_draft_tokens": -1}),
        ("max_draft_tokens", {"max_draft_tokens": 1.5}),
    ],
)
def test_lookup_sizes_are_named_as_they_were_given(
    pair: tuple[Any, Any, Any], field: str, options: Any
) -> None:
    with pytest.raises(UsageError, match=field) as refusal:
        mlx_dspark.lookup_generate(pair[0], pair[1], "hi", **options)
    assert refusal.value.field == field
    told(refusal)


def test_load_dflash_pair_has_one_mode(folder: Path) -> None:
    with pytest.raises(UsageError, match="mode"):
        mlx_dspark.load_dflash_pair(folder / "model", folder / "model", mode="auto")


# -------------------------------------------------------------------------------------------- model folders


def test_the_home_of_nobody_is_no_model(folder: Path) -> None:
    asks: list[dict[str, Any]] = [
        {"model": "~nosuchuser/x"},
        {"model": folder / "model", "drafter": "~nosuchuser/x"},
    ]
    for ask in asks:
        with pytest.raises(ModelNotFound, match="nosuchuser"):
            mlx_dspark.load(**ask)


def config(**changes: Any) -> Damage:
    return json_file("config.json", **changes)


def json_file(name: str, **changes: Any) -> Damage:
    def change(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(content | changes))

    return change


def written(name: str, content: str) -> Damage:
    def write(folder: Path) -> None:
        (folder / name).write_text(content)

    return write


def header(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Rewrites the table of model.safetensors; `change` may give its JSON text itself."""

    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        table = json.loads(data[8 : 8 + length])
        text = change(table)
        packed = text.encode() if isinstance(text, str) else json.dumps(table).encode()
        file.write_bytes(struct.pack("<Q", len(packed)) + packed + data[8 + length :])

    return rewrite


def first(table: dict[str, Any]) -> str:
    return next(name for name in table if name != "__metadata__")


def offsets(*values: Any) -> Damage:
    return header(lambda table: table[first(table)].update(data_offsets=[*values]))


def twice(table: dict[str, Any]) -> str:
    name = first(table)
    return json.dumps(table)[:-1] + f", {json.dumps(name)}: {json.dumps(table[name])}}}"


def long_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(200_000_000)
        file.write(struct.pack("<Q", 200_000_000 - 8))


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000

DAMAGED_HEADERS: dict[str, Damage] = {
    "deep": header(lambda _: "[" * 200_000 + "]" * 200_000),
    "a key twice": header(twice),
    "offsets of text": offsets("a", "b"),
    "offsets of floats": offsets(0.0, 1e300),
    "three offsets": offsets(0, 1, 2),
    "offsets below 0": offsets(-5, 3),
    "longer than the limit": long_header,
}

DAMAGED_MODELS: dict[str, tuple[Damage, str]] = {
    **{f"eos {value}": (config(eos_token_id=value), "eos_token_id") for value in (2.5, "2", [[2]], True)},
    "eos of generation": (json_file("generation_config.json", eos_token_id=1.5), "generation_config.json"),
    "context of text": (config(max_position_embeddings="512"), "max_position_embeddings"),
    "context of a float": (config(max_position_embeddings=512.0), "max_position_embeddings"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads"),
    "rope of text": (config(rope_theta="x"), "rope_theta"),
    "another field of a wrong type": (config(tie_word_embeddings="x"), "tie_word_embeddings"),
    "deep config": (written("config.json", DEEP), "config.json"),
    "deep generation config": (written("generation_config.json", DEEP), "generation_config.json"),
    **{name: (damage, "model.safetensors") for name, damage in DAMAGED_HEADERS.items()},
}


@pytest.mark.parametrize("name", DAMAGED_MODELS)
def test_a_damaged_model_folder_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    damage, at_fault = DAMAGED_MODELS[name]
    model = save_tiny(tmp_path / "model")
    damage(model)
    with pytest.raises(BadCheckpoint, match=at_fault) as refusal:
        mlx_dspark.load(model, cpu_weights="stock")
    told(refusal)


def test_weights_that_are_not_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    name = "model.layers.0.mlp.up_proj.weight"
    broken = weights | {name: mx.full(weights[name].shape, float("nan"))}
    (model / "model.safetensors").unlink()
    mx.save_safetensors(str(model / "model.safetensors"), broken, metadata={"format": "mlx"})
    with pytest.raises(BadCheckpoint, match="NaN") as refusal:
        mlx_dspark.load(model, cpu_weights="stock")
    told(refusal)


def test_a_config_without_hidden_size_runs(folder: Path, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    shape = {"n_ctx": 128, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 384}
    shape |= {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "eos_token_id": 2, "bos_token_id": 1}
    mx.random.seed(3)
    stock = gpt2.Model(gpt2.ModelArgs.from_dict(shape))
    (model / "model.safetensors").unlink()
    weights: Any = dict(tree_flatten(stock.parameters()))
    mx.save_safetensors(str(model / "model.safetensors"), weights, metadata={"format": "mlx"})
    (model / "config.json").write_text(json.dumps(shape))
    session = mlx_dspark.load(model, max_draft=4, cpu_weights="stock")
    prompt = "the the the the"
    result = session.generate(prompt, max_new_tokens=24, chat_template=False)
    ids = encode_prompt(session.tokenizer, prompt, chat_template=False)
    assert [*result.token_ids] == stock_greedy(stock, ids, 24)
    assert result.accepted > 0


# ------------------------------------------------------------------------------------------ drafter folders


ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 2.0}
EQUAL_FACTORS = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 1.0}

DAMAGED_DRAFTERS: dict[str, tuple[Damage, str]] = {
    "rope base 1": (config(rope_parameters={**ROPE, "rope_type": "yarn", "rope_theta": 1.0}), "rope_theta"),
    "rope base huge": (config(rope_parameters={"rope_theta": 10**400}), "rope_theta"),
    "rope base small": (config(rope_parameters={"rope_theta": 1e-300}), "rope_theta"),
    "equal factors": (config(rope_parameters=EQUAL_FACTORS), "high_freq_factor"),
    **{f"eps {value:g}": (config(rms_norm_eps=value), "rms_norm_eps") for value in (1e300, 1e-320)},
    "eps beyond floats": (config(rms_norm_eps=10**400), "rms_norm_eps"),
    "multiplier": (config(output_multiplier=1e300), "output_multiplier"),
    "scale": (config(input_embedding_scale=1e300), "input_embedding_scale"),
    "cap": (config(final_logit_softcapping=1e-320), "final_logit_softcapping"),
    "deep index": (written("model.safetensors.index.json", "[" * 200_000), "index.json"),
    "deep config": (written("config.json", DEEP), "config.json"),
    **{name: (damage, "model.safetensors") for name, damage in DAMAGED_HEADERS.items()},
}


@pytest.mark.parametrize("name", DAMAGED_DRAFTERS)
def test_a_damaged_drafter_folder_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    damage, at_fault = DAMAGED_DRAFTERS[name]
    drafter = save_tiny_dflash(tmp_path / "drafter")
    damage(drafter)
    with pytest.raises(BadCheckpoint, match=at_fault) as refusal:
        mlx_dspark.load(folder / "model", drafter=drafter)
    told(refusal)


def test_drafter_bits_of_a_float_are_refused(folder: Path, tmp_path: Path) -> None:
    drafter = save_tiny_dspark(tmp_path / "drafter")
    with pytest.raises(UsageError, match="drafter_bits"):
        mlx_dspark.load(folder / "model", drafter=drafter, drafter_bits=8.0)


# --------------------------------------------------------------------------------------------- surroundings


def test_cpu_weights_are_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.mx, "default_device", lambda: mx.Device(mx.gpu))
    with pytest.raises(UsageError, match="not the CPU") as refusal:
        dispatch.install_cpu_weights(tiny_llama(), choice="dense", cache_dir=tmp_path)
    assert refusal.value.field == "cpu_weights"
    assert dispatch.install_cpu_weights(tiny_llama(), cache_dir=tmp_path).choice is None


@pytest.mark.parametrize("kind", ["file", "folder in place of the memory", "nobody's home"])
def test_a_cache_that_cannot_be_used_stops_no_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cache = tmp_path / "cache"
    if kind == "file":
        cache.write_text("")
    else:
        (cache / "cpu-weights.json").mkdir(parents=True)
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", "~nosuchuser" if kind == "nobody's home" else str(cache))
    if kind == "nobody's home":
        with pytest.raises(DsparkError, match="MLX_DSPARK_CACHE_DIR"):
            mlx_dspark.load(folder / "model")
        return
    session = mlx_dspark.load(folder / "model")
    assert session.weights is not None
    assert session.weights.reason.startswith("measured, not remembered: ")
    assert session.generate("hi", max_new_tokens=2).num_tokens == 2
