"""`/machine` and `/calibration`: what this machine delivers, and what the model makes of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlx_dspark.calibration.bandwidth import bandwidth_here
from mlx_dspark.calibration.roofline import Judged, Traffic, ceiling, judge
from mlx_dspark.foundation.curves import CostCurves
from mlx_dspark.serving.host import Host
from mlx_dspark.serving.loading import Loaded
from mlx_dspark.session.calibrate import UNWANTED
from mlx_dspark.session.result import Result
from mlx_dspark.session.session import Session
from mlx_dspark.session.traffic import traffic_of

_SHALLOW = 512
"""Tokens of text at which plain rounds are compared with the ceiling where none is known."""


_NO_MODEL = "No model is loaded."
_NOTHING_TO_MEASURE = "There is nothing to measure: nobody drafts, or several processes share the model."
_UNASKED = "Costs are measured where the cap is not pinned, or calibrate is set; load the model so."


def machine_json(host: Host, loaded: Loaded | None) -> dict[str, Any]:
    """As JSON takes it; bandwidth in GB (10^9 bytes) a second. Calls MLX, in the thread that asks."""
    from mlx_dspark.bench.machine import about_machine, state_now

    found = bandwidth_here()
    known = {"gb_s": round(found.rate / 1e9, 2), "measured_at": found.measured_at, "source": "measured"}
    told: dict[str, Any] = {**about_machine(), "now": state_now(), "bandwidth": known}
    if loaded is None:
        return told | {"model": None, "roofline": None, "verdict": None}
    return told | _of_model(loaded, host.board.answers.last, found.rate)


def _of_model(loaded: Loaded, last: Result | None, bandwidth: float) -> dict[str, Any]:
    traffic, session = traffic_of(loaded.parts), loaded.model.session
    depths = {"at_zero": 0, "at_context_window": loaded.model.context or session.context}
    if last is not None:
        depths["at_last_request"] = last.prompt_tokens + last.num_tokens
    judged = _judged(traffic, _curves(session), loaded, bandwidth)
    return {
        "model": {
            "name": session.name,
            "mode": session.mode,
            "weights_bytes": traffic.weights,
            "kv_bytes_per_token": traffic.states.per_token,
            "fixed_state_bytes": traffic.states.fixed,
            "context_window": loaded.model.context,
            "kernels": [] if session.kernels is None else session.kernels.to_json(),
        },
        "roofline": {name: _at(depth, traffic, bandwidth) for name, depth in depths.items()},
        "verdict": asdict(judged),
    }


def _at(depth: int, traffic: Traffic, bandwidth: float) -> dict[str, Any]:
    return {
        "depth": depth,
        "bytes_per_token": traffic.at(depth),
        "plain_tokens_per_sec": round(ceiling(traffic, bandwidth, depth), 2),
    }


def _judged(traffic: Traffic, curves: CostCurves | None, loaded: Loaded, bandwidth: float) -> Judged:
    depth = min(_SHALLOW, loaded.parts.target.spec.context)
    seconds = None if curves is None else curves.verify_seconds(1, depth=depth)
    share = None if not seconds else traffic.at(depth) / seconds / bandwidth
    return judge(share, levers=_levers(traffic, loaded))


def _levers(traffic: Traffic, loaded: Loaded) -> tuple[str, ...]:
    parts, levers = loaded.parts, []
    if parts.mode == "baseline":
        levers.append("Let something draft: mode auto, lookup, or a drafter made for this model.")
    elif parts.mode == "lookup":
        levers.append("Name a drafter made for this model; lookup helps only where text repeats.")
    if not parts.config.get("quantization"):
        levers.append("Use the model in 8 or 4 bits: a token then reads a half or a quarter of the bytes.")
    deep = traffic.states.content(loaded.model.context or parts.target.spec.context)
    if deep > traffic.weights and loaded.loading.kv_bits is None:
        levers.append("Hold keys and values in 8 bits (kv_bits): in long texts they outweigh the weights.")
    if parts.max_batch == 1:
        levers.append("Answer several requests at once (max_batch): they share what is read of the weights.")
    return tuple(levers)


def _curves(session: Session) -> CostCurves | None:
    return None if session.calibration is None else session.calibration.curves


def calibration_json(session: Session | None) -> dict[str, Any]:
    """What is known of the costs of rounds; milliseconds by width and by cap, for one row at the depth that
    was measured most."""
    known = None if session is None else session.calibration
    if known is None:
        return {"available": False, "reason": _NO_MODEL if session is None else _NOTHING_TO_MEASURE}
    reason = _UNASKED if known.reason == UNWANTED else known.reason
    told: dict[str, Any] = {"available": known.curves is not None, "reason": reason, "key": known.key}
    curves = known.curves
    if curves is None:
        return told
    return told | {
        "measured_at": curves.measured_at,
        "round_overhead_ms": round(1000 * curves.overhead, 4),
        "verify_ms": _by(curves.verify, "width"),
        "drafter_ms": {name: _by(points, "cap") for name, points in curves.draft.items()},
        "curves": curves.to_json(),
    }


def _by(points: Any, name: str) -> dict[str, float]:
    alone = [point for point in points if point.rows == 1]
    if not alone:
        return {}
    depths = [point.depth for point in alone]
    most = max(set(depths), key=lambda depth: (depths.count(depth), -depth))
    return {str(getattr(p, name)): round(1000 * p.seconds, 4) for p in alone if p.depth == most}
