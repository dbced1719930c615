"""The signature of a kernel that MLX generated: which arguments are buffers, which are attributes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.metal_shim.errors import NotMetal

# What the runtime calls Metal's attributes.
ATTRIBUTES = {
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_threadgroup",
    "threadgroup_position_in_grid": "threadgroup_position",
    "threads_per_threadgroup": "threadgroup_size",
    "dispatch_threads_per_threadgroup": "full_threadgroup_size",
    "threadgroups_per_grid": "threadgroups",
    "threads_per_grid": "grid",
    "grid_size": "grid",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "simdgroup",
    "thread_index_in_threadgroup": "thread_index",
    "simdgroups_per_threadgroup": "simdgroups",
    "dispatch_simdgroups_per_threadgroup": "simdgroups",
}
_FIXED = {
    "threads_per_simdgroup": "32u",
    "thread_execution_width": "32u",
    "grid_origin": "metal::uint3(0u, 0u, 0u)",
}


@dataclass(frozen=True)
class Parameter:
    """`type` as Metal writes it, with address space; `attribute` is None for a buffer."""

    type: str
    name: str
    attribute: str | None

    @property
    def plain(self) -> str:
        """The type without an address space."""
        return re.sub(r"\b(device|constant)\b", "", self.type).strip()


@dataclass(frozen=True)
class Signature:
    """`before` ends where the function begins, `body` starts after its opening brace."""

    before: str
    parameters: tuple[Parameter, ...]
    body: str

    @property
    def buffers(self) -> list[Parameter]:
        return [each for each in self.parameters if each.attribute is None]


def signature(source: str, name: str) -> Signature:
    """Of the kernel `name` in the source; what instantiates it, at the end, is left out."""
    text = re.sub(r"\ntemplate \[\[host_name\(.*\Z", "\n", source, flags=re.DOTALL)
    found = re.search(r"\[\[kernel\]\] void " + re.escape(name) + r"\(\n(.*?)\) \{\n", text, re.DOTALL)
    if found is None:
        raise NotMetal(f"no kernel {name} in the source")
    parameters = tuple(_parameter(each.strip()) for each in found.group(1).split(",\n"))
    return Signature(text[: found.start()], parameters, text[found.end() :])


def function(name: str, found: Signature) -> str:
    """The kernel as a C++ function, still in Metal; lines keep their numbers."""
    parameters = ",\n".join(f"{each.type} {each.name}" for each in found.parameters)
    return f"{found.before}void {name}(\n{parameters}) {{\n{found.body}"


def arguments(found: Signature) -> str:
    """What the entry passes: buffers in order, attributes from the running thread."""
    made, buffer = [], 0
    for each in found.parameters:
        if each.attribute is None:
            if each.plain.endswith("*"):
                made.append(f"({each.plain})buffers[{buffer}]")
            else:
                made.append(f"*({each.plain.removesuffix('&')}*)buffers[{buffer}]")
            buffer += 1
        elif each.attribute in _FIXED:
            made.append(_FIXED[each.attribute])
        elif each.type == "uint3":
            at = f"self.{ATTRIBUTES[each.attribute]}"
            made.append(f"metal::uint3({at}.x, {at}.y, {at}.z)")
        else:
            made.append(f"self.{ATTRIBUTES[each.attribute]}")
    return ", ".join(made)


def _parameter(text: str) -> Parameter:
    found = re.fullmatch(r"(.*[\s*&])(\w+)\s*\[\[(\w+)(?:\(\d+\))?\]\]", text, re.DOTALL)
    if found is None:
        raise NotMetal(f"cannot read the kernel's parameter {text!r}")
    attribute = None if found.group(3) == "buffer" else found.group(3)
    if attribute is not None and attribute not in ATTRIBUTES and attribute not in _FIXED:
        raise NotMetal(f"the shim knows no attribute {attribute!r}")
    return Parameter(found.group(1).strip(), found.group(2), attribute)
