"""What Triton and ptxas make of a kernel for a GPU that need not be there: registers, spills, and its loops.

The machine code is read as text. A loop is what lies between a label and a branch back to it. How often a loop runs is
not in the code; who asks for instructions says so.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridtron import compiled

_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"`?\(?(\.L_\w+)")


@dataclass(frozen=True)
class Loop:
    """Instructions `first` to `last`, `depth` other loops around them."""

    first: int
    last: int
    depth: int


@dataclass(frozen=True)
class CompiledKernel:
    """Of one thread: registers, bytes of registers spilled; of a program: warps, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int
    warps: int
    instructions: tuple[str, ...]
    loops: tuple[Loop, ...]

    def executed(self, trips: Sequence[int]) -> Counter[str]:
        """Instructions that a warp executes, where a loop at depth d runs `trips[d]` times for each of the one around.

        A loop deeper than that is one that the compiler made of the last.
        """
        found: Counter[str] = Counter()
        for index, name in enumerate(self.instructions):
            depth = max((loop.depth + 1 for loop in self.loops if loop.first <= index <= loop.last), default=0)
            times = 1
            for trip in trips[:depth]:
                times *= trip
            found[name] += times
        return found


def compile_for(capability: tuple[int, int], kernel: Any, arguments: Sequence[Any], options: Any) -> CompiledKernel:
    """Compile as a launch with these arguments would, tensors standing for aligned pointers; nothing is launched."""
    target_absent_gpu(capability)
    made = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    return read(made.asm["cubin"], made.metadata.num_warps, made.metadata.shared)


def target_absent_gpu(capability: tuple[int, int]) -> None:
    """From here on Triton compiles for this GPU, which need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    absent: Any = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target
    )
    driver.set_active(absent)


@functools.lru_cache(maxsize=256)
def read(cubin: bytes, warps: int, shared: int) -> CompiledKernel:
    """What the machine code says: kept in the user's cache, as the disassembler needs half a second for each kernel."""
    known = _remembered(cubin)
    if not known.exists():
        compiled.build(known, lambda path: _write(path, _read(cubin)))
    found = json.loads(known.read_text())
    loops = tuple(Loop(*each) for each in found["loops"])
    return CompiledKernel(found["registers"], found["stack"], shared, warps, tuple(found["names"]), loops)


def _remembered(cubin: bytes) -> Path:
    """The file that says what this machine code was read as, by this text."""
    text = hashlib.blake2b(Path(__file__).read_bytes() + cubin, digest_size=16).hexdigest()
    return compiled.cache_folder("kernels") / f"{text}.json"


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found))


def _read(cubin: bytes) -> dict[str, Any]:
    from triton import knobs

    registers, stack = resource_usage(cubin)
    names, loops = disassembled(_answer(cubin, knobs.nvidia.nvdisasm.path, "-c"))
    return {"registers": registers, "stack": stack, "names": names, "loops": [dataclasses.astuple(x) for x in loops]}


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Of one thread: registers, and bytes of the stack, where registers are spilled to."""
    from triton import knobs

    text = _answer(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return used["REG"], used["STACK"]


def disassembled(text: str) -> tuple[list[str], list[Loop]]:
    """The names of all instructions, and the loops among them."""
    names: list[str] = []
    labels: dict[str, int] = {}
    spans: dict[int, int] = {}  # from where a loop begins to the last branch back to it
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(names)
        elif found := _INSTRUCTION.match(line):
            names.append(found[1])
            target = _TARGET.search(found[2]) if found[1].startswith("BRA") else None
            begin = None if target is None else labels.get(target[1])
            if begin is not None and begin < len(names) - 1:  # a branch to itself pads the end
                spans[begin] = len(names) - 1
    pairs = list(spans.items())
    return names, [
        Loop(first, last, sum(a <= first and last <= b and (a, b) != (first, last) for a, b in pairs))
        for first, last in pairs
    ]


def _answer(cubin: bytes, *command: str) -> str:
    """What a program prints of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
