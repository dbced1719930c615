"""The architectures of GGUF files that can be run, and how each reads as an mlx-lm config.

The conventions are those of llama.cpp's converter: tensor names as in the `gguf` package's `MODEL_TENSORS`,
query and key rows of `llama` in another order, Gemma's norms with the 1 added that its code adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_dspark.catalog.folder import drafter_as_model
from mlx_dspark.catalog.gguf.facts import Facts
from mlx_dspark.catalog.gguf.file import FETCH_AGAIN, GGUFFile
from mlx_dspark.catalog.gguf.rope import FACTORS, rope_scaling
from mlx_dspark.foundation.errors import BadCheckpoint

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = _ATTENTION | _FEED_FORWARD | {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3_27B_LAYERS = 62
_NEUTRAL = {
    "expert_count": 0,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
    "attention.causal": True,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "embedding_scale": 1,
    "residual_scale": 1,
    "logit_scale": 1,
    "use_parallel_residual": False,
}
"""Keys that stand for arithmetic which no layout has, and the value at which they change nothing."""


@dataclass(frozen=True)
class Layout:
    """One architecture.

    model_type   mlx-lm's name of it
    blocks       GGUF's names of a layer's modules -> mlx-lm's
    config       what its config.json has beside the common keys
    reorders     whether query and key rows are in GGUF's rope order
    norm_offset  what GGUF's norm weights have more than mlx-lm's
    """

    model_type: str
    blocks: Mapping[str, str]
    config: Callable[[Facts, dict[str, Any]], dict[str, Any]]
    reorders: bool = False
    norm_offset: int = 0

    def name(self, tensor: str) -> str | None:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a tensor it has not."""
        stem, _, leaf = tensor.rpartition(".")
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        module = self.blocks.get(block[2]) if block else _TOP.get(stem)
        if module is None or leaf not in ("weight", "bias"):
            return None
        return f"model.layers.{block[1]}.{module}.{leaf}" if block else f"{module}.{leaf}"

    def tensor(self, name: str) -> str:
        """The GGUF name of an mlx-lm parameter, as `name` gives it for the other way round."""
        names = {module: stem for stem, module in (*_TOP.items(), *self.blocks.items())}
        module, _, leaf = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
        return f"blk.{layer[1]}.{names[layer[2]]}.{leaf}" if layer else f"{names[module]}.{leaf}"


def layout_of(file: GGUFFile) -> Layout:
    """The layout of a file. Raises UnsupportedModel naming its architecture when there is none."""
    architecture = file.need("general.architecture")
    try:
        return LAYOUTS[architecture]
    except (KeyError, TypeError):
        pass
    if architecture == "dspark":
        raise drafter_as_model(file.path)
    if architecture == "clip":
        raise file.unsupported("an image encoder, the companion of a language model", "the language model")
    raise file.unsupported(
        f"the architecture {architecture!r}", f"one of the architectures {', '.join(LAYOUTS)}"
    )


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json, in mlx-lm's layout, of a GGUF file.

    Raises UnsupportedModel for an architecture that is not in LAYOUTS and for features that its layout does
    not express, BadCheckpoint for missing or senseless metadata.
    """
    layout = layout_of(file)
    facts = Facts(file, file.metadata["general.architecture"])
    for key, neutral in _NEUTRAL.items():
        if facts.raw(key, neutral) != neutral:
            raise file.unsupported(f"{facts.architecture}.{key} {facts.raw(key)!r}", "the plain layout")
    return _common(facts, layout)


def _common(facts: Facts, layout: Layout) -> dict[str, Any]:
    file = facts.file
    hidden, heads = facts.whole("embedding_length"), facts.whole("attention.head_count")
    kv_heads, layers = facts.whole("attention.head_count_kv", heads), facts.whole("block_count")
    if heads % kv_heads or layers > len(file.tensors):
        raise BadCheckpoint(
            f"{file.path} claims {layers} layers of {heads} heads on {kv_heads}, with {len(file.tensors)} "
            "tensors, which cannot be.",
            FETCH_AGAIN,
        )
    head_dim = facts.whole("attention.key_length", max(hidden // heads, 1))
    for key in ("rope.dimension_count", "attention.value_length"):
        if facts.whole(key, head_dim) != head_dim:
            raise file.unsupported(
                "heads of unequal or partly rotated width", "fully rotated heads of one width"
            )
    config = {
        "model_type": layout.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": facts.whole("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "max_position_embeddings": facts.whole("context_length"),
        "vocab_size": _vocabulary(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    scaling = rope_scaling(facts, head_dim, config["rope_theta"])
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config | layout.config(facts, config)


def _llama(facts: Facts, _: dict[str, Any]) -> dict[str, Any]:
    _refuse_window(facts)
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in facts.file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in facts.file.tensors,
    }


def _qwen2(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    _refuse_window(facts)
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise facts.file.unsupported("heads that do not divide its hidden size", "heads that do")
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(facts: Facts, _: dict[str, Any]) -> dict[str, Any]:
    _refuse_window(facts)
    return {"architectures": ["Qwen3ForCausalLM"]}


def _gemma3(facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
    """Every sixth layer sees the whole context unless the file says otherwise; only those have scaled rope.

    The 27B model, told by its layers, divides the hidden size by the heads where others take a head's width.
    """
    if config.get("rope_scaling", {}).get("rope_type", "linear") != "linear":
        raise facts.file.unsupported("a Gemma 3 rope that is not plain or linear", "plain or linear rope")
    is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    per_head = config["hidden_size"] // config["num_attention_heads"]
    window = facts.whole("attention.sliding_window", 0, low=0)
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10000.0),
        "sliding_window": window or config["max_position_embeddings"],
        "sliding_window_pattern": _window_pattern(facts, config["num_hidden_layers"]) if window else 1,
    }


def _window_pattern(facts: Facts, layers: int) -> int:
    """Every how many layers one sees the whole context; a file gives the number, or a flag for each layer."""
    key = "attention.sliding_window_pattern"
    value = facts.raw(key, 6)
    if not isinstance(value, list):
        return facts.whole(key, 6)
    period = value.index(False) + 1 if False in value else layers + 1
    if [bool(flag) for flag in value] != [(layer + 1) % period != 0 for layer in range(layers)]:
        raise facts.file.unsupported("sliding windows without a period", "windows at regular layers")
    return period


def _refuse_window(facts: Facts) -> None:
    if facts.raw("attention.sliding_window", 0):
        raise facts.file.unsupported("sliding windows in this architecture", "attention to the whole context")


def _vocabulary(file: GGUFFile) -> int:
    """The embedding's rows. Raises BadCheckpoint when it is absent, or shorter than the list of tokens."""
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None or len(tensor.shape) != 2:
        raise BadCheckpoint(f"{file.path} lacks the tensor token_embd.weight.", FETCH_AGAIN)
    rows, tokens = int(tensor.shape[1]), len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if tokens > rows:
        raise BadCheckpoint(f"{file.path} has {tokens} tokens and {rows} rows of embedding.", FETCH_AGAIN)
    return rows


LAYOUTS = {
    "llama": Layout("llama", _LLAMA, _llama, reorders=True),
    "qwen2": Layout("qwen2", _LLAMA, _qwen2),
    "qwen3": Layout("qwen3", _LLAMA | _HEAD_NORMS, _qwen3),
    "gemma3": Layout(
        "gemma3_text", _ATTENTION | _HEAD_NORMS | _FEED_FORWARD | _GEMMA_NORMS, _gemma3, norm_offset=1
    ),
}
"""The architectures that can be run, by GGUF's name."""

IGNORED = frozenset({FACTORS})
"""Tensors that are no weights: rope_freqs.weight is read into the config."""
