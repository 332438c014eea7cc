"""Time model of our own kernels: the longest of four things that a GPU does at the same time.

    bytes       memory traffic: each tensor is read or written once
    products    tensor-core instructions
    issue       each scheduler issues one warp instruction a cycle, and a warp one every second cycle
    units       shuffles and shared memory take one warp instruction a cycle, on each multiprocessor; the unit for exp2,
                logarithms and square roots takes one every second cycle

(CUDA C++ programming guide, throughput of native arithmetic instructions, compute capability 9.0.) Instructions are
counted in the compiled code, times the trip counts of its loops. The model leaves out latency that the warps on a
multiprocessor can't hide, so its times are lower bounds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from hybridtron.ops.kernel_compiled import CompiledKernel
from hybridtron.planning.rates import GPU
from hybridtron.rehearse.launches import KernelLaunch

REGISTERS, SHARED, WARPS, PROGRAMS = 65536, 227 * 1024, 64, 32  # limits of one multiprocessor: Hopper and Blackwell
RESERVED = 1024  # bytes of shared memory that each program takes in addition to its own
SLOW_UNIT = ("MUFU",)
SHARED_UNIT = ("SHFL", "LDS", "STS", "LDSM", "STSM", "ATOMS")
PRODUCT = re.compile(r"[A-Z]+MMA\.(\d+)x(\d+)x(\d+)")
WIDTHS = {"64": 2, "128": 4, "2": 2, "4": 4}  # suffix -> words of a thread, as in LDS.128, LDSM.16.M88.4
WARPS_OF_PRODUCT = {"HGMMA": 4}  # warps that compute one together


def _tiles(named: Mapping[str, Any]) -> list[int]:
    return [named["CHUNK"] // named["TOKENS"], named["TOKENS"]]


def _slices_of_keys(named: Mapping[str, Any]) -> list[int]:
    slices = named["BLOCK_N"] // named["KEYS"]
    return [slices, named["PART"]] if slices > 1 else [named["PART"]]


def _keys_of_queries(named: Mapping[str, Any]) -> int:
    """Return a loop's trip count over the keys that a tile of queries sees.

    A list of kept keys has a fixed width. For ranges it is the average over a row's tiles.
    """
    run = named["QUERIES"] * named["total"] // named["length"] + named["most"]
    return -(-(named["width"] if named["KEPT"] else run) // named["KEYS"])


def _queries_of_keys(named: Mapping[str, Any]) -> int:
    """Return a loop's average trip count over the queries that see a tile of keys.

    Kept keys are seen for up to twice as long.
    """
    run = named["KEYS"] + (1 + named["KEPT"]) * named["most"]
    return -(-run * named["length"] // (named["total"] * named["QUERIES"]))


def _slices_of_values(named: Mapping[str, Any]) -> int:
    return -(-named["P"] // named["VALUES"])


LOOPS: dict[str, Callable[[Mapping[str, Any], tuple[int, ...]], list[int]]] = {
    "scan.walk": lambda named, _: [named["CHUNK"]],
    "scan.retrace": lambda named, _: _tiles(named) if named["CHUNK"] > named["TOKENS"] else [named["CHUNK"]],
    "scan.walk_back": lambda named, _: _tiles(named),
    "scan.chain": lambda named, _: [-(-named["parts"] // named["STEPS"])],
    "scan.gradients": lambda named, _: [named["N"]],
    "conv.backward": lambda named, _: [named["TOKENS"] + named["WIDTH"] - 1],
    "norm.backward": lambda named, grid: [-(-named["rows"] // (named["ROWS"] * grid[0]))],
    **dict.fromkeys(
        ("gated_norm.norm_backward", "gated_norm.scale_backward"),
        lambda named, grid: [-(-named["rows"] * named["length"] // grid[0])],
    ),
    "softmax.sums_of_rows": lambda named, _: [-(-named["size"] // named["BLOCK"])],
    **dict.fromkeys(("gla.outputs", "gla.value_gradients"), lambda named, _: [named["BLOCK_N"] // named["KEYS"]]),
    **dict.fromkeys(
        ("gla.pair_weights", "gla.token_gradients"), lambda named, _: [named["BLOCK_P"] // named["VALUES"]]
    ),
    "gla.scores": lambda named, _: _slices_of_keys(named),
    **dict.fromkeys(("gla.query_pairs", "gla.key_pairs"), lambda named, _: [named["PART"]]),
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
    "ssd.pass_states": lambda named, _: [named["chunks"]],
    "ssd.outputs": lambda named, _: [max(1, named["BLOCK_N"] // named["SLICE"])],
    "ssd.token_gradients": lambda named, _: [max(1, named["BLOCK_N"] // named["SLICE"])],
    "ssd.group_gradients": lambda named, _: [named["heads"] // named["groups"] // named["splits"]],
    "ssd.step_gradients": lambda named, _: [named["PARTS"]],
}
"""Kernel -> trip counts of its loops, from the outermost in. Kernels that are not listed have no loops."""


@dataclass(frozen=True)
class KernelTime:
    """Seconds by each of the four limits, and the number of warps that fit on a multiprocessor."""

    bytes: float
    products: float
    issue: float
    units: float
    warps: int

    @property
    def seconds(self) -> float:
        """The longest of the four."""
        return max(self.bytes, self.products, self.issue, self.units)

    @property
    def share(self) -> float:
        """The kernel's share of the roofline that its bytes and its products give."""
        return max(self.bytes, self.products) / self.seconds

    @property
    def bound(self) -> str:
        """Name of the limit that takes longest."""
        return max(("bytes", "products", "issue", "units"), key=lambda name: getattr(self, name))


def kernel_time(launch: KernelLaunch, compiled: CompiledKernel, moved: int, gpu: GPU) -> KernelTime:
    """Model the time of one launch that moves `moved` bytes."""
    trips = LOOPS[launch.name](launch.named, launch.grid) if launch.name in LOOPS else []
    executed = compiled.executed(trips)
    warps, programs = warps_that_fit(compiled), prod(launch.grid)
    warps_of_processor = programs * compiled.warps / gpu.processors
    cycles = warps_of_processor * sum(executed.values()) / min(4.0, warps / 2)
    unit_cycles = warps_of_processor * max(_count(executed, SHARED_UNIT), 2 * _count(executed, SLOW_UNIT))
    flops = programs * product_flops(executed, compiled.warps)
    return KernelTime(moved / gpu.bandwidth, flops / gpu.products, cycles / gpu.clock, unit_cycles / gpu.clock, warps)


def warps_that_fit(compiled: CompiledKernel) -> int:
    """Return the number of warps that fit on one multiprocessor at a time."""
    registers = -(-compiled.registers // 8) * 8 * 32 * compiled.warps
    programs = min(REGISTERS // registers, WARPS // compiled.warps, PROGRAMS, SHARED // (compiled.shared + RESERVED))
    return programs * compiled.warps


def product_flops(executed: Counter[str], warps: int) -> int:
    """Return one program's tensor-core FLOPs."""
    total = 0
    for name, times in executed.items():
        if match := PRODUCT.match(name):
            rows, columns, depth = map(int, match.groups())
            together = WARPS_OF_PRODUCT.get(name.split(".")[0], 1)
            total += 2 * rows * columns * depth * times * warps // together
    return total


def _count(executed: Counter[str], names: tuple[str, ...]) -> int:
    """Count the executed instructions with these names, each by its words of a thread."""
    return sum(_words(name) * times for name, times in executed.items() if name.split(".")[0] in names)


def _words(name: str) -> int:
    """Return the four-byte words that a thread moves. Shared memory gives a warp 128 bytes a cycle."""
    _, _, suffix = name.partition(".")
    return max([1, *(words for mark, words in WIDTHS.items() if mark in suffix.split("."))])
