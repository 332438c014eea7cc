"""Recorded launches of our own Triton kernels: their arguments, and the bytes that they read and write."""

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
    """A distinct launch: a Triton kernel with its grid, arguments and options.

    Launches are distinct if their compiled code or their loops' trip counts may differ. In `arguments`, each tensor is
    replaced by its dtype.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Name of the op's folder and of the kernel's function, such as `scan.walk`."""
        return kernel_name(self.kernel)

    @property
    def named(self) -> dict[str, Any]:
        """Arguments and options by parameter name."""
        return {**dict(zip(self.kernel.arg_names, self.arguments, strict=False)), **dict(self.options)}

    def compiled(self, gpu: GPU) -> MachineCode:
        """Compile the kernel for this GPU, and return its machine code.

        Each dtype in `arguments` becomes a tensor without elements, whose address Triton assumes to be aligned.
        """
        arguments = [
            torch.empty(0, dtype=x, device="meta") if isinstance(x, torch.dtype) else x for x in self.arguments
        ]
        return compile_for(gpu.capability, self.kernel, arguments, dict(self.options))


@dataclass
class Launches:
    """All distinct launches. `different` maps each launch to its index, in the order of the first occurrences."""

    different: dict[KernelLaunch, int] = field(default_factory=dict)

    def note(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[str, int, int]:
        """Record a launch. Return three values:

        - the kernel's name
        - the bytes in all its tensor arguments, which the kernel is assumed to read or write once
        - the distinct launch's index
        """
        types = tuple(argument.dtype if isinstance(argument, Tensor) else argument for argument in arguments)
        launch = KernelLaunch(kernel, tuple(grid), types, tuple(sorted(options.items())))
        number = self.different.setdefault(launch, len(self.different))
        moved = sum(size_of(argument) for argument in arguments if isinstance(argument, Tensor))
        return launch.name, moved, number
