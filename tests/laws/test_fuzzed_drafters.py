"""Drafter checkpoints damaged at random: an error of ours, or what the damage stands for is what is read.

A packaging joins by one line in `PACKAGINGS`. Mutations are the same in every run. What is read has the
original's tensors; a key that is read stands there as it was written, and a number that differs from the
original's differs by a key that decides it.
"""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_dspark.catalog.formats import DrafterCheckpoint, read_drafter
from mlx_dspark.foundation.errors import LoadError
from tests import every_packaging
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_variants import save_prism_gguf

SMALL: dict[str, Any] = {"hidden": 16, "vocab": 24, "layers": 1, "block_size": 3}
TWO: dict[str, Any] = SMALL | {"layers": 2}


def _damaged(name: str, options: dict[str, Any]) -> Callable[[Path], Path]:
    return lambda folder: every_packaging.PACKAGINGS[name].damaged(folder, **options)


PACKAGINGS: dict[str, Callable[[Path], Path]] = {
    "deepspec": lambda folder: save_tiny_dspark(folder, **SMALL),
    "z-lab": lambda folder: save_tiny_dflash(folder, **SMALL, sliding=(0,)),
} | {
    name: _damaged(name, TWO if "layer_types" in each.options or "sliding" in each.options else SMALL)
    for name, each in every_packaging.PACKAGINGS.items()
    if name not in ("deepspec", "z-lab", "GGUF")
}
"""Each writes a tiny checkpoint into a folder and returns the folder that holds it."""

CONFIGS, HEADERS, FILES = 120, 30, 12
"""Mutations of each packaging: 16 * (120 + 30 + 12) = 2592, and those of the GGUF file."""

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**63, -(2**63), 10**400, 0.0, -0.0, 1e-300, 1e300, float("inf"), float("nan")]),
    st.floats(),
    st.sampled_from(
        ["", "qwen3", "qwen3_5", "gemma4", "full_attention", "sliding_attention", "yarn", "eagle3"]
    ),
    st.text(max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = [
    "architectures", "model_type", "dflash_config", "quantization", "quantization_config", "layer_types",
    "sliding_window", "is_causal", "draft_vocab_size", "logits_start", "sample_from_anchor", "rope_theta",
    "rope_scaling", "rope_parameters", "speculators_config", "speculators_model_type", "tie_word_embeddings",
    "enable_qwen35_gated_q_proj", "partial_rotary_factor", "rope_is_neox_style", "log_snr_conditioning",
    "min_log_snr", "max_log_snr", "final_logit_softcapping", "head_dim", "global_head_dim", "hidden_act",
    "markov_rank", "dspark_layers", "attention_sink_bias", "medusa_num_heads", "transformer_layer_config",
    "aux_hidden_state_layer_ids", "tap_origin", "use_sliding_window", "sliding_window_non_causal", "causal",
    "speculative_tokens", "selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size", "use_swa",
    "swa_window_size", "dspark_bonus_anchor", "dspark_markov_rank", "dspark_fixup_head_type",
    "dflash_query_causal", "eagle_aux_hidden_state_layer_ids", "projector_type", "attention_mode",
    "confidence_head_alpha", "target_layer_ids", "mask_token_id", "block_size", "input_embedding_scale",
    "output_multiplier",
]  # fmt: skip
seeded = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp("drafter")) for name, save in PACKAGINGS.items()}


def mutated(draw: Callable[..., Any], value: Any) -> Any:
    """`value` with one thing in it changed, at any depth."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        sections = [key for key in value if isinstance(value[key], dict)]
        key = draw(st.sampled_from([*sorted(value), *sorted(sections) * 4]))
        new = dict(value)
        match draw(st.sampled_from(["within", "within", "drop", "rename"])):
            case "drop":
                del new[key]
            case "rename":
                new[draw(st.sampled_from(KEYS) | st.text(max_size=6))] = new.pop(key)
            case _:
                new[key] = mutated(draw, value[key])
        return new
    if isinstance(value, dict) and draw(st.booleans()):
        return value | {draw(st.sampled_from(KEYS)): draw(VALUES)}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], *draw(st.sampled_from([[], [value[at]] * 2])), *value[at + 1 :]]
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], mutated(draw, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and draw(st.booleans()):
        return value + draw(st.sampled_from([-1, 1, value, 64]))
    return draw(VALUES)


def read(path: Path) -> DrafterCheckpoint | None:
    """None where it is refused, which names what is wrong and says what to do."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return read_drafter(path)
    except LoadError as error:
        told = bool(error.sentence and error.next_step)
    assert told, "an error without a sentence or a next step"
    return None


def assert_same_weights(found: DrafterCheckpoint, wanted: DrafterCheckpoint) -> None:
    assert found.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert mx.array_equal(found.weights[name], weight), name


WRITTEN = {
    "hidden_size": "hidden",
    "vocab_size": "vocab",
    "intermediate_size": "intermediate",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "rms_norm_eps": "norm_eps",
    "attention_bias": "attention_bias",
    "block_size": "block_size",
    "mask_token_id": "mask_token",
    "target_layer_ids": "taps",
    "num_target_layers": "target_layers",
    "final_logit_softcapping": "softcap",
    "enable_qwen35_gated_q_proj": "gated",
}
"""Keys that are read as they stand, and where."""

_TAPS, _SECTION, _INNER = "aux_hidden_state_layer_ids", "dflash_config", "transformer_layer_config"
_SLOTS = ("block_size", "mask_token_id", "target_layer_ids")
PLACES: dict[str, Mapping[str, tuple[str, ...]]] = {
    "z-lab DFlash": dict.fromkeys((*_SLOTS, "final_logit_softcapping"), (_SECTION, "")),
    "DFlash 2": dict.fromkeys((*_SLOTS, "final_logit_softcapping"), (_SECTION, "")),
    "SpecForge": dict.fromkeys(_SLOTS, (_SECTION, "")),
    "LFM2": dict.fromkeys((*_SLOTS, "num_target_layers"), ("", _SECTION)),
    "Nemotron": dict.fromkeys(WRITTEN, ("", _SECTION)),
    "speculators": dict.fromkeys(WRITTEN, (_INNER,))
    | dict.fromkeys(("block_size", "mask_token_id"), ("",))
    | dict.fromkeys(("final_logit_softcapping", "num_target_layers"), ("", _INNER)),
}
"""By packaging the places of these keys, the one that comes first ahead; on top where nothing is said."""

_ROPE = {
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "rope_type",
    "type",
    "layer_types",
    "full_attention",
    "sliding_attention",
    "model_type",
    "max_position_embeddings",
    "use_sliding_window",
}
_SCALING = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
_SCALING |= {"mscale", "mscale_all_dim", "partial_rotary_factor"}
_NATIVE = {"partial_rotary_factor", "enable_qwen35_gated_q_proj", "rope_is_neox_style"}
_MARKOV = {"markov_rank", "markov_head_type", "dspark_markov_rank"}
_CONFIDENCE = {"enable_confidence_head", "confidence_head_alpha"} | _MARKOV
_SLIDES = {"layer_types", "sliding_window", "use_sliding_window", "use_swa", "swa_window_size"}
_SLOT = {"logits_start", "sample_from_anchor", "dspark_bonus_anchor", "proposal_methods", "block_size"}
DECIDED_BY: dict[str, set[str]] = {
    "backbone": {"model_type"},
    "draft_vocab": {"draft_vocab_size", "vocab_size"},
    "kv_heads": {"num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "model_type"},
    "head_dim": {"head_dim", "global_head_dim", "model_type"},
    "rope_theta": _ROPE,
    "rope_kind": _ROPE | _NATIVE,
    "rope_options": _ROPE | _NATIVE | _SCALING,
    "first_slot": _SLOT,
    "sinks": {"attention_sink_bias"},
    "selector": {"selector_rank", "selector_top_k"},
    "convolution": {"conv_kernel_size", "conv_group_size"},
    "layer_causal": _SLIDES | {"is_causal", "sliding_window_non_causal", "causal", "dflash_query_causal"},
    "layer_windows": _SLIDES,
    "values_from_keys": {"attention_k_eq_v", "model_type"},
    "markov": _MARKOV,
    "markov_rank": _MARKOV,
    "confidence": _CONFIDENCE,
    "confidence_with_markov": _CONFIDENCE | {"confidence_head_with_markov"},
    "softcap": {"final_logit_softcapping", "model_type"},
    "embedding_scale": {"input_embedding_scale"},
    "output_multiplier": {"output_multiplier"},
    "tied": {"tie_word_embeddings"},
} | {field: {key} for key, field in WRITTEN.items() if field not in ("softcap", "taps")}
DECIDED_BY["taps"] = {"target_layer_ids", _TAPS, "tap_origin", "eagle_aux_hidden_state_layer_ids"}
"""By what is read the keys, wherever they are, that decide it; what is not here, no key does."""


def assert_meaning_follows(found: DrafterCheckpoint, wanted: DrafterCheckpoint, changed: set[str]) -> None:
    """What is read differs from the original's only with a key that decides it."""
    for each in fields(found.config):
        if getattr(found.config, each.name) != getattr(wanted.config, each.name):
            assert changed & DECIDED_BY.get(each.name, set()), each.name
    assert_well_formed(found)


def assert_read_as_written(found: DrafterCheckpoint, config: dict[str, Any]) -> None:
    places = PLACES.get(found.packaging, {})
    for key, field in WRITTEN.items():
        there = [(config.get(place) or {}) if place else config for place in places.get(key, ("",))]
        value = next((each[key] for each in there if each.get(key) is not None), None)
        if value is not None:
            value = tuple(value) if isinstance(value, list) else value
            assert getattr(found.config, field) == value, key
    if found.packaging == "speculators":
        origin = 1 if config.get("tap_origin") is None else config["tap_origin"]
        assert [tap + origin for tap in found.config.taps] == config[_TAPS]


def changed_keys(old: Any, new: Any) -> set[str]:
    """The keys, at any depth, whose values differ; all of a section that is there only once."""
    if not isinstance(old, dict) and not isinstance(new, dict):
        return set()
    left, right = (each if isinstance(each, dict) else {} for each in (old, new))
    keys = {key for key in {*left, *right} if left.get(key) != right.get(key)}
    within = {key for key in keys if isinstance(left.get(key), dict) and isinstance(right.get(key), dict)}
    return (keys - within).union(*(changed_keys(left.get(key), right.get(key)) for key in keys))


def assert_well_formed(found: DrafterCheckpoint) -> None:
    """The numbers are such that a drafter can run by them."""
    config = found.config
    assert 0 <= config.mask_token < config.vocab
    assert config.max_draft >= 1
    assert config.heads % config.kv_heads == 0
    assert len(config.layer_causal) == len(config.layer_windows) == config.layers
    assert list(config.taps) == sorted(set(config.taps))
    assert config.rope_theta > 1
    assert config.head_dim % 2 == 0
    assert (found.d2t is not None) == (config.draft_vocab < config.vocab)


@pytest.mark.parametrize("name", PACKAGINGS)
def test_configs(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    original = originals[name]
    config = json.loads((original / "config.json").read_text())
    wanted = read_drafter(original)
    (tmp_path / "model.safetensors").symlink_to(original / "model.safetensors")

    @settings(seeded, max_examples=CONFIGS)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        new = deepcopy(config)
        for _ in range(data.draw(st.integers(1, 2))):
            new = mutated(data.draw, new)
        (tmp_path / "config.json").write_text(json.dumps(new), encoding="utf-8", errors="surrogatepass")
        found = read(tmp_path)
        if found is None:
            return
        changed = changed_keys(config, new)
        assert_well_formed(found)
        assert_read_as_written(found, new)
        if found.packaging == wanted.packaging:
            assert_meaning_follows(found, wanted, changed)
            if "model_type" not in changed:  # that of a native head says how norms are stored
                assert_same_weights(found, wanted)

    law()


@pytest.mark.parametrize("name", PACKAGINGS)
def test_headers(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    """A header that is read all the same says the same of every tensor."""
    original = originals[name]
    stored = (original / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", stored[:8])[0]
    header, body = json.loads(stored[8 : 8 + size]), stored[8 + size :]
    wanted = read_drafter(original)
    (tmp_path / "config.json").symlink_to(original / "config.json")

    @settings(seeded, max_examples=HEADERS)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        text = json.dumps(mutated(data.draw, header)).encode("utf-8", "surrogatepass")
        length = len(text) if data.draw(st.integers(0, 9)) else data.draw(st.integers(0, 2**64 - 1))
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + text + body)
        if (found := read(tmp_path)) is not None:
            assert_meaning_follows(found, wanted, set())
            assert_same_weights(found, wanted)

    law()


@pytest.mark.parametrize("name", PACKAGINGS)
def test_bytes(name: str, originals: dict[str, Path], tmp_path: Path) -> None:
    """Bytes of either file changed, cut or added: what is read has the original's names and shapes."""
    wanted = read_drafter(originals[name])
    stored = {each: (originals[name] / each).read_bytes() for each in ("config.json", "model.safetensors")}

    @settings(seeded, max_examples=FILES)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        hurt = data.draw(st.sampled_from(sorted(stored)))
        for each, content in stored.items():
            (tmp_path / each).write_bytes(damaged(data, content) if each == hurt else content)
        if (found := read(tmp_path)) is not None and found.packaging == wanted.packaging:
            assert_well_formed(found)
            assert found.weights.keys() == wanted.weights.keys()
            assert all(found.weights[each].shape == w.shape for each, w in wanted.weights.items())

    law()


def damaged(data: st.DataObject, content: bytes) -> bytes:
    at = data.draw(st.integers(0, min(len(content) - 1, 3000)))
    match data.draw(st.sampled_from(["flip", "cut", "add", "erase"])):
        case "flip":
            return content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
        case "cut":
            return content[:at]
        case "add":
            return content + data.draw(st.binary(min_size=1, max_size=9))
        case _:
            return content[:at] + content[at + data.draw(st.integers(1, 64)) :]


def test_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    file = save_prism_gguf(PACKAGINGS["PrismML"](tmp_path), tmp_path / "head.gguf")
    content, wanted = file.read_bytes(), read_drafter(file)

    @settings(seeded, max_examples=150)
    @given(st.data())
    def law(data: st.DataObject) -> None:
        file.write_bytes(damaged(data, content))
        if (found := read(file)) is not None:
            assert_well_formed(found)
            assert {n: w.shape for n, w in found.weights.items() if "log_snr" not in n} == {
                n: w.shape for n, w in wanted.weights.items() if "log_snr" not in n
            }

    law()
