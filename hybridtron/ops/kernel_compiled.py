"""Registers, spills, instructions and loops of compiled Triton kernels; the GPU itself need not be present.

`compile_for` compiles a kernel with Triton and ptxas. `read` disassembles several kernels' machine code in one call,
because the disassembler takes 0.25 s to start. A loop is the code between an instruction and a branch back to it.
Machine code does not show how often a loop runs, so callers that count executed instructions pass the trip counts.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridtron import compiled

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_SIZE = 16  # bytes per instruction


@dataclass(frozen=True)
class Loop:
    """A loop over the instructions with indices `first` to `last` (inclusive), nested in `depth` other loops."""

    first: int
    last: int
    depth: int


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's resources, its instructions' names, and its loops.

    registers      registers per thread
    spilled        spilled registers per thread, in bytes
    shared         shared memory per program, in bytes
    warps          warps per program
    instructions   the instructions' names, in code order
    loops          the loops among these instructions
    """

    registers: int
    spilled: int
    shared: int
    warps: int
    instructions: tuple[str, ...]
    loops: tuple[Loop, ...]

    def executed(self, trips: Sequence[int]) -> Counter[str]:
        """Map each instruction name to the number of such instructions that a warp executes.

        A loop at depth d runs `trips[d]` times in each iteration of the loop around it. Loops at depth len(trips) or
        more count as one iteration: the compiler makes such loops when it splits a kernel's innermost loop.
        """
        counts: Counter[str] = Counter()
        for index, name in enumerate(self.instructions):
            depth = max((loop.depth + 1 for loop in self.loops if loop.first <= index <= loop.last), default=0)
            times = 1
            for trip in trips[:depth]:
                times *= trip
            counts[name] += times
        return counts


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel before disassembly, with the warps and the shared memory (in bytes) that a program uses."""

    cubin: bytes
    warps: int
    shared: int


def compile_for(capability: tuple[int, int], kernel: Any, arguments: Sequence[Any], options: Any) -> MachineCode:
    """Compile a kernel for these launch arguments and compiler options, without launching it.

    `capability` is the GPU's compute capability (major, minor). Triton reads no elements of tensor arguments, only
    their dtypes and their addresses' alignment.
    """
    target_absent_gpu(capability)
    compiled_kernel = kernel.run(*arguments, grid=(1,), warmup=True, **options)
    metadata = compiled_kernel.metadata
    return MachineCode(compiled_kernel.asm["cubin"], metadata.num_warps, metadata.shared)


def target_absent_gpu(capability: tuple[int, int], properties: Mapping[str, int] | None = None) -> None:
    """Make Triton compile for this compute capability until the process ends; the GPU need not be present.

    Other packages ask Triton's driver for the GPU's `properties`.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    absent: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: target,
        utils=SimpleNamespace(get_device_properties=lambda _: properties or {}),
    )
    driver.set_active(absent)


def compiler_key() -> str | None:
    """Return a digest of the Triton and ptxas versions, or None if Triton is not installed.

    Two machines can share Triton's kernel cache if their digests are equal. Apart from these versions, a cached
    kernel's name depends only on the kernel's source, arguments and options.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    from triton.backends.nvidia.compiler import get_ptxas_version

    cache = importlib.import_module("triton.runtime.cache")
    keys = cache if hasattr(cache, "triton_key") else importlib.import_module("triton.compiler.compiler")
    return hashlib.sha256(f"{keys.triton_key()} {get_ptxas_version(90)}".encode()).hexdigest()[:16]


def read(capability: tuple[int, int], codes: Sequence[MachineCode]) -> list[CompiledKernel]:
    """Return each kernel's resources, instructions and loops; results are cached in the user's cache folder."""
    known = {cubin: kept for cubin in {code.cubin for code in codes} if (kept := _kept(_remembered(cubin)))}
    unread = [*dict.fromkeys(code.cubin for code in codes if code.cubin not in known)]
    for cubin, (names, loops) in zip(unread, _disassembled(capability, unread), strict=True):
        registers, stack = resource_usage(cubin)
        spans = [dataclasses.astuple(loop) for loop in loops]
        known[cubin] = {"registers": registers, "stack": stack, "names": names, "loops": spans}
        compiled.build(_remembered(cubin), partial(_write, known[cubin]))
    return [_kernel(code, known[code.cubin]) for code in codes]


def _kept(path: Path) -> dict[str, Any] | None:
    """Read a cached record; return None if the file is missing or incomplete."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write(record: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(record))


def _kernel(code: MachineCode, record: dict[str, Any]) -> CompiledKernel:
    loops = tuple(Loop(*span) for span in record["loops"])
    return CompiledKernel(record["registers"], record["stack"], code.shared, code.warps, tuple(record["names"]), loops)


def _remembered(cubin: bytes) -> Path:
    """Return the cache file's path for this machine code.

    The file's name also depends on this Python file's text, so that a change in this code invalidates the cache.
    """
    text = hashlib.blake2b(Path(__file__).read_bytes() + cubin, digest_size=16).hexdigest()
    return compiled.cache_folder("kernels") / f"{text}.json"


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers per thread, and the bytes of stack per thread; the stack holds spilled registers."""
    from triton import knobs

    text = _answer(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}
    return used["REG"], used["STACK"]


def _disassembled(capability: tuple[int, int], cubins: Sequence[bytes]) -> list[tuple[list[str], list[Loop]]]:
    """Return each kernel's instruction names and loops, from one call of the disassembler."""
    from triton import knobs

    texts = [instructions_of(cubin) for cubin in cubins]
    if not texts:
        return []
    major, minor = capability
    printed = _answer(b"".join(texts), knobs.nvidia.nvdisasm.path, "--binary", f"SM{major}{minor}a")
    return disassembled(printed, [len(text) // _SIZE for text in texts])


def instructions_of(cubin: bytes) -> bytes:
    """Return a compiled kernel's instructions: the section .text.* of its ELF file."""
    # The ELF header holds, at byte 40, the offset of the section table. From byte 58 on, it holds the size of a table
    # entry, the number of entries, and the index of the section with the sections' names.
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    # for each section: the offset of its name, its offset in the file, its length
    sections = [struct.unpack_from("<I20xQQ", cubin, table + index * size) for index in range(count)]
    for name, begin, length in sections:
        if cubin.startswith(b".text.", sections[names][1] + name):
            return cubin[begin : begin + length]
    raise ValueError("a compiled kernel has no section .text")


def disassembled(text: str, sizes: Sequence[int]) -> list[tuple[list[str], list[Loop]]]:
    """Split the disassembler's output for several kernels; return each kernel's instruction names and loops.

    `sizes` has each kernel's instruction count, in the output's order.
    """
    lines = filter(None, map(_INSTRUCTION.match, text.splitlines()))
    instructions = [(int(line[1], 16) // _SIZE, line[2], line[3]) for line in lines]
    kernels: list[tuple[list[str], list[Loop]]] = []
    start = 0
    for size in sizes:
        kernel = instructions[start : start + size]
        # key: index of a loop's first instruction; value: index of the last branch back to this instruction
        spans: dict[int, int] = {}
        for index, name, operands in kernel:
            target = _TARGET.search(operands) if name.startswith("BRA") else None
            begin = index if target is None else int(target[1], 16) // _SIZE
            if begin < index:  # a branch to itself is padding after the code, not a loop
                spans[begin - start] = index - start
        kernels.append(([name for _, name, _ in kernel], _nested(spans)))
        start += size
    return kernels


def _nested(spans: dict[int, int]) -> list[Loop]:
    pairs = list(spans.items())
    return [
        Loop(first, last, sum(a <= first and last <= b and (a, b) != (first, last) for a, b in pairs))
        for first, last in pairs
    ]


def _answer(code: bytes, *command: str) -> str:
    """Write machine code to a temporary file, run a command on the file, and return the command's output."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
