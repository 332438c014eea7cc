"""Instructions in compiled kernels, with the scheduling fields that the compiler writes into each instruction.

A GPU issues a warp's instructions in order. It does not find out whether an instruction's inputs are ready. The
compiler writes this into four fields of each instruction:

    stall   cycles after which the warp may issue its next instruction
    sets    a scoreboard that is busy until the instruction's result is ready
    frees   a scoreboard that is busy until the instruction has read its operands
    waits   scoreboards that must not be busy when the instruction is issued

A scoreboard is one of six counters that each warp has. The fields' bits are described in arXiv:1804.06826, section 2.1,
for Volta. Later GPUs up to Blackwell have the same 128-bit instructions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

SIZE = 16  # bytes per instruction
CONTROL = 41  # first bit of the scheduling fields, in an instruction's second half
NONE = 7  # number that stands for no scoreboard
KEPT = 38  # first bit of the number of accesses that DEPBAR leaves under way, in an instruction's first half
MASK = 0b111111


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, such as `LDG.E.128`, and its scheduling fields (see the module's docstring).

    `keeps` matters only for instructions that wait for asynchronous work, such as DEPBAR: how many groups of accesses
    may still be under way when the wait ends.
    """

    name: str
    stall: int
    sets: int | None = None
    frees: int | None = None
    waits: tuple[int, ...] = ()
    keeps: int = 0

    @property
    def base(self) -> str:
        """Name without suffixes: `LDG` for `LDG.E.128`."""
        return self.name.partition(".")[0]


def decoded(code: bytes, names: Sequence[str]) -> tuple[Instruction, ...]:
    """Return the instructions in machine code.

    code   the instructions, without the file around them
    names  the instructions' names, in code order
    """
    return tuple(_instruction(code[SIZE * index : SIZE * (index + 1)], name) for index, name in enumerate(names))


def _instruction(code: bytes, name: str) -> Instruction:
    first, second = struct.unpack("<QQ", code)
    fields = second >> CONTROL
    waits = fields >> 11 & MASK
    return Instruction(
        name,
        stall=fields & 0b1111,
        sets=_scoreboard(fields >> 5),
        frees=_scoreboard(fields >> 8),
        waits=tuple(number for number in range(6) if waits >> number & 1),
        keeps=first >> KEPT & MASK if "DEPBAR" in name else 0,
    )


def _scoreboard(bits: int) -> int | None:
    number = bits & 0b111
    return None if number == NONE else number
