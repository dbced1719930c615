"""How a model's makers would have it sampled, as its generation_config.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_dspark.catalog.folder import read_json
from mlx_dspark.foundation.errors import RequestError
from mlx_dspark.foundation.request import SamplingParams

_NAMES = ("temperature", "top_p", "top_k")


def usual_sampling(path: Path) -> dict[str, Any]:
    """Temperature, top_p and top_k of the model in this folder, those that it names and that can be used;
    none where it is to be greedy or says nothing. Raises BadCheckpoint where the file is no JSON."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    told = read_json(file)
    if told.get("do_sample") is not True:
        return {}
    return {name: told[name] for name in _NAMES if name in told and _usable(name, told[name])}


def _usable(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except RequestError:
        return False
    return True
