"""Time model for our own Triton kernels: a GPU does six kinds of work at once, and the slowest determines the time.

    bytes       memory traffic; each tensor is read or written once
    products    tensor-core instructions, at the rate that cuBLAS reaches
    issue       issuing instructions: each of a multiprocessor's four schedulers issues one warp instruction a cycle
    units       a multiprocessor's execution units (`program_time.py`)
    float64     the unit for float64, which is half as fast as the unit for float32
    latency     the time of one program, multiplied by the number of rounds

A round is a number of programs that run at the same time: as many as fit on the multiprocessors, or all programs of the
grid if these are fewer. A kernel that moves few bytes may therefore be slow: if it has few programs, or if its programs
are long chains of loads and products. Instructions are counted in the compiled code, and multiplied by their loops'
trip counts. If resident programs wait for the same unit, only the unit's rate is modelled, so the times are lower
bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from hybridtron.ops.kernel_compiled import CompiledKernel
from hybridtron.planning.rates import CACHE, CACHE_S, GPU, MEMORY_S
from hybridtron.rehearse.instructions import Instruction
from hybridtron.rehearse.launches import KernelLaunch
from hybridtron.rehearse.program_time import Memory, Program, flops, global_words, unit_cycles

# limits of a multiprocessor (Hopper and Blackwell): registers, bytes of shared memory, warps, programs
REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 228 * 1024, 64, 32
RESERVED = 1024  # bytes of shared memory that CUDA reserves for each program


def _tiles(named: Mapping[str, Any]) -> list[int]:
    return [named["CHUNK"] // named["TOKENS"], named["TOKENS"]]


def _keys_of_queries(named: Mapping[str, Any]) -> int:
    """Return the trip count for a loop over the keys that a query tile sees, in sparse attention.

    With KEPT, a tile reads `width` listed keys. Without KEPT, a tile reads a range of keys, and the result is the
    average over a sequence's tiles.
    """
    range_length = named["QUERIES"] * named["total"] // named["length"] + named["most"]
    return -(-(named["width"] if named["KEPT"] else range_length) // named["KEYS"])


def _queries_of_keys(named: Mapping[str, Any]) -> int:
    """Return the average trip count for a loop over the queries that see a key tile, in sparse attention.

    `most` is the maximum number of keys that a query sees. With KEPT, some keys are seen by more queries than others,
    so the estimate counts `most` twice.
    """
    range_length = named["KEYS"] + (1 + named["KEPT"]) * named["most"]
    return -(-range_length * named["length"] // (named["total"] * named["QUERIES"]))


def _slices_of_values(named: Mapping[str, Any]) -> int:
    return -(-named["P"] // named["VALUES"])


def _blocks_and_slices(named: Mapping[str, Any]) -> list[int]:
    """Return trip counts for SSD's two kinds of outer loops, over blocks of a chunk and over slices of the state.

    A program loops over the blocks up to its own block, or from its own block on. On average these are (n + 1) / 2 of a
    chunk's n blocks, which is rounded up. Both kinds of loops share one trip count, the larger one. If every head has
    its own B and C, another loop over slices is inside the loop over blocks.
    """
    blocks = (named["CHUNK"] // named["OWN"] + 2) // 2
    slices = named["BLOCK_N"] // named["SLICE"]
    return [max(blocks, slices), slices]


LOOPS: dict[str, Callable[[Mapping[str, Any], tuple[int, ...]], list[int]]] = {
    "scan.walk": lambda named, _: [named["CHUNK"]],
    "scan.retrace": lambda named, _: _tiles(named) if named["CHUNK"] > named["TOKENS"] else [named["CHUNK"]],
    "scan.walk_back": lambda named, _: _tiles(named),
    "scan.chain": lambda named, _: [-(-named["parts"] // named["STEPS"])],
    "scan.gradients": lambda named, _: [named["N"]],
    "experts.choose": lambda named, _: [named["GROUPS"], named["LIMIT"]] if named["LIMIT"] < named["GROUPS"] else [],
    "experts.total": lambda named, _: [-(-named["tiles"] // named["TILES"])],
    "experts.count": lambda named, _: [named["ROUNDS"]],
    "experts.starts": lambda named, _: [-(-named["parts"] // named["PARTS"])],
    "conv.backward": lambda named, _: [named["TOKENS"] + named["WIDTH"] - 1],
    "norm.backward": lambda named, grid: [-(-named["rows"] // (named["ROWS"] * grid[0]))],
    **dict.fromkeys(
        ("gated_norm.norm_backward", "gated_norm.scale_backward"),
        lambda named, grid: [-(-named["rows"] * named["length"] // grid[0])],
    ),
    **dict.fromkeys(
        ("gated_norm.backward", "delta.backward_gates", "gla.backward_gates"),
        lambda named, grid: [-(-named["tokens"] // (named["TOKENS"] * grid[0]))],
    ),
    "softmax.sums_of_rows": lambda named, _: [-(-named["size"] // named["BLOCK"])],
    **dict.fromkeys(
        ("gla.scores", "gla.outputs", "gla.value_gradients"), lambda named, _: [named["BLOCK_N"] // named["KEYS"]]
    ),
    **dict.fromkeys(
        ("gla.pair_weights", "gla.token_gradients"), lambda named, _: [named["BLOCK_P"] // named["VALUES"]]
    ),
    "gla.pass_states": lambda named, _: [named["chunks"]],
    **dict.fromkeys(("delta.walk", "delta.walk_back"), lambda named, _: [named["chunks"]]),
    **dict.fromkeys(
        ("delta.scores_by_head", "delta.scores_by_channel", "delta.outputs"),
        lambda named, _: [named["BLOCK_N"] // named["KEYS"]],
    ),
    **dict.fromkeys(
        ("delta.pair_weights", "delta.token_gradients"), lambda named, _: [named["BLOCK_P"] // named["VALUES"]]
    ),
    "delta.inverse": lambda named, _: [named["PART"] - 1],
    "sparse.best_keys": lambda named, _: [named["before"] + named["tiles"]],
    "sparse.attend": lambda named, _: [_keys_of_queries(named)],
    "sparse.query_gradients": lambda named, _: [_keys_of_queries(named), _slices_of_values(named)],
    "sparse.key_gradients": lambda named, _: [_queries_of_keys(named), _slices_of_values(named)],
    "sparse.value_gradients": lambda named, _: [_queries_of_keys(named)],
    "sparse.along_outputs": lambda named, _: [_slices_of_values(named)],
    "ssd.walk": lambda named, _: [named["chunks"]],
    "ssd.group_scores": lambda named, _: [named["BLOCK_N"] // named["SLICE"]],
    **dict.fromkeys(("ssd.outputs", "ssd.token_gradients"), lambda named, _: _blocks_and_slices(named)),
    "ssd.group_gradients": lambda named, _: [named["heads"] // named["groups"] // named["splits"]],
    "ssd.sum_of_splits": lambda named, _: [named["SPLITS"]],
    "ops.sum_of_parts": lambda named, _: [-(-named["parts"] // named["PARTS"])],
    "ssd.step_gradients": lambda named, _: [named["PARTS"]],
}
"""For each kernel with loops, a function that returns the trip counts of its loops, outermost loop first.

The function has two parameters: the kernel's arguments by name, and the kernel's grid.
"""


KINDS = ("bytes", "products", "issue", "units", "float64", "latency")


@dataclass(frozen=True)
class KernelTime:
    """Modelled time for a launch: the seconds for each of the six kinds of work.

    warps   how many warps run on a multiprocessor at a time
    rounds  how many rounds of programs a multiprocessor runs, one round after another
    """

    bytes: float
    products: float
    issue: float
    units: float
    float64: float
    latency: float
    warps: int
    rounds: int

    @property
    def seconds(self) -> float:
        """Time for the slowest of the six kinds of work."""
        return max(getattr(self, kind) for kind in KINDS)

    @property
    def share(self) -> float:
        """Fraction of the roofline speed: `bytes` or `products`, whichever is longer, divided by `seconds`."""
        return max(self.bytes, self.products) / self.seconds

    @property
    def bound(self) -> str:
        """Name of the kind of work that takes longest."""
        return max(KINDS, key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class CountedKernel:
    """A compiled kernel with the properties of one launch that determine its time.

    compiled      resources, and the instructions' names and loops
    instructions  the same instructions with their scheduling fields
    trips         the loops' trip counts, outermost loop first
    programs      number of programs, which is the grid's size
    moved         bytes that the launch reads and writes
    """

    compiled: CompiledKernel
    instructions: Sequence[Instruction]
    trips: Sequence[int]
    programs: int
    moved: int

    @cached_property
    def executed(self) -> Counter[str]:
        """Instruction's name -> number of times that a warp executes this instruction."""
        return self.compiled.executed(self.trips)


def trips_of(launch: KernelLaunch) -> list[int]:
    """Return the trip counts of a launch's loops, outermost loop first."""
    return LOOPS[launch.name](launch.named, launch.grid) if launch.name in LOOPS else []


def kernel_time(kernel: CountedKernel, gpu: GPU) -> KernelTime:
    """Return the modelled time for one launch."""
    compiled = kernel.compiled
    resident = resident_programs(compiled, kernel.programs, gpu)
    rounds = ceil(kernel.programs / (gpu.processors * resident))
    warps_of_processor = kernel.programs * compiled.warps / gpu.processors
    units = {unit: warps_of_processor * needed / gpu.clock for unit, needed in unit_cycles(kernel.executed).items()}
    products = kernel.programs * compiled.warps * sum(flops(name) * times for name, times in kernel.executed.items())
    return KernelTime(
        bytes=kernel.moved / gpu.bandwidth,
        products=products / gpu.products,
        issue=units["issue"],
        units=max(units.get("memory", 0.0), units.get("slow", 0.0)),
        float64=units.get("float64", 0.0),
        latency=rounds * program_cycles(kernel, gpu) / gpu.clock,
        warps=resident * compiled.warps,
        rounds=rounds,
    )


def program_cycles(kernel: CountedKernel, gpu: GPU) -> float:
    """Return the cycles that one program takes if no other program is on its multiprocessor."""
    compiled = kernel.compiled
    per_thread = global_words(kernel.executed)
    processors = min(gpu.processors, kernel.programs)
    bytes_per_cycle = gpu.bandwidth / processors / gpu.clock
    word = kernel.moved / kernel.programs / per_thread / bytes_per_cycle if per_thread else 0.0
    latency = gpu.clock * (CACHE_S if kernel.moved <= CACHE else MEMORY_S)
    program = Program(kernel.instructions, compiled.loops, kernel.trips, compiled.warps, Memory(latency, word))
    return program.cycles()


def resident_programs(compiled: CompiledKernel, programs: int, gpu: GPU) -> int:
    """Return how many of the grid's programs run on one multiprocessor at a time."""
    registers = -(-compiled.registers // 8) * 8 * 32 * compiled.warps
    fitting = min(REGISTERS // registers, WARPS // compiled.warps, PROGRAMS, SHARED // (compiled.shared + RESERVED))
    return max(1, min(fitting, ceil(programs / gpu.processors)))
