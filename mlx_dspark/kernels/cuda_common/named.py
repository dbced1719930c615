"""A CUDA kernel whose text MLX is given once, and not with every launch.

MLX puts the text of a kernel together for every launch, and a graph holds all of them until it is evaluated:
megabytes for a forward, which cost the host more than the launches. Compiled kernels it keeps by name as long
as the process lives, and looks at a text only where the name is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

_FACTS = ("_shape", "_strides", "_ndim")
"""What MLX passes of an input whose name with this ending is in the text."""


class NamedKernel:
    """`mx.fast.cuda_kernel`, with the same arguments and calls.

    The name must tell its text from all others. The first call with a `template` compiles the kernel and
    waits for it: it is launched on zeros in place of the first `lazy` inputs, those that a graph may still
    have to compute; None: in place of all. So what a device refuses is raised there. `factory` stands in for
    `mx.fast.cuda_kernel`; `once=False` gives the whole text with every launch.
    """

    def __init__(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        header: str = "",
        source: str,
        lazy: int | None = None,
        factory: Callable[..., Any] | None = None,
        once: bool | None = None,
        **form: Any,
    ) -> None:
        make = factory or mx.fast.cuda_kernel
        form = {"name": name, "input_names": input_names, **form}
        self._whole: Any = make(header=header, source=source, **form)
        self._lazy = len(input_names) if lazy is None else lazy
        self._brief: Any = self._whole
        self._compiled: set[tuple[str, ...]] = set()
        self._once = factory is None if once is None else once
        if self._once:
            asked = [name + fact for name in input_names for fact in _FACTS if name + fact in source]
            self._brief = make(header="", source=f"// {' '.join(asked)}", **form)

    def __call__(
        self, *, inputs: Sequence[mx.array], template: Sequence[tuple[str, Any]] = (), **call: Any
    ) -> list[mx.array]:
        if template:
            call["template"] = template
        kind = tuple(str(value) for _, value in template)
        if self._once and kind not in self._compiled:
            zeros = [mx.zeros(each.shape, each.dtype) for each in inputs[: self._lazy]]
            mx.eval(self._whole(inputs=[*zeros, *inputs[self._lazy :]], **call))
            self._compiled.add(kind)
        return self._brief(inputs=inputs, **call)
