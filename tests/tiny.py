"""Tiny models and a tiny tokenizer that every test may use.

The models are mlx-lm's own classes with random float32 weights, scaled so that greedy text wanders instead of
repeating one token. The tokenizer is a byte-level BPE with merges over ASCII only, so every character outside
ASCII takes several tokens.

    model = tiny_llama()                         # or tiny_qwen3(seed=3, layers=4)
    tokenizer = tiny_tokenizer()                 # transformers PreTrainedTokenizerFast
    folder = save_tiny(tmp_path / "model")       # a complete model folder: mlx_lm.load opens it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 384
CONTEXT = 512

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
EOS_IDS = frozenset({0, 2})

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny test model.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_WORDS = """
the and of to in is that it for was on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some
so these would other into has more her two like him see time could no make than first been its who now
people my made over did down only way find use may water long little very after words called just where most
know system user assistant return def self import print
"""


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

_WINDOWS = ["sliding_attention", "full_attention"]

_FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 1.0, "attn_logit_softcapping": 2.0, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 2,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "global_head_dim": 32,
        "final_logit_softcapping": 1.0,
        "tie_word_embeddings": True,
    },
    "muse_glimmer": {"layer_types": _WINDOWS, "sliding_window": 16},
    "ministral3": {
        "layer_types": _WINDOWS,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "default",
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "smollm3": {"layer_types": _WINDOWS, "sliding_window": 16, "no_rope_layer_interval": 2},
    "iquestloopcoder": {"loop_window_size": 16},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 0.5},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
}


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A config.json of an mlx-lm `model_type`: hidden 64, 4 query and 2 KV heads of 16, windows of 16."""
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [_ARCHITECTURES.get(family, "CausalLM")],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return config | _FAMILY_CONFIGS.get(family, {}) | overrides


def tiny_model(config: dict[str, Any], *, seed: int = 0, stops: bool = False) -> nn.Module:
    """An mlx-lm model of `config` with random float32 weights, the same for the same seed.

    With `stops=False` the special tokens are never the greedy choice, so text runs on to its token limit;
    with `stops=True` they are as likely as any other token.
    """
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"] and "lm_head" in model:
        model.sanitize({})
    keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(model.parameters()))))
    model.update(tree_unflatten(list(_random_weights(model, keys, stops))))
    model.eval()
    mx.eval(model.parameters())
    return model


def tiny_llama(
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = VOCAB,
    *,
    stops: bool = False,
    **overrides: Any,
) -> nn.Module:
    """A random Llama; `overrides` are further config.json fields, such as `num_key_value_heads=1`."""
    return _sized("llama", seed, layers, hidden, vocab, stops, overrides)


def tiny_qwen3(
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    vocab: int = VOCAB,
    *,
    stops: bool = False,
    **overrides: Any,
) -> nn.Module:
    """A random Qwen3 (query and key norms); `overrides` are further config.json fields."""
    return _sized("qwen3", seed, layers, hidden, vocab, stops, overrides)


def tiny_family(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random model of an mlx-lm `model_type`; `overrides` are further config.json fields."""
    return tiny_model(tiny_config(family, **overrides), seed=seed)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB` tokens with a ChatML template and `<|im_end|>` as end of sequence.

    Ids 0, 1, 2 are `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`; ids 3 to 258 are the bytes.
    """
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        bos_token=IM_START,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        chat_template=CHATML,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save_tiny(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    stops: bool = False,
    bits: int | None = None,
    dtype: mx.Dtype = mx.float32,
    **overrides: Any,
) -> Path:
    """Write a complete model folder: config, generation config, safetensors and tokenizer; returns `folder`.

    `bits` quantizes to MLX affine in groups of 32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    model = tiny_model(config, seed=seed, stops=stops)
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(EOS_IDS)}))
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _sized(
    family: str, seed: int, layers: int, hidden: int, vocab: int, stops: bool, overrides: dict[str, Any]
) -> nn.Module:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": vocab}
    sizes |= {"intermediate_size": 2 * hidden, "head_dim": hidden // 4}
    return tiny_model(tiny_config(family, **(sizes | overrides)), seed=seed, stops=stops)


_GAINS = {"embed_tokens": 0.3, "q_proj": 2.0, "k_proj": 2.0, "o_proj": 4.0, "lm_head": 1.0}


def _random_weights(
    model: nn.Module, keys: Iterable[mx.array], stops: bool
) -> Iterator[tuple[str, mx.array]]:
    """Sharp attention outweighs the token's own embedding: text depends on more than the last token."""
    head = "lm_head" if "lm_head" in model else "embed_tokens"
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    for key, (name, old) in zip(keys, parameters, strict=True):
        module = name.split(".")[-2]
        noise = mx.random.normal(old.shape, key=key)
        if module in ("q_norm", "k_norm"):
            weight = 2.0 + 0.1 * noise
        elif name.endswith("bias") and old.ndim == 1:
            weight = 0.1 * noise
        elif old.ndim == 1:
            weight = 1.0 + 0.1 * noise
        elif module == "embed_tokens":
            weight = noise * _GAINS[module] / _embedding_scale(model)
        else:
            weight = noise * (_GAINS.get(module, 1.5) / old.shape[-1] ** 0.5)
        if module == head and not stops:
            weight[: len(SPECIAL_TOKENS)] = 0.0
        yield name, weight


def _embedding_scale(model: Any) -> float:
    """What a Gemma multiplies its embedding by."""
    return model.args.hidden_size**0.5 if model.model_type.startswith("gemma") else 1.0


@lru_cache(maxsize=1)
def _tokenizer_json() -> str:
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *byte_tokens])}
    merges: list[tuple[str, str]] = []
    for left, right in _prefix_merges():
        if len(vocab) == VOCAB:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    assert len(vocab) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer.to_str()


def _prefix_merges() -> Iterator[tuple[str, str]]:
    """Each word, led by its space, grows one character at a time: `Ġ+t`, `Ġt+h`, `Ġth+e`."""
    for word in _WORDS.split():
        for end in range(1, len(word) + 1):
            yield ("Ġ" + word)[:end], word[end - 1]
