"""Each of the program's rows tells every field or that it is not known, and its memory is what was seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_dspark.catalog.fit import Memory, Need, StateBytes
from mlx_dspark.catalog.pairs import PACKAGED, Pair, load_registry, read_pairs
from mlx_dspark.cli.main import run
from mlx_dspark.compat.mlx_lm_models import empty_model
from mlx_dspark.foundation.errors import BadCheckpoint
from mlx_dspark.session.shelf import known
from mlx_dspark.targets.footprint import state_bytes
from tests.tiny import save_tiny

ROWS = {pair.id: pair for pair in read_pairs(PACKAGED)}
FIELDS = ("parents", "architecture", "hidden_size", "layers", "cap", "speedup", "speedups")
MEMORY = ("weights_bytes", "kv_bytes_per_token", "peak_bytes")


@pytest.mark.parametrize("pair", ROWS.values(), ids=lambda pair: pair.id)
def test_a_row_tells_each_field_or_that_it_is_not_known(pair: Pair) -> None:
    for name in (*FIELDS, *MEMORY):
        assert bool(getattr(pair, name)) != (name in pair.unknown), name
    for who in ("target", *pair.drafters):
        assert (who in pair.licence) != (f"licence.{who}" in pair.unknown), who
    for mode in pair.drafters:
        assert (mode in pair.drafter_parameters) != (f"drafter_parameters.{mode}" in pair.unknown), mode
    for source in (pair.weights_source, pair.kv_source):
        assert source is not None
        assert source.split(":")[0].split()[0].rstrip(",") in ("published", "computed")
    assert pair.expectations(pair.mode)


@pytest.mark.parametrize(
    "pair", [each for each in ROWS.values() if each.peak_bytes], ids=lambda pair: pair.id
)
def test_weights_drafter_and_a_context_come_to_the_memory_that_was_seen(pair: Pair) -> None:
    """Stated peaks are of short conversations, rounded up, with what else the program held."""
    assert pair.weights_bytes is not None
    assert pair.peak_bytes is not None
    states = StateBytes(fixed=pair.fixed_state_bytes or 0, per_token=pair.kv_bytes_per_token or 0)
    need = Need(weights=pair.weights_bytes, states=states, drafter=pair.drafter_bytes(pair.mode))
    assert 0.6 * pair.peak_bytes < need.at(4096) < 1.06 * pair.peak_bytes


FULL, CONV = "full_attention", "conv"
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048,
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
    "block_dim": 2048, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
QWEN35: dict[str, Any] = {
    "head_dim": 256, "vocab_size": 248320, "rms_norm_eps": 1e-6, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "type": "default"},
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3-14b": ({
        "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 40, "intermediate_size": 17408,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }, 8),
    "qwen3.6-27b": ({"model_type": "qwen3_5", "text_config": QWEN35 | {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48,
    }}, 8),
    "ornith-1.0-9b": ({"model_type": "qwen3_5", "text_config": QWEN35 | {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32,
    }}, 8),
    "qwen3.6-35b-a3b": ({"model_type": "qwen3_5_moe", "text_config": QWEN35 | {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "intermediate_size": 512,
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
        "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }}, 4),
    "gemma-4-12b": ({"model_type": "gemma4", "text_config": {
        "model_type": "gemma4_text", "hidden_size": 3840, "num_hidden_layers": 48, "intermediate_size": 15360,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "vocab_size": 262144,
        "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 262144,
    }}, 8),
    "nemotron-3.5-lightning-30b-a3b": ({
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856,
        "num_hidden_layers": 52, "max_position_embeddings": 262144, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "mamba_proj_bias": False, "ssm_state_size": 128, "conv_kernel": 4,
        "n_groups": 8,
        "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "topk_group": 1, "num_experts_per_tok": 6,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    }, 4),
    "muse-glimmer-30b-8bit": ({"model_type": "muse_glimmer"}, 8),
    "lfm2.5-2.6b": (LFM2 | {
        "vocab_size": 128000, "num_hidden_layers": 30, "block_ff_dim": 10752,
        "full_attn_idxs": [2, 5, 9, 13, 17, 21, 25, 28],
    }, 0),
    "lfm2.5-1.2b": (LFM2 | {
        "vocab_size": 65536, "num_hidden_layers": 16, "block_ff_dim": 8192,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    }, 0),
    "nanbeige4.2-3b": ({
        "model_type": "nanbeige", "hidden_size": 3072, "num_hidden_layers": 22, "intermediate_size": 10752,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 166144,
        "rms_norm_eps": 1e-5, "num_loops": 2, "max_position_embeddings": 262144,
    }, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_computed_memory_is_that_of_the_published_dimensions(name: str) -> None:
    config, bits = CONFIGS[name]
    pair, model = ROWS[name], empty_model(config)
    assert model is not None
    arrays: Any = tree_flatten(model.parameters())
    packed = (lambda array: (bits + 0.5) / 8) if bits else (lambda array: 2)
    weights = sum(array.size * (packed(array) if array.ndim > 1 else 2) for _, array in arrays)
    assert weights == pytest.approx(pair.weights_bytes, rel=1e-3)
    states = state_bytes(config, dtype=mx.bfloat16)
    assert states is not None
    assert states.per_token == pair.kv_bytes_per_token


@pytest.mark.parametrize(
    ("line", "field", "told"),
    [
        ('licence = { dflash = "MIT" }', "licence.dflash", "target, dspark"),
        ("licence = 3", "licence", "neither a text nor a table"),
        ("drafter_parameters = { dspark = 0.5 }", "drafter_parameters.dspark", "whole number"),
        ("drafter_parameters = { other = 5 }", "drafter_parameters.other", "none of dspark"),
        ('unknown = ["colour"]', "unknown", "not a field"),
        ('unknown = ["licence.dflash"]', "unknown", "drafters names dspark"),
        ('unknown = ["layers"]\nlayers = 3', "unknown", "which the row gives"),
        ('unknown = ["licence.dspark"]\nlicence = { dspark = "MIT" }', "unknown", "which the row gives"),
        (
            '[[pair.expected]]\nmode = "dspark"\ncap = 2\naccept_length = 2\nbasis = 1',
            "expected.basis",
            "text",
        ),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, line: str, field: str, told: str) -> None:
    file = tmp_path / "pairs.toml"
    file.write_text(f'[[pair]]\nid = "a"\ntarget = "a/b"\ndrafters = {{ dspark = "c/d" }}\n{line}\n')
    with pytest.raises(BadCheckpoint, match=told) as caught:
        read_pairs(file)
    assert caught.value.field == field


def test_one_licence_stands_for_all_drafters(tmp_path: Path) -> None:
    file = tmp_path / "pairs.toml"
    file.write_text(
        '[[pair]]\nid = "a"\ntarget = "a/b"\ndrafters = { dspark = "c", dflash = "d" }\nlicence = "MIT"\n'
    )
    (pair,) = read_pairs(file)
    assert pair.licence == {"dspark": "MIT", "dflash": "MIT"}


def test_without_accept_lengths_the_published_gain_is_expected() -> None:
    pair = ROWS["nanbeige4.2-3b"]
    assert not pair.expected
    (gain,) = pair.expectations(pair.mode).values()
    assert (gain.content, gain.accept_length, gain.loose) == ("all", pair.speedup, True)
    assert not pair.expectations("dflash")


def test_the_drafter_counts_in_whether_a_model_fits_that_is_not_here(tmp_path: Path) -> None:
    pair = ROWS["qwen3.8-27b-8bit"]
    drafter = pair.drafter_bytes(pair.mode)
    assert drafter > 1e9
    (shelved,) = known([pair], tmp_path, Memory(10**11, "a test"))
    assert shelved.fits is not None
    assert shelved.fits.smallest > drafter + (pair.weights_bytes or 0)


def test_inspect_tells_a_rows_memory_and_what_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    model = save_tiny(tmp_path / "model", "qwen3")
    (model / "README.md").write_text("---\nbase_model: maker/Small\nlibrary_name: mlx\n---\n")
    (tmp_path / "mlx_dspark").mkdir()
    (tmp_path / "mlx_dspark" / "pairs.toml").write_text(
        '[[pair]]\nid = "small"\ntarget = "maker/Small"\ndrafters = { dspark = "a/b" }\n'
        'weights_bytes = 7\nweights_source = "computed: of nothing"\nlicence = { target = "MIT" }\n'
        'unknown = ["licence.dspark"]\n'
    )
    assert run(["inspect", str(model)]) == 0
    lines = dict(line.split(maxsplit=1) for line in _recorded(capsys.readouterr().out))
    assert lines["weights_source"] == "computed: of nothing"
    assert lines["licence"] == "target MIT, dspark unknown"
    assert lines["kv_bytes_per_token"] == "unknown"
    assert lines["not_known"] == "licence.dspark"
    assert run(["inspect", str(model), "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)["facts"]["recorded"]
    assert recorded == load_registry().pairs[-1].recorded()


def _recorded(shown: str) -> list[str]:
    names = ("weights source", "kv bytes per token", "not known", "licence")
    lines = [line.removeprefix("recorded ") for line in shown.splitlines() if line.startswith("recorded ")]
    for name in names:
        lines = [
            line.replace(name, name.replace(" ", "_"), 1) if line.startswith(name) else line for line in lines
        ]
    return lines


def test_what_is_not_known_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    for pair in load_registry().pairs:
        row = listed[pair.target]["row"]
        assert row["not_known"] == list(pair.unknown)
        assert row["weights_source"] == pair.weights_source
        assert row["licence"] == {who: pair.licence.get(who) for who in ("target", *pair.drafters)}
    assert run(["models"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines[ROWS["muse-glimmer-30b"].target].endswith("not known")
