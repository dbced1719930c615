"""Every drafter packaging: a tiny head in a layout that is read elsewhere, and the same head in its own.

native, wrapped = PACKAGINGS["muse"].save(folder, seed=1)      # both draft the same
wrapped = PACKAGINGS["muse"].damaged(folder)                   # with what only this packaging holds
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.tiny_dflash2 import save_tiny_dflash2
from tests.tiny_drafters import save_tiny_dflash, save_tiny_dspark
from tests.tiny_packagings import YARN, as_nemotron, as_specforge, as_speculators, config_of, save, weights_of
from tests.tiny_variants import save_lfm2, save_nvfp4, save_prism, save_prism_gguf, save_qwen35

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}
BORROWED = {"own_embedding": False, "own_head": False}
NVIDIA = SLIDING | {"logits_start": 1, "own_head": False, "confidence": False}


class Packaging(NamedTuple):
    """`wrap(native, folder)` writes the head in `native` as the packaging does; `only` is what the native
    layout cannot hold, as keywords of `wrap`."""

    name: str
    native: Callable[..., Path]
    options: dict[str, Any]
    wrap: Callable[..., Path]
    only: dict[str, Any]

    def save(self, folder: Path, **options: Any) -> tuple[Path, Path]:
        """The same head in both layouts."""
        native = self.native(folder / "native", **options | self.options)
        return native, self.wrap(native, folder / "wrapped")

    def damaged(self, folder: Path, **options: Any) -> Path:
        """The head as its packaging has it, with all that is its own."""
        native = self.native(folder / "native", **options | self.options)
        return self.wrap(native, folder / "wrapped", **self.only)


def _again(native: Path, folder: Path, prefix: str = "", **overrides: Any) -> Path:
    """The native layout itself; `prefix` is put before every tensor's name."""
    weights = {prefix + name: weight for name, weight in weights_of(native).items()}
    return save(folder, config_of(native) | overrides, weights)


def _prefixed(native: Path, folder: Path) -> Path:
    return _again(native, folder, "model.", architectures=None)


def _on_top(native: Path, folder: Path) -> Path:
    """Old heads of z-lab's keep every key on top."""
    own = config_of(native)
    return _again(native, folder, **own.pop("dflash_config"), dflash_config=None)


def _variant(write: Callable[..., Path]) -> Callable[..., Path]:
    return lambda native, folder, same=True: write(native, folder, same=same)


def _gguf(native: Path, folder: Path) -> Path:
    return save_prism_gguf(save_prism(native, folder / "plain", same=True), folder / "head.gguf")


def _dspark(name: str, wrap: Callable[..., Path], only: dict[str, Any] | None = None, **options: Any):
    return Packaging(name, save_tiny_dspark, options, wrap, only or {})


def _dflash(native: Path, folder: Path, **overrides: Any) -> Path:
    return as_speculators(native, folder, algorithm="dflash", **overrides)


AHEAD: dict[str, Any] = {"sliding": (0, 1), "is_causal": False, "architectures": None}
RANDOM = {"same": False}
SINKS = {"sinks": -1.0}
PACKAGINGS = {
    "deepspec": _dspark("deepspec", _prefixed),
    "deepspec reduced": _dspark("deepspec", _again, draft_vocab=8),
    "gemma4": _dspark("deepspec", _again, backbone="gemma4"),
    "z-lab": Packaging("z-lab DFlash", save_tiny_dflash, {"sliding": (0,)}, _on_top, {}),
    "DFlash 2": Packaging("DFlash 2", save_tiny_dflash2, {"sliding": (0, 1)}, _again, {}),
    "DFlash 2 looking ahead": Packaging(
        "DFlash 2",
        save_tiny_dflash2,
        {"sliding": (0, 1), "is_causal": False, "architectures": None},
        _again,
        {},
    ),
    "speculators": _dspark("speculators", as_speculators),
    "speculators reduced": _dspark("speculators", as_speculators, draft_vocab=8, logits_start=1),
    "speculators dflash": Packaging("speculators", save_tiny_dflash, {"sliding": (1,)}, _dflash, {}),
    "muse": _dspark("speculators", as_speculators, None, **SLIDING, **BORROWED),
    "SpecForge": _dspark("SpecForge", as_specforge, {"rope_parameters": YARN}, **BORROWED),
    "Nemotron": _dspark("Nemotron", as_nemotron, SINKS, **NVIDIA),
    "Qwen 3.5": _dspark("Qwen 3.5 native", _variant(save_qwen35), RANDOM),
    "LFM2": _dspark("LFM2", _variant(save_lfm2), RANDOM, **BORROWED),
    "PrismML": _dspark("PrismML", _variant(save_prism), RANDOM),
    "NVFP4": _dspark("deepspec", _variant(save_nvfp4), RANDOM),
    "GGUF": _dspark("PrismML", _gguf),
}
