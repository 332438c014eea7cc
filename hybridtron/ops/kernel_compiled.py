"""What Triton and ptxas make of a kernel for a GPU that need not be there: registers, spills, and its loops.

The machine code is read as text, that of all kernels together: the disassembler needs a quarter of a second to begin. A
loop is what lies between an instruction and a branch back to it. How often a loop runs is not in the code; who asks for
instructions says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import json
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridtron import compiled

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_SIZE = 16  # bytes of an instruction


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


@dataclass(frozen=True)
class MachineCode:
    """A kernel as compiled, unread: with the warps of a program and its bytes of shared memory."""

    cubin: bytes
    warps: int
    shared: int


def compile_for(capability: tuple[int, int], kernel: Any, arguments: Sequence[Any], options: Any) -> MachineCode:
    """Compile as a launch with these arguments would, tensors standing for aligned pointers; nothing is launched."""
    target_absent_gpu(capability)
    made = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    return MachineCode(made.asm["cubin"], made.metadata.num_warps, made.metadata.shared)


def target_absent_gpu(capability: tuple[int, int]) -> None:
    """From here on Triton compiles for this GPU, which need not be there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    absent: Any = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target
    )
    driver.set_active(absent)


def compiler_key() -> str | None:
    """A digest of Triton and its ptxas: kernels compiled elsewhere are found in a cache only where it is the same.

    None where there is no Triton. Kernels' text, arguments and options decide the rest of a cached name.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    from triton.backends.nvidia.compiler import get_ptxas_version

    cache = importlib.import_module("triton.runtime.cache")
    keys = cache if hasattr(cache, "triton_key") else importlib.import_module("triton.compiler.compiler")
    return hashlib.sha256(f"{keys.triton_key()} {get_ptxas_version(90)}".encode()).hexdigest()[:16]


def read(capability: tuple[int, int], codes: Sequence[MachineCode]) -> list[CompiledKernel]:
    """What the machine code of each says. What it was read as is kept in the user's cache."""
    known = {cubin: kept for cubin in {code.cubin for code in codes} if (kept := _kept(_remembered(cubin)))}
    unread = [*dict.fromkeys(code.cubin for code in codes if code.cubin not in known)]
    for cubin, (names, loops) in zip(unread, _disassembled(capability, unread), strict=True):
        registers, stack = resource_usage(cubin)
        spans = [dataclasses.astuple(loop) for loop in loops]
        known[cubin] = found = {"registers": registers, "stack": stack, "names": names, "loops": spans}
        compiled.build(_remembered(cubin), partial(_write, found))
    return [_kernel(code, known[code.cubin]) for code in codes]


def _kept(path: Path) -> dict[str, Any] | None:
    """The record that was written there; None where nothing was, or a part of it is missing."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write(found: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(found))


def _kernel(code: MachineCode, found: dict[str, Any]) -> CompiledKernel:
    loops = tuple(Loop(*each) for each in found["loops"])
    return CompiledKernel(found["registers"], found["stack"], code.shared, code.warps, tuple(found["names"]), loops)


def _remembered(cubin: bytes) -> Path:
    """The file that says what this machine code was read as, by this text."""
    text = hashlib.blake2b(Path(__file__).read_bytes() + cubin, digest_size=16).hexdigest()
    return compiled.cache_folder("kernels") / f"{text}.json"


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Of one thread: registers, and bytes of the stack, where registers are spilled to."""
    from triton import knobs

    text = _answer(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return used["REG"], used["STACK"]


def _disassembled(capability: tuple[int, int], cubins: Sequence[bytes]) -> list[tuple[list[str], list[Loop]]]:
    """Of each the names of all instructions, and the loops among them."""
    from triton import knobs

    texts = [instructions_of(cubin) for cubin in cubins]
    if not texts:
        return []
    major, minor = capability
    printed = _answer(b"".join(texts), knobs.nvidia.nvdisasm.path, "--binary", f"SM{major}{minor}a")
    return disassembled(printed, [len(text) // _SIZE for text in texts])


def instructions_of(cubin: bytes) -> bytes:
    """The section of an ELF file that holds the kernel's instructions."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    # of each section: where its name stands among the names, where it begins, how long it is
    sections = [struct.unpack_from("<I20xQQ", cubin, table + index * size) for index in range(count)]
    for name, begin, length in sections:
        if cubin.startswith(b".text.", sections[names][1] + name):
            return cubin[begin : begin + length]
    raise ValueError("a compiled kernel has no section .text")


def disassembled(text: str, sizes: Sequence[int]) -> list[tuple[list[str], list[Loop]]]:
    """The names of all instructions, and the loops among them, of kernels of these sizes that were printed as one."""
    lines = filter(None, map(_INSTRUCTION.match, text.splitlines()))
    found = [(int(line[1], 16) // _SIZE, line[2], line[3]) for line in lines]
    each: list[tuple[list[str], list[Loop]]] = []
    start = 0
    for size in sizes:
        own = found[start : start + size]
        spans: dict[int, int] = {}  # from where a loop begins to the last branch back to it
        for index, name, operands in own:
            target = _TARGET.search(operands) if name.startswith("BRA") else None
            begin = index if target is None else int(target[1], 16) // _SIZE
            if begin < index:  # a branch to itself pads the end
                spans[begin - start] = index - start
        each.append(([name for _, name, _ in own], _nested(spans)))
        start += size
    return each


def _nested(spans: dict[int, int]) -> list[Loop]:
    pairs = list(spans.items())
    return [
        Loop(first, last, sum(a <= first and last <= b and (a, b) != (first, last) for a, b in pairs))
        for first, last in pairs
    ]


def _answer(code: bytes, *command: str) -> str:
    """What a program prints of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
