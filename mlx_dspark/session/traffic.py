"""What one token of a loaded model reads from memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_dspark.calibration.roofline import Traffic
from mlx_dspark.catalog.fit import StateBytes

if TYPE_CHECKING:
    from mlx_dspark.session.pair import Parts

_CHOSEN = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "top_k_experts")
"""What configs call the number of experts that a token goes through."""


def traffic_of(parts: Parts) -> Traffic:
    """The bytes. Of experts a token reads as many as it goes through; where that cannot be told, all."""
    import mlx.core as mx

    from mlx_dspark.targets.footprint import state_bytes
    from mlx_dspark.targets.load import text_config

    target: Any = parts.target
    config = text_config(parts.config)
    named = config.get("torch_dtype") or config.get("dtype")
    computed = getattr(mx, named, None) if isinstance(named, str) and target.spec.lazy else mx.float32
    computed = computed if isinstance(computed, mx.Dtype) else mx.bfloat16
    bits = next(iter(target.kv_bits), None)
    states = state_bytes(parts.config, dtype=computed, kv_bits=bits)
    return Traffic(weight_bytes(target.model, config), states or StateBytes())


def held_bytes(parts: Parts) -> int:
    """Bytes of memory that come free when the parts are let go of, at least."""
    import mlx.core as mx

    target: Any = parts.target
    return max(mx.get_active_memory(), weight_bytes(target.model, {}))


def weight_bytes(model: Any, config: dict[str, Any]) -> int:
    """Bytes of the weights that one token reads: all matrices, of experts those it goes through, but of an
    embedding that is no head a single row."""
    chosen = next((n for name in _CHOSEN if isinstance(n := config.get(name), int)), 0)
    has_head = any(name.rpartition(".")[2] == "lm_head" for name, _ in model.named_modules())
    seen: set[int] = set()
    total = 0.0
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if has_head and leaf in ("embed_tokens", "wte", "embeddings"):
            continue
        experts = getattr(module, "num_experts", 0) if "Switch" in type(module).__name__ else 0
        share = min(1.0, chosen / experts) if experts and chosen else 1.0
        for held in _held(module):
            if id(held) not in seen:
                seen.add(id(held))
                total += held.nbytes * share
    return int(total)


def _held(module: Any) -> list[Any]:
    """The arrays of a module itself, and the matrix that a kernel holds in its place."""
    import mlx.core as mx

    arrays = [value for value in module.values() if isinstance(value, mx.array)]
    matrix = getattr(module, "matrix", None)
    return arrays if matrix is None else [*arrays, matrix]
