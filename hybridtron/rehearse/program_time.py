"""Latency model for one program of a Triton kernel: the cycles from its first instruction to its last result.

The model goes through the compiled instructions in order, as a warp does. An instruction is issued when the stall
cycles of the instruction before it have passed and the scoreboards in `waits` are free (`instructions.py`). All warps
of the program execute the same instruction at the same time, so they share each unit:

    issue       each of four schedulers issues one warp instruction a cycle
    memory      the unit for shared memory, shuffles and global memory moves 128 bytes a cycle
    slow        the unit for exp2, logarithms, square roots and conversions of float64: 16 results a cycle
    float64     64 results a cycle, which is half the rate of float32
    tensor      tensor cores: 4096 bf16 FLOPs a cycle, or 2048 in TF32

These are the rates of one multiprocessor with compute capability 9.0, from the CUDA C++ programming guide and the
H100's data sheet. Latencies in cycles:

    SHARED_CYCLES   28.6, measured on an H100 SXM by a chain of dependent loads from shared memory
                    (github.com/ahmadsharif1/cuda_study, commit f2e2f70). Barriers, shuffles and reads of special
                    registers are assumed to take as long, because no measurement was found
    SLOW_CYCLES     16, for sm_86 (pjt222/ga104-cuda-kernels, docs/control_codes.md)
    TENSOR_CYCLES   32, from the same source
    FLOAT64_CYCLES  assumed to be as long as SLOW_CYCLES

Branches that skip instructions are not taken. `Program.trips` gives the iterations of each loop. Bank conflicts and
instruction cache misses are not modelled.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybridtron.ops.kernel_compiled import Loop
from hybridtron.rehearse.instructions import Instruction

SHARED_CYCLES, SLOW_CYCLES, TENSOR_CYCLES = 28.6, 16.0, 32.0
FLOAT64_CYCLES = SLOW_CYCLES
SCHEDULERS = 4
BF16_FLOPS, TF32_FLOPS = 4096, 2048  # per cycle and multiprocessor
ON_CHIP = {"SHFL", "LDS", "STS", "LDSM", "STSM", "ATOMS"}  # shuffles and shared memory
GLOBAL = {"LDG", "STG", "LDGSTS", "LDL", "STL", "RED", "ATOM", "ATOMG"}  # global memory, and spilled registers
STORES = {"STG", "STS", "STL", "STSM", "RED"}  # instructions that no other instruction waits for
SLOW = {"MUFU"}
FLOAT64 = {"DADD", "DMUL", "DFMA", "DSETP"}
CONVERSIONS = {"F2F", "F2I", "I2F"}
PRODUCT = re.compile(r"([A-Z]*MMA)\.(\d+)x(\d+)x(\d+)")
SMALL_PRODUCT = re.compile(r"(HMMA)\.(16)(8)(16|8|4)\b")
WIDTHS = {"64": 2, "128": 4, "2": 2, "4": 4}  # suffix, as in LDS.128 or LDSM.16.M88.4 -> 4-byte words per thread
WARPS_OF_PRODUCT = {"HGMMA": 4}  # instruction -> number of warps that execute it together
STEADY = 3  # number of a loop's iterations that are modelled; further iterations take as long as the last


@dataclass(frozen=True)
class Memory:
    """Global memory, as one program sees it.

    latency  cycles until a load's value arrives, if nothing else is loaded
    word     cycles that it takes to move one word (4 bytes) for each thread of the program
    """

    latency: float
    word: float


def words(name: str) -> int:
    """Return how many four-byte words an instruction moves for each thread.

    The unit for shared memory moves 128 bytes a cycle, which is one word for each thread in a warp (32 threads).
    """
    _, _, suffix = name.partition(".")
    return max([1, *(number for mark, number in WIDTHS.items() if mark in suffix.split("."))])


def flops(name: str) -> float:
    """Return a tensor-core instruction's FLOPs per warp, or 0 for any other instruction."""
    match = PRODUCT.match(name) or SMALL_PRODUCT.match(name)
    if match is None:
        return 0.0
    rows, columns, depth = map(int, match.groups()[1:])
    return 2 * rows * columns * depth / WARPS_OF_PRODUCT.get(match[1], 1)


def demand(name: str) -> tuple[str, float]:
    """Return an instruction's unit, and the unit's cycles for one warp.

    The unit is an empty string for instructions that only take time to be issued.
    """
    base = name.partition(".")[0]
    if base in ON_CHIP or base in GLOBAL:
        return "memory", float(words(name))
    if base in SLOW or (base in CONVERSIONS and "F64" in name):
        return "slow", 2.0
    if base in FLOAT64:
        return "float64", 0.5
    if per_warp := flops(name):
        return "tensor", per_warp / (TF32_FLOPS if "TF32" in name else BF16_FLOPS)
    return "", 0.0


def unit_cycles(executed: Counter[str]) -> dict[str, float]:
    """Return the cycles that each unit needs for one warp.

    executed  instruction's name -> how often a warp executes this instruction
    """
    cycles: dict[str, float] = defaultdict(float, {"issue": sum(executed.values()) / SCHEDULERS})
    for name, times in executed.items():
        unit, needed = demand(name)
        if unit:
            cycles[unit] += times * needed
    return dict(cycles)


def global_words(executed: Counter[str]) -> int:
    """Return how many words a thread reads and writes in global memory."""
    return sum(times * words(name) for name, times in executed.items() if name.partition(".")[0] in GLOBAL)


@dataclass
class _Clock:
    """Moment of the next instruction, and the moments at which units and scoreboards become free, in cycles."""

    now: float = 0.0
    units: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    scoreboards: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    products: float = 0.0  # end of all products so far
    copies: float = 0.0  # end of all copies from global to shared memory so far

    @property
    def end(self) -> float:
        """Moment at which the last result is ready."""
        ready = [moment for moments in self.scoreboards.values() for moment in moments]
        return max([self.now, self.products, self.copies, *self.units.values(), *ready])

    def skip(self, cycles: float) -> None:
        """Move all moments forward."""
        self.now += cycles
        self.products += cycles
        self.copies += cycles
        for unit in self.units:
            self.units[unit] += cycles
        for moments in self.scoreboards.values():
            moments[:] = [moment + cycles for moment in moments]

    def wait(self, scoreboard: int, keeps: int = 0) -> None:
        """Wait until at most `keeps` of the scoreboard's results are missing."""
        moments = sorted(self.scoreboards[scoreboard])
        done = moments[: len(moments) - keeps]
        self.now = max(self.now, *done) if done else self.now
        self.scoreboards[scoreboard] = moments[len(done) :]


@dataclass
class Program:
    """A program that executes instructions.

    instructions  the compiled instructions
    loops         the loops among them
    trips         trip counts: a loop at depth d runs `trips[d]` times in each iteration of the loop around it
    warps         number of warps
    memory        global memory, as the program sees it
    """

    instructions: Sequence[Instruction]
    loops: Sequence[Loop]
    trips: Sequence[int]
    warps: int
    memory: Memory
    _clock: _Clock = field(default_factory=_Clock)

    def cycles(self) -> float:
        """Return the cycles until the program's last result is ready."""
        self._clock = _Clock()
        self._run(0, len(self.instructions) - 1, 0)
        return self._clock.end

    def _run(self, first: int, last: int, depth: int) -> None:
        """Execute the instructions from `first` to `last`, which are inside `depth` nested loops."""
        index = first
        while index <= last:
            loop = next((loop for loop in self.loops if loop.first == index and loop.depth == depth), None)
            if loop is None or loop.last > last:
                self._execute(self.instructions[index])
                index += 1
            else:
                self._repeat(loop)
                index = loop.last + 1

    def _repeat(self, loop: Loop) -> None:
        times = self.trips[loop.depth] if loop.depth < len(self.trips) else 1
        before = self._clock.now
        for _ in range(min(times, STEADY)):
            before = self._clock.now
            self._run(loop.first, loop.last, loop.depth + 1)
        self._clock.skip((self._clock.now - before) * max(0, times - STEADY))

    def _execute(self, instruction: Instruction) -> None:
        clock = self._clock
        for scoreboard in instruction.waits:
            clock.wait(scoreboard)
        if instruction.base == "DEPBAR":
            clock.wait(0, instruction.keeps)
        if instruction.name.startswith("WARPGROUP.DEPBAR"):
            clock.now = max(clock.now, clock.products)
        read, ready = self._work(instruction)
        if instruction.sets is not None:
            clock.scoreboards[instruction.sets].append(ready)
        if instruction.frees is not None:
            clock.scoreboards[instruction.frees].append(read)
        issued = max(instruction.stall, 1, -(-self.warps // SCHEDULERS))
        clock.now += issued + (SHARED_CYCLES if instruction.base == "BAR" else 0.0)

    def _work(self, instruction: Instruction) -> tuple[float, float]:
        """Execute an instruction on its unit. Return two moments: operands read, and result ready."""
        clock = self._clock
        base = instruction.base
        unit, cycles = demand(instruction.name)
        if base == "LDGDEPBAR":
            return clock.now, clock.copies
        if not unit:
            return clock.now, clock.now + SHARED_CYCLES
        clock.units[unit] = read = max(clock.now, clock.units[unit]) + cycles * self.warps
        if base in GLOBAL:
            clock.units["bytes"] = max(read, clock.units["bytes"]) + self.memory.word * words(instruction.name)
            ready = clock.units["bytes"] + self.memory.latency
        else:
            ready = read + {"slow": SLOW_CYCLES, "float64": FLOAT64_CYCLES, "tensor": TENSOR_CYCLES}.get(
                unit, SHARED_CYCLES
            )
        if base in STORES:
            return read, read
        if unit == "tensor":
            clock.products = max(clock.products, ready)
        if base == "LDGSTS":
            clock.copies = max(clock.copies, ready)
        return read, ready
