"""What a measurement depends on beside the program: versions, device, power and heat, as far as the system
tells. What it does not tell is absent."""

from __future__ import annotations

import platform
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from mlx_dspark.distributed.versions import versions
from mlx_dspark.kernels.race import processor_name
from mlx_dspark.kernels.threads import usable_cores

_PMSET_SECONDS = 5.0
_POWER = ("type", "online", "status", "capacity")


def about_machine() -> dict[str, Any]:
    """Versions and devices, as JSON values; memory in bytes."""
    import mlx.core as mx

    device = mx.default_device()
    return {
        "versions": versions() | {"python": platform.python_version()},
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": {"type": device.type.name} | _device_info(device),
    }


def state_now(root: Path = Path("/sys")) -> dict[str, Any]:
    """Load, free memory, power and heat at this moment, as JSON values."""
    state: dict[str, Any] = {
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
        "available_memory_bytes": psutil.virtual_memory().available,
    }
    found = _macos() if platform.system() == "Darwin" else linux_state(root)
    return state | {name: value for name, value in found.items() if value not in (None, {}, [])}


def linux_state(root: Path) -> dict[str, Any]:
    """Power supplies, temperatures in degrees Celsius and frequency governors below `root`, which is /sys."""
    power = {
        supply.name: {
            name: text for name in ("type", "online", "status", "capacity") if (text := _text(supply / name))
        }
        for supply in _folders(root / "class" / "power_supply")
    }
    heat: dict[str, float] = {}
    for zone in _folders(root / "class" / "thermal"):
        value = _text(zone / "temp")
        if zone.name.startswith("thermal_zone") and value is not None and re.fullmatch(r"-?\d+", value):
            heat[f"{zone.name} {_text(zone / 'type') or ''}".strip()] = int(value) / 1000
    policies = _folders(root / "devices" / "system" / "cpu" / "cpufreq")
    governors = sorted({text for policy in policies if (text := _text(policy / "scaling_governor"))})
    return {"power": power, "temperatures": heat, "governors": governors}


def macos_state(battery: str, thermal: str) -> dict[str, Any]:
    """The same of what `pmset -g batt` and `pmset -g therm` print."""
    source = re.search(r"drawing from '([^']+)'", battery)
    charge = re.search(r"(\d+)%", battery)
    limits = {name: int(value) for name, value in re.findall(r"^\s*(\w+)\s*=\s*(\d+)", thermal, re.MULTILINE)}
    power = {
        "source": source.group(1) if source else None,
        "charge_percent": int(charge.group(1)) if charge else None,
    }
    return {"power": {k: v for k, v in power.items() if v is not None}, "limits": limits}


def _macos() -> dict[str, Any]:
    found = macos_state(_said("pmset", "-g", "batt"), _said("pmset", "-g", "therm"))
    low_power = re.search(r"lowpowermode\s+(\d)", _said("pmset", "-g"))
    return found | ({"low_power_mode": low_power.group(1) == "1"} if low_power else {})


def _said(*command: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PMSET_SECONDS, check=False)
        return done.stdout
    return ""


def _device_info(device: Any) -> dict[str, Any]:
    import mlx.core as mx

    with suppress(RuntimeError, ValueError, TypeError):
        found = mx.device_info(device)
        return {name: value for name, value in found.items() if isinstance(value, str | int | float)}
    return {}


def _folders(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(each for each in folder.iterdir() if each.is_dir())
    return []


def _text(path: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip() or None
    return None
