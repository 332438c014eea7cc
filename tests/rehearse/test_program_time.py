"""Scheduling fields, a program's cycles and a kernel's time, with numbers that were computed by hand."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import replace
from math import ceil

import pytest

from hybridtron.ops.kernel_compiled import CompiledKernel, Loop
from hybridtron.planning.rates import CACHE_S, GPUS, MEMORY_S
from hybridtron.rehearse.instructions import CONTROL, KEPT, Instruction, decoded
from hybridtron.rehearse.kernel_time import CountedKernel, kernel_time, program_cycles, resident_programs
from hybridtron.rehearse.program_time import (
    SHARED_CYCLES,
    SLOW_CYCLES,
    TENSOR_CYCLES,
    Memory,
    Program,
    demand,
    flops,
    global_words,
    unit_cycles,
    words,
)

GPU = replace(GPUS["h100"], bandwidth=1e12, products=1e15, processors=100, clock=1e9)
LATENCY = 500.0
LOAD = Instruction("LDG.E.128", 1, sets=0)
ADD = Instruction("FADD", 4, waits=(0,))
STORE = Instruction("STG.E", 1)
END = Instruction("EXIT", 5)


def cycles(
    instructions: list[Instruction],
    loops: tuple[Loop, ...] = (),
    trips: tuple[int, ...] = (),
    *,
    warps: int = 1,
    word: float = 0.0,
) -> float:
    return Program(instructions, loops, trips, warps, Memory(LATENCY, word)).cycles()


def kernel(
    instructions: list[Instruction], programs: int, moved: int, trips: tuple[int, ...] = (), *, warps: int = 1
) -> CountedKernel:
    loops = (Loop(0, len(instructions) - 2, 0),) if trips else ()
    names = tuple(instruction.name for instruction in instructions)
    return CountedKernel(CompiledKernel(32, 0, 0, warps, names, loops), instructions, trips, programs, moved)


def test_scheduling_fields_are_read_from_their_bits() -> None:
    fields = 5 | 1 << 4 | 3 << 5 | 7 << 8 | 0b100010 << 11  # the bit after the stall cycles is a hint that is left out
    wait = struct.pack("<QQ", 2 << KEPT, (4 | 7 << 5 | 2 << 8) << CONTROL)
    load, until = decoded(struct.pack("<QQ", 0, fields << CONTROL) + wait, ["LDG.E", "DEPBAR.LE"])
    assert load == Instruction("LDG.E", 5, sets=3, frees=None, waits=(1, 5))
    assert until == Instruction("DEPBAR.LE", 4, sets=None, frees=2, keeps=2)
    assert (load.base, until.base) == ("LDG", "DEPBAR")


def test_sum_of_a_load_waits_for_its_latency() -> None:
    # the load reads four words of one warp in 4 cycles and arrives 500 later; then 4 of the sum, 1 of the store, 5
    assert cycles([LOAD, ADD, STORE, END]) == 4 + LATENCY + 4 + 1 + 5
    assert cycles([LOAD, replace(ADD, waits=()), STORE, END]) == 4 + LATENCY  # nothing waits but the end


def test_two_loads_at_once_take_one_latency_and_in_turn_two() -> None:
    assert cycles([LOAD, LOAD, ADD, END]) == 8 + LATENCY + 4 + 5
    assert cycles([LOAD, ADD, LOAD, ADD, END]) == 2 * (4 + LATENCY + 4) + 5


def test_loop_repeats_its_chain_of_loads() -> None:
    once = 4 + LATENCY + 4
    for times in (1, 2, 3, 4, 100):
        assert cycles([LOAD, ADD, END], (Loop(0, 1, 0),), (times,)) == times * once + 5
    nested = (Loop(0, 1, 1), Loop(0, 2, 0))
    assert cycles([LOAD, ADD, Instruction("BRA", 2), END], nested, (7, 10)) == 7 * (10 * once + 2) + 5


def test_warps_share_schedulers_and_units() -> None:
    shuffles = [Instruction("SHFL.BFLY", 2, sets=1), Instruction("FADD", 4, waits=(1,)), END]
    assert cycles(shuffles) == 1 + SHARED_CYCLES + 4 + 5
    assert cycles(shuffles, warps=16) == 16 + SHARED_CYCLES + 4 + 5
    exp = [Instruction("MUFU.EX2", 1, sets=1), Instruction("FADD", 4, waits=(1,)), END]
    assert cycles(exp, warps=8) == 2 * 8 + SLOW_CYCLES + 4 + 5
    assert cycles([Instruction("FADD", 1)] * 10, warps=32) == 10 * 8  # 8 warps a scheduler, one after another


def test_memory_traffic_of_a_program_is_a_queue() -> None:
    assert cycles([LOAD, LOAD, ADD, END], word=25.0) == 4 + 2 * 4 * 25 + LATENCY + 4 + 5


def test_products_run_beside_instructions_until_a_wait() -> None:
    product = Instruction("HGMMA.64x128x16.F32.BF16", 1)
    wait = Instruction("WARPGROUP.DEPBAR.LE", 2)
    product_cycles = 2 * 64 * 128 * 16 / 4096  # cycles
    assert cycles([product, product, wait, END], warps=4) == 2 * product_cycles + TENSOR_CYCLES + 2 + 5
    assert cycles([product, product, wait, END], warps=8) == 4 * product_cycles + TENSOR_CYCLES + 2 + 5


def test_wait_for_copies_leaves_later_groups_under_way() -> None:
    copy = Instruction("LDGSTS.E", 1)
    group = Instruction("LDGDEPBAR", 1, sets=0)
    add = Instruction("FADD", 1)
    copies = [copy, group, *[add] * 300, copy, group]
    first, both = (cycles([*copies, Instruction("DEPBAR.LE", 1, keeps=keeps), *[add] * 600]) for keeps in (1, 0))
    assert first == 1 + LATENCY + 1 + 600
    assert both == 302 + 1 + LATENCY + 1 + 600  # the second copy begins 302 cycles after the first


def test_barrier_costs_an_access_to_shared_memory() -> None:
    assert cycles([Instruction("BAR.SYNC.DEFER_BLOCKING", 6), END], warps=4) == pytest.approx(6 + SHARED_CYCLES + 5)


def test_units_of_instructions() -> None:
    assert (words("LDS"), words("LDS.128"), words("LDSM.16.M88.4"), words("STG.E.64")) == (1, 4, 4, 2)
    assert demand("DFMA") == ("float64", 0.5)  # 64 results a cycle
    assert demand("F2F.F64.F32") == demand("MUFU.RCP64H") == ("slow", 2.0)
    assert demand("F2F.F32.F16") == ("", 0.0)
    assert flops("HMMA.16816.F32.BF16") == 2 * 16 * 8 * 16
    assert flops("HGMMA.64x64x16.F32.BF16") == 2 * 64 * 64 * 16 / 4
    assert flops("HFMA2.MMA") == flops("IMAD") == 0
    assert demand("HMMA.1688.F32.TF32")[1] == 2 * 16 * 8 * 8 / 2048
    executed = Counter({"LDG.E.128": 3, "STG.E": 2, "DFMA": 10, "FADD": 25})
    assert unit_cycles(executed) == {"issue": 10.0, "memory": 14.0, "float64": 5.0}
    assert global_words(executed) == 14


def test_float64_has_a_rate_of_its_own() -> None:
    chain = [*[Instruction("DFMA", 1)] * 100, END]
    time = kernel_time(kernel(chain, 100 * 64, 0), GPU)  # 64 programs of one warp for each multiprocessor
    assert time.float64 == pytest.approx(64 * 100 / 2 / GPU.clock)
    assert time.issue == pytest.approx(64 * 101 / 4 / GPU.clock)
    assert time.bound == "float64"


def test_resident_programs_are_capped_by_resources_and_by_the_grid() -> None:
    compiled = CompiledKernel(128, 0, 0, 4, (), ())  # 65536 / (128 * 32 * 4) = 4 programs fit by registers
    assert resident_programs(compiled, 10_000, GPU) == 4
    assert resident_programs(replace(compiled, shared=100 * 1024), 10_000, GPU) == 2
    assert resident_programs(compiled, 150, GPU) == 2
    assert resident_programs(compiled, 30, GPU) == 1


def test_narrow_grid_is_seen_as_slower() -> None:
    """Compare 100 programs of 64 turns with 1600 programs of 4 turns that move as many bytes."""
    turn = [LOAD, ADD, STORE, END]
    moved = 16 * 100 * 64 * 32 * 5  # 20 bytes of a thread in each turn
    gpu = replace(GPU, bandwidth=1e13)
    narrow, wide = (kernel_time(kernel(turn, n, moved, (t,)), gpu) for n, t in ((100, 64), (1600, 4)))
    assert narrow.bytes == wide.bytes
    assert (narrow.warps, wide.warps) == (1, 16)
    assert narrow.bound == "latency"
    assert narrow.latency > 64 * CACHE_S
    assert narrow.seconds > 3 * wide.seconds == 3 * wide.bytes


def test_latency_counts_rounds_of_programs() -> None:
    programs = [100, 1600, 3200, 3300]  # one, 16, 32 and 33 for each of 100 multiprocessors, on which 32 fit
    times = [kernel_time(kernel([LOAD, ADD, END], n, 0), GPU) for n in programs]
    assert [time.rounds for time in times] == [1, 1, 1, 2]
    alone = (4 + GPU.clock * CACHE_S + 4 + 5) / GPU.clock
    assert [time.latency for time in times] == pytest.approx([alone, alone, alone, 2 * alone])
    assert ceil(3300 / 100) == 33


def test_kernels_with_more_bytes_than_the_cache_wait_for_memory() -> None:
    small, large = (kernel([LOAD, ADD, END], 10**6, moved) for moved in (10**6, 10**9))
    word = 10**9 / 10**6 / 4 / (GPU.bandwidth / 100 / GPU.clock)  # cycles of one word for each thread
    assert program_cycles(small, GPU) == pytest.approx(4 + word / 1000 * 4 + GPU.clock * CACHE_S + 4 + 5)
    assert program_cycles(large, GPU) == pytest.approx(4 + word * 4 + GPU.clock * MEMORY_S + 4 + 5)
