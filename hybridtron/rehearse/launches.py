"""Launches of Triton kernels of our own: which ones, with what, and what they read and write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridtron.ops.kernel_compiled import MachineCode, compile_for
from hybridtron.ops.kernel_launch import kernel_name
from hybridtron.planning.rates import GPU
from hybridtron.rehearse.census import size_of


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel with all that decides how it is compiled and how often it runs; of tensors the types are kept."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """`scan.walk`: the function's, after its op's."""
        return kernel_name(self.kernel)

    @property
    def named(self) -> dict[str, Any]:
        """Arguments and options by the names of the kernel's parameters."""
        return {**dict(zip(self.kernel.arg_names, self.arguments, strict=False)), **dict(self.options)}

    def compiled(self, gpu: GPU) -> MachineCode:
        """For this GPU; a type stands for a pointer that is aligned."""
        given = [torch.empty(0, dtype=x, device="meta") if isinstance(x, torch.dtype) else x for x in self.arguments]
        return compile_for(gpu.capability, self.kernel, given, dict(self.options))


@dataclass
class Launches:
    """Every different launch, in order of its first."""

    different: dict[KernelLaunch, int] = field(default_factory=dict)

    def note(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[str, int, int]:
        """The kernel's name, the bytes of the tensors that it is given, each once, and the number of the launch."""
        types = tuple(each.dtype if isinstance(each, Tensor) else each for each in arguments)
        launch = KernelLaunch(kernel, tuple(grid), types, tuple(sorted(options.items())))
        number = self.different.setdefault(launch, len(self.different))
        moved = sum(size_of(each) for each in arguments if isinstance(each, Tensor))
        return launch.name, moved, number
