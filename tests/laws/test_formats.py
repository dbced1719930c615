"""Laws of the checkpoint adapters: what is read is what was written, and nothing wrong is read at all."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_dspark.catalog.formats import read_drafter
from mlx_dspark.foundation.errors import BadCheckpoint, LoadError, ModelNotFound, UnsupportedModel
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark

Save = Callable[..., Path]
both = pytest.mark.parametrize("save", [save_tiny_dspark, save_tiny_dflash])


def weights_of(folder: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    mx.eval(loaded)
    return loaded


def rewrite(folder: Path, weights: dict[str, mx.array]) -> Path:
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def without(folder: Path, *keys: str) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in keys:
        del config[key]
    path.write_text(json.dumps(config))
    return folder


def refusal(kind: type[LoadError], folder: Path) -> str:
    """The sentence of the error, which must come with a next step."""
    with pytest.raises(kind) as caught:
        read_drafter(folder)
    assert caught.value.next_step
    assert "\n" not in str(caught.value)
    return caught.value.sentence


# ---------------------------------------------------------------------------------------------- reading


def test_deepspec_defaults(tmp_path: Path) -> None:
    folder = without(
        save_tiny_dspark(tmp_path),
        "enable_confidence_head",
        "markov_head_type",
        "confidence_head_with_markov",
    )
    checkpoint = read_drafter(folder)
    config = checkpoint.config
    assert checkpoint.packaging == "deepspec"
    assert checkpoint.files == (folder / "model.safetensors",)
    assert (config.family, config.backbone, config.first_slot, config.max_draft) == ("dspark", "qwen3", 0, 7)
    assert (config.markov, config.confidence, config.confidence_with_markov) == ("vanilla", True, True)
    assert (config.taps, config.target_layers, config.softcap) == ((0, 1), 2, None)
    assert config.layer_causal == (False, False)
    assert config.layer_windows == (None, None)
    assert checkpoint.weights.keys() == weights_of(folder).keys()


def test_silent_configs_follow_the_tensors(tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path, markov="none", confidence=False)
    config = read_drafter(without(folder, "markov_rank", "enable_confidence_head")).config
    assert (config.markov, config.markov_rank, config.confidence) == ("none", 0, False)


@pytest.mark.parametrize(
    ("keys", "first_slot"),
    [
        ({"sample_from_anchor": True}, 0),
        ({"sample_from_anchor": False}, 1),
        ({"sample_from_anchor": False, "logits_start": 0}, 0),
        ({"logits_start": 1}, 1),
    ],
)
def test_first_slot(keys: dict[str, Any], first_slot: int, tmp_path: Path) -> None:
    config = read_drafter(save_tiny_dspark(tmp_path, **keys)).config
    assert config.first_slot == first_slot
    assert config.max_draft == 7 - first_slot


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_parameters": None, "rope_theta": 1e4}, 1e4),
        ({"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "rope_theta": 2e4}, 2e4),
        ({"rope_parameters": None}, 1e6),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 3e4},
                    "sliding_attention": {"rope_theta": 1},
                }
            },
            3e4,
        ),
    ],
)
@both
def test_rope_theta(save: Save, keys: dict[str, Any], theta: float, tmp_path: Path) -> None:
    config = read_drafter(save(tmp_path, **keys)).config
    assert (config.rope_theta, config.rope_kind) == (theta, "default")


def test_noise_inherited_from_the_target_is_ignored(tmp_path: Path) -> None:
    noise = {
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 2],
        "attn_output_gate": True,
        "linear_num_key_heads": 16,
        "sliding_window": 16,
        "max_window_layers": 28,
        "use_sliding_window": False,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    }
    config = read_drafter(save_tiny_dspark(tmp_path / "noisy", **noise)).config
    assert config == read_drafter(save_tiny_dspark(tmp_path / "clean")).config


def test_gemma4(tmp_path: Path) -> None:
    config = read_drafter(save_tiny_dspark(tmp_path / "keys", backbone="gemma4")).config
    assert (config.backbone, config.kv_heads, config.head_dim, config.softcap) == ("gemma4", 1, 16, 30.0)
    assert (config.rope_kind, config.rope_theta) == ("proportional", 1e6)
    assert config.rope_options == {"partial_rotary_factor": 0.25}
    values = save_tiny_dspark(tmp_path / "values", backbone="gemma4", values_from_keys=False)
    assert read_drafter(values).config.kv_heads == 2
    nulls = {"global_head_dim": None, "final_logit_softcapping": None, "sliding_window": 16}
    config = read_drafter(save_tiny_dspark(tmp_path / "nulls", backbone="gemma4", **nulls)).config
    assert (config.head_dim, config.softcap) == (16, None)


def test_zlab(tmp_path: Path) -> None:
    checkpoint = read_drafter(save_tiny_dflash(tmp_path, sliding=(1,), output_multiplier=0.5))
    config = checkpoint.config
    assert checkpoint.packaging == "z-lab DFlash"
    assert (config.family, config.first_slot, config.max_draft, config.taps) == ("dflash", 1, 7, (0, 1))
    assert config.layer_causal == (False, True)
    assert config.layer_windows == (None, 8)
    assert (config.output_multiplier, config.embedding_scale, config.softcap) == (0.5, 1.0, None)


@pytest.mark.parametrize(("is_causal", "causal"), [(True, (True, True)), (False, (False, False))])
def test_is_causal_rules_every_layer(is_causal: bool, causal: tuple[bool, bool], tmp_path: Path) -> None:
    config = read_drafter(save_tiny_dflash(tmp_path, sliding=(1,), is_causal=is_causal)).config
    assert config.layer_causal == causal
    assert config.layer_windows == (None, 8)


def test_the_dflash_section_comes_first(tmp_path: Path) -> None:
    section = {"mask_token_id": 5, "target_layer_ids": [0, 1], "block_size": 4, "input_embedding_scale": 2.0}
    config = read_drafter(save_tiny_dflash(tmp_path / "in", dflash_config=section, mask_token_id=9)).config
    assert (config.mask_token, config.block_size, config.embedding_scale) == (5, 4, 2.0)
    top = {"dflash_config": None, "mask_token_id": 9, "target_layer_ids": [0, 1]}
    assert read_drafter(save_tiny_dflash(tmp_path / "top", **top)).config.mask_token == 9


@pytest.mark.parametrize(
    ("layers", "depth", "taps"), [(1, 9, (4,)), (2, 8, (1, 5)), (5, 36, (1, 9, 17, 25, 33))]
)
def test_old_dflash_heads_spread_their_taps(
    layers: int, depth: int, taps: tuple[int, ...], tmp_path: Path
) -> None:
    folder = save_tiny_dflash(
        tmp_path, layers=layers, taps=taps, target_layers=depth, dflash_config={"mask_token_id": 5}
    )
    assert read_drafter(folder).config.taps == taps


def test_a_prefix_on_every_name_is_stripped(tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path)
    weights = weights_of(folder)
    rewrite(folder, {f"model.{name}": weight for name, weight in weights.items()})
    assert read_drafter(folder).weights.keys() == weights.keys()
    rewrite(folder, weights | {"model.extra": mx.zeros(3)})
    assert "model.extra" in refusal(BadCheckpoint, folder)


def test_a_nameless_head_is_known_by_its_keys(tmp_path: Path) -> None:
    assert read_drafter(without(save_tiny_dspark(tmp_path), "architectures")).packaging == "deepspec"


def test_reduced_vocabulary(tmp_path: Path) -> None:
    checkpoint = read_drafter(save_tiny_dspark(tmp_path / "reduced", draft_vocab=96))
    assert checkpoint.config.draft_vocab == 96
    assert checkpoint.d2t is not None
    assert "d2t" not in checkpoint.weights
    assert "t2d" not in checkpoint.weights
    degenerate = read_drafter(save_tiny_dspark(tmp_path / "whole", draft_vocab=384))
    assert (degenerate.d2t, degenerate.config.draft_vocab) == (None, 384)


def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    weights = weights_of(folder)
    (folder / "model.safetensors").unlink()
    placed = {name: f"model-{1 + i % 2}-of-2.safetensors" for i, name in enumerate(weights)}
    for file in set(placed.values()):
        mx.save_safetensors(str(folder / file), {n: w for n, w in weights.items() if placed[n] == file})
    return folder, placed


def write_index(folder: Path, placed: dict[str, str]) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


@both
def test_shards(save: Save, tmp_path: Path) -> None:
    whole = read_drafter(save(tmp_path / "whole"))
    folder, placed = sharded(save(tmp_path / "shards"))
    checkpoint = read_drafter(write_index(folder, placed))
    assert len(checkpoint.files) == 2
    assert checkpoint.config == whole.config
    assert all(bool(mx.all(checkpoint.weights[name] == whole.weights[name])) for name in whole.weights)


# ------------------------------------------------------------------------------------- refused packagings


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators packaging (algorithm 'eagle3')"),
        ({"speculators_config": {"algorithm": "dflash2"}}, "speculators packaging (algorithm 'dflash2')"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantized drafter (quantization_config: gptq)",
        ),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "modelopt's FP8"),
        ({"quantization": {"bits": 4, "group_size": 16, "mode": "nvfp4"}}, "quantized drafter"),
        ({"dspark_layers": 2, "block_size": None}, "full model with an embedded drafter"),
        ({"dflash_config": {"projector_type": "domino"}}, "SpecForge packaging (projector_type 'domino')"),
        ({"architectures": ["DSparkDraftModel"]}, "DSpark variant (DSparkDraftModel)"),
        (
            {"architectures": ["LlamaForCausalLMEagle3"]},
            "another kind (LlamaForCausalLMEagle3): an EAGLE-3 head",
        ),
        ({"architectures": ["EagleLlamaModel"]}, "another kind (EagleLlamaModel): an EAGLE head, which is"),
        ({"architectures": ["MedusaModel"]}, "another kind (MedusaModel): a Medusa head"),
        ({"model_type": "mimo_dflash"}, "another kind (mimo_dflash): a MiMo head"),
        ({"architectures": ["X"], "block_size": None, "medusa_num_heads": 4}, "(medusa_num_heads): a Medusa"),
        ({"architectures": ["X"], "block_size": None, "hydra_num_heads": 4}, "(hydra_num_heads): a Hydra"),
        ({"architectures": ["Qwen3MTPModel"]}, "(Qwen3MTPModel): a head for multi-token prediction (MTP)"),
        ({"architectures": ["MuseGlimmerAssistantModel"]}, "another kind (MuseGlimmerAssistantModel)"),
        ({"model_type": "laguna_dflash"}, "another kind (laguna_dflash)"),
        ({"model_type": "muse_glimmer_assistant"}, "another kind (muse_glimmer_assistant)"),
        ({"dflash_config": {"rope_is_neox_style": False}}, "hybrid targets (rope_is_neox_style)"),
        ({"rope_is_neox_style": False}, "hybrid targets (rope_is_neox_style)"),
        ({"architectures": ["DFlashDraftModel"], "attention_sink_bias": True}, "(attention_sink_bias)"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"causal": True}}, "targets (causal)"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash head with a Markov head"),
        (
            {"architectures": ["Qwen3DSparkModel"], "dflash_config": {"x": 1}},
            "two packagings, deepspec and z-lab",
        ),
        (
            {"architectures": ["OtherModel"], "block_size": None},
            "known drafter packaging (looked for archit",
        ),
        (
            {"architectures": ["LlamaForCausalLM"], "block_size": None},
            "is a language model (LlamaForCausalLM), not a drafter",
        ),
        ({"model_type": "llama"}, "model_type 'llama'"),
    ],
)
def test_other_packagings_are_refused_by_name(keys: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refusal(UnsupportedModel, save_tiny_dspark(tmp_path, **keys))


@pytest.mark.parametrize(
    ("tensor", "named"),
    [
        ("midlayer.self_attn.q_proj.weight", "an EAGLE-3 head, which is not supported: it drafts token by"),
        ("mtp.fc.weight", "a head for multi-token prediction (MTP), which is not supported: it is a layer"),
        ("medusa_head.0.0.linear.weight", "a Medusa head, which is not supported: it guesses every"),
    ],
)
def test_nameless_heads_of_other_kinds_are_known_by_their_tensors(
    tensor: str, named: str, tmp_path: Path
) -> None:
    """EAGLE-3 heads are published as `LlamaForCausalLM`, too."""
    folder = without(save_tiny_dspark(tmp_path, architectures=["LlamaForCausalLM"]), "block_size")
    rewrite(folder, {tensor: mx.ones((2, 2)), "fc.weight": mx.ones((2, 2))})
    assert f"({tensor}): {named}" in refusal(UnsupportedModel, folder)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types 'linear_attention'"),
        ({"markov_head_type": "transformer"}, "markov_head_type 'transformer'"),
        ({"backbone": "gemma4", "enable_moe_block": True}, "mixture of experts"),
        ({"backbone": "gemma4", "hidden_size_per_layer_input": 256}, "per-layer inputs"),
        ({"backbone": "gemma4", "hidden_activation": "silu"}, "hidden_activation 'silu'"),
        ({"backbone": "gemma4", "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'yarn'"),
    ],
)
def test_unknown_dspark_math_is_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refusal(UnsupportedModel, save_tiny_dspark(tmp_path, **options))


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        (
            {
                "sliding": (0,),
                "rope_parameters": {
                    "full_attention": {"rope_theta": 5.0},
                    "sliding_attention": {"rope_theta": 6.0},
                },
            },
            "rope_parameters",
        ),
    ],
)
def test_unknown_dflash_rope_is_refused(rope: dict[str, Any], named: str, tmp_path: Path) -> None:
    assert named in refusal(UnsupportedModel, save_tiny_dflash(tmp_path, **rope))


def test_the_dflash_rope_is_the_head_s_own(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 8, "beta_fast": 16}
    keys = {
        "rope_parameters": None,
        "rope_theta": 1e4,
        "rope_scaling": scaling,
        "max_position_embeddings": 512,
    }
    config = read_drafter(save_tiny_dflash(tmp_path, **keys)).config
    assert (config.rope_kind, config.rope_theta) == ("yarn", 1e4)
    assert config.rope_options == {"factor": 8, "beta_fast": 16, "original_max_position_embeddings": 512}


# ------------------------------------------------------------------------------------------ wrong configs


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mask_token_id", 384),
        ("mask_token_id", -1),
        ("target_layer_ids", [1, 0]),
        ("target_layer_ids", [1, 1]),
        ("target_layer_ids", [-2, 0]),
        ("target_layer_ids", [0, 2]),
        ("target_layer_ids", []),
        ("target_layer_ids", [0, True]),
        ("target_layer_ids", "0,1"),
        ("block_size", 0),
        ("block_size", 10**9),
        ("block_size", "7"),
        ("block_size", True),
        ("hidden_size", 64.0),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("vocab_size", 0),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", "small"),
        ("attention_bias", "no"),
        ("markov_rank", -1),
        ("layer_types", ["full_attention"]),
        ("layer_types", "full_attention"),
        ("logits_start", 2),
        ("draft_vocab_size", 385),
        ("rope_theta", float("inf")),
        ("final_logit_softcapping", -1.0),
        ("model_type", 3),
        ("architectures", "Qwen3DSparkModel"),
        ("dflash_config", [1]),
    ],
)
def test_a_wrong_value_is_named(key: str, value: Any, tmp_path: Path) -> None:
    keys = {"rope_parameters": None} if key == "rope_theta" else {}
    sentence = refusal(BadCheckpoint, save_tiny_dspark(tmp_path, **keys, **{key: value}))
    assert sentence.startswith(f"{key} in ")
    assert "config.json" in sentence


def test_contradictions_are_named(tmp_path: Path) -> None:
    cases = {
        "model_type": {"architectures": ["Gemma4DSparkModel"]},
        "sliding_window": {"layer_types": ["sliding_attention", "full_attention"]},
        "confidence_head_with_markov": {"markov_rank": 0, "confidence_head_with_markov": True},
        "block_size": {"block_size": 1, "logits_start": 1},
    }
    for number, (key, keys) in enumerate(cases.items()):
        with pytest.raises(BadCheckpoint, match=key) as caught:
            read_drafter(save_tiny_dspark(tmp_path / str(number), **keys))
        assert caught.value.field == key


@both
def test_every_missing_key_is_named(save: Save, tmp_path: Path) -> None:
    folder = without(save(tmp_path), "hidden_size", "vocab_size", "block_size")
    sentence = refusal(BadCheckpoint, folder)
    assert all(key in sentence for key in ("hidden_size", "vocab_size", "block_size", "config.json"))


def test_dflash_needs_a_mask_and_taps(tmp_path: Path) -> None:
    bare = save_tiny_dflash(tmp_path / "bare", dflash_config={"target_layer_ids": [0, 1]})
    assert "mask_token_id" in refusal(BadCheckpoint, bare)
    no_taps = save_tiny_dflash(tmp_path / "taps", dflash_config={"mask_token_id": 3}, num_target_layers=None)
    assert "target_layer_ids" in refusal(BadCheckpoint, no_taps)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff\xfe", "[" * 100_000, '"text"'])
def test_an_unreadable_config_is_named(content: str, tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path)
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert "config.json" in refusal(BadCheckpoint, folder)


def test_absent_files_are_named(tmp_path: Path) -> None:
    assert "nowhere" in refusal(ModelNotFound, tmp_path / "nowhere")
    assert "config.json" in refusal(BadCheckpoint, tmp_path)
    folder = save_tiny_dspark(tmp_path / "d")
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(BadCheckpoint, folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in refusal(UnsupportedModel, folder)


# ------------------------------------------------------------------------------------------ wrong tensors


@both
def test_a_missing_an_extra_and_a_misshaped_tensor_are_named(save: Save, tmp_path: Path) -> None:
    folder = save(tmp_path)
    weights = weights_of(folder)
    for name, weight in weights.items():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        rest = {key: value for key, value in weights.items() if key != name}
        assert f"lacks {name}" in refusal(BadCheckpoint, rewrite(folder, rest))
        grown = mx.zeros((weight.shape[0] + 1, *weight.shape[1:]))
        sentence = refusal(BadCheckpoint, rewrite(folder, weights | {name: grown}))
        assert f"{name} of shape {list(grown.shape)} in place of {list(weight.shape)}" in sentence
    sentence = refusal(BadCheckpoint, rewrite(folder, weights | {"layers.7.odd": mx.zeros(2)}))
    assert "unexpected layers.7.odd" in sentence


def test_tables_of_a_wrong_shape_are_named(tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path)
    weights = weights_of(folder)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        assert name in refusal(BadCheckpoint, rewrite(folder, weights | {name: mx.zeros((5, 64))}))


@pytest.mark.parametrize("written", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("declared", ["vanilla", "gated", "rnn"])
def test_a_head_of_another_type_is_never_loaded(written: str, declared: str, tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path, markov=written, markov_rank=16, markov_head_type=declared)
    if written == declared:
        read_drafter(folder)
    else:
        assert "markov_head." in refusal(BadCheckpoint, folder)


def test_a_renamed_markov_head_is_named(tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path)
    renamed = {name.replace("markov_head", "logit_head"): w for name, w in weights_of(folder).items()}
    sentence = refusal(BadCheckpoint, rewrite(folder, renamed))
    assert "lacks markov_head.markov_w1.weight, markov_head.markov_w2.weight" in sentence
    assert "unexpected logit_head.markov_w1.weight, logit_head.markov_w2.weight" in sentence


def test_dflash_owns_no_tables(tmp_path: Path) -> None:
    folder = save_tiny_dflash(tmp_path)
    weights = weights_of(folder) | {"lm_head.weight": mx.zeros((384, 64))}
    assert "unexpected lm_head.weight" in refusal(BadCheckpoint, rewrite(folder, weights))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@both
def test_weights_that_are_not_finite_are_named(save: Save, bad: float, tmp_path: Path) -> None:
    folder = save(tmp_path)
    weights = weights_of(folder)
    weights["norm.weight"][3] = bad
    assert "norm.weight" in refusal(BadCheckpoint, rewrite(folder, weights))


@pytest.mark.parametrize("dtype", [mx.uint8, mx.uint32, mx.int32, mx.int64])
def test_weights_that_are_not_floating_are_named(dtype: mx.Dtype, tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path)
    weights = weights_of(folder) | {"norm.weight": mx.ones(64, dtype=dtype)}
    assert "norm.weight" in refusal(UnsupportedModel, rewrite(folder, weights))


def test_bad_vocabulary_maps_are_named(tmp_path: Path) -> None:
    folder = save_tiny_dspark(tmp_path / "d", draft_vocab=96)
    weights = weights_of(folder)
    wrong: dict[str, dict[str, mx.array | None]] = {
        "d2t": {"d2t": None},
        "d2t in": {"d2t": mx.zeros(96, dtype=mx.int64) + 300},
        "d2t of shape": {"d2t": mx.zeros(95, dtype=mx.int64)},
        "t2d in": {"t2d": mx.zeros(384, dtype=mx.bool_)},
        "t2d of shape": {"t2d": mx.zeros(5, dtype=mx.bool_)},
        "lm_head.weight": {"lm_head.weight": None},
    }
    wrong["d2t "] = {"d2t": weights["d2t"] - mx.arange(96)}
    for named, changes in wrong.items():
        changed = {name: w for name, w in (weights | changes).items() if w is not None}
        assert named in refusal(BadCheckpoint, rewrite(folder, changed))
    unreduced = save_tiny_dspark(tmp_path / "u")
    rewrite(unreduced, weights_of(unreduced) | {"d2t": mx.zeros(384, dtype=mx.int64)})
    assert "draft_vocab_size" in refusal(BadCheckpoint, unreduced)


# ------------------------------------------------------------------------------------------ damaged files


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict[str, Any], rest: bytes) -> bytes:
    packed = json.dumps(header).encode()
    return struct.pack("<Q", len(packed)) + packed + rest


@pytest.mark.parametrize("keep", [0, 4, 8, 100, 0.5, 0.999, -1, -4])
def test_truncated_files_are_named(keep: float, tmp_path: Path) -> None:
    path = save_tiny_dspark(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    end = int(keep * len(data)) if 0 < keep < 1 else int(keep)
    path.write_bytes(data[:end])
    assert "model.safetensors is cut short" in refusal(BadCheckpoint, tmp_path)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = save_tiny_dspark(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    header, rest = header_of(data)
    first, second = [name for name in header if name != "__metadata__"][:2]
    damaged = [
        data + b"tail",
        struct.pack("<Q", 2**63) + data[8:],
        data[:8] + b"\x00" * 100 + data[108:],
        b"<html>" + data,
        with_header(header | {first: {"dtype": "F32"}}, rest),
        with_header(header | {first: [1]}, rest),
        with_header(header | {first: header[second]}, rest),
        with_header(header | {first: header[first] | {"shape": [7]}}, rest),
        with_header(header | {first: header[first] | {"data_offsets": [-8, 0]}}, rest),
    ]
    for content in damaged:
        path.write_bytes(content)
        assert "model.safetensors" in refusal(BadCheckpoint, tmp_path)
    path.write_bytes(with_header(header | {first: header[first] | {"dtype": "F8_E4M3"}}, rest))
    assert first in refusal(UnsupportedModel, tmp_path)


def test_bad_shards_are_named(tmp_path: Path) -> None:
    folder, placed = sharded(save_tiny_dspark(tmp_path / "d"))
    name, file = next(iter(placed.items()))
    other = next(other for other in placed.values() if other != file)
    assert f"{other} lacks {name}" in refusal(BadCheckpoint, write_index(folder, placed | {name: other}))
    outside = write_index(folder, placed | {name: "../model.safetensors"})
    assert "outside its own folder" in refusal(BadCheckpoint, outside)
    for content in ("{}", "[]", '{"weight_map": 3}', "{"):
        (folder / "model.safetensors.index.json").write_text(content)
        assert "index" in refusal(BadCheckpoint, folder)
    write_index(folder, placed)
    mx.save_safetensors(str(folder / other), {**mx_dict(folder / other), name: mx.zeros(3)})
    assert f"repeats {name}" in refusal(BadCheckpoint, folder)
    (folder / file).unlink()
    assert f"{file} is missing" in refusal(BadCheckpoint, folder)


def mx_dict(path: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    mx.eval(loaded)
    return loaded
