"""Compiler for the Triton kernels that some code would launch on a Hopper GPU; the machine need not have one.

    launches, buffers = compile_calls("tests.ops.scan.test_kernels", "shipped")

runs `shipped()` of that module in a process of its own, where a launch compiles for sm_90 and does nothing else. The
function runs ops on tensors of the meta device, at users' sizes. So the arguments, options and grids are the ones that
would be launched, and large buffers cost nothing. It returns every different kernel and grid, with ptxas's results, and
the size of every tensor that was allocated on the way.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybridtron.ops.kernel_compiled import resource_usage, target_absent_gpu

ROOT = Path(__file__).parents[2]
CAPABILITY = (9, 0)
SHARED_MEMORY = 227 * 1024  # bytes that one block of an H100 may use
REGISTERS = 255  # of one thread
SPILLED = {
    "3.6": {"group_gradients": 8, "token_gradients": 208, "_norm_backward": 48},
    "3.7": {"group_gradients": 32, "token_gradients": 232, "_norm_backward": 48},
}
"""Bytes that one thread may keep on the stack, by Triton's version and kernel; 3.9 spills nothing.

Those of token_gradients are spilled in fp32 at the largest sizes alone, those of _norm_backward in
groups of more than 4,096 channels.
"""
GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # blocks along each axis


@dataclass(frozen=True)
class Launch:
    """A kernel as it would be launched: bytes of shared memory and, for one thread, registers and bytes of stack.

    Stack is where registers are spilled to. `dump` is its machine code's text, for counting instructions.
    """

    kernel: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    shared: int
    registers: int
    stack: int
    instructions: dict[str, int]

    def waves(self) -> int:
        """Count how often an H100 is filled with programs; the last time perhaps in part."""
        registers = -(-self.registers // 8) * 8 * 32 * self.num_warps
        at_once = min(65536 // registers, 64 // self.num_warps, 32, SHARED_MEMORY // (self.shared + 1024))
        return -(-math.prod(self.grid) // (132 * at_once))

    def faults(self) -> list[str]:
        """List properties that an H100 would refuse or run slowly."""
        spilled = SPILLED.get(".".join(version("triton").split(".")[:2]), {})
        limits = {
            f"{self.shared} bytes of shared memory": self.shared > SHARED_MEMORY,
            f"{self.stack} bytes of registers spilled": self.stack > spilled.get(self.kernel, 0),
            f"a grid of {self.grid}": any(size > most for size, most in zip(self.grid, GRID, strict=False)),
        }
        return [f"{self.kernel}: {fault}" for fault, holds in limits.items() if holds]


def compile_calls(module: str, function: str) -> tuple[list[Launch], list[int]]:
    """Every different launch of `module.function()`, and the elements of each tensor that it allocates."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "tests.ops.compiling", module, function, str(answer)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        answered = json.loads(answer.read_text())
    return [Launch(**{**launch, "grid": tuple(launch["grid"])}) for launch in answered["launches"]], answered["buffers"]


def record(module: str, function: str) -> dict[str, Any]:
    """The subprocess's side."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from triton.runtime.jit import JITFunction

    target_absent_gpu(CAPABILITY)
    launches: dict[tuple[Any, ...], Launch] = {}
    compile_only = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = compile_only(kernel, *args, grid=grid, warmup=True, **options)
        if callable(grid):
            grid = grid(dict(zip(kernel.arg_names, args, strict=False)) | options)
        key = (compiled.hash, *grid)
        if key not in launches:
            launches[key] = described(compiled, kernel.__name__, grid)

    class Buffers(TorchDispatchMode):
        """Remembers the size of every tensor that an operation makes, views left out."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if not func.is_view:
                sizes.extend(leaf.numel() for leaf in tree_leaves(out) if hasattr(leaf, "numel"))
            return out

    JITFunction.run = run
    wanted = getattr(importlib.import_module(module), function)
    sizes: list[int] = []
    with Buffers():
        wanted()
    return {"launches": [asdict(launch) for launch in launches.values()], "buffers": sizes}


def described(compiled: Any, name: str, grid: tuple[int, ...]) -> Launch:
    registers, stack = resource_usage(compiled.asm["cubin"])
    ptx = re.findall(r"^\s*(?:@%p\d+ )?([a-z]\w*)\.", compiled.asm["ptx"], re.MULTILINE)
    metadata = compiled.metadata
    return Launch(
        name,
        tuple(grid),
        metadata.num_warps,
        metadata.num_stages,
        metadata.shared,
        registers,
        stack,
        {kind: ptx.count(kind) for kind in ("ex2", "shfl", "bar", "ld", "st", "fma", "atom", "red")},
    )


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(record(sys.argv[1], sys.argv[2])))


def assert_gates_fit(launches: list[Launch], resident_warps: int) -> None:
    """Assert that kernels of gates fit an H100 without spills and atomics.

    A multiprocessor must hold `resident_warps` warps of the backward kernel.
    """
    assert {launch.kernel for launch in launches} == {"forward_gates", "backward_gates", "_sum_of_parts"}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert all(launch.stack == 0 for launch in launches)
    assert not any(launch.instructions["atom"] + launch.instructions["red"] for launch in launches)
    registers = [launch.registers for launch in launches if launch.kernel == "backward_gates"]
    assert max(registers) * 32 * resident_warps <= 65536  # a multiprocessor's registers
