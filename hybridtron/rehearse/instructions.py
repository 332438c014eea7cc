"""Instructions in compiled kernels, with the scheduling fields that the compiler writes into each instruction.

A GPU issues a warp's instructions in order. It does not check whether an instruction's inputs are ready. Instead, it
obeys four fields, which the compiler writes into each instruction:

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
NONE = 7  # value of the fields `sets` and `frees` that stands for "no scoreboard"
KEPT = 38  # first bit of `Instruction.keeps`, in an instruction's first half
MASK = 0b111111


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, such as `LDG.E.128`, and its scheduling fields (see the module's docstring).

    `keeps` matters only for DEPBAR and similar instructions, which wait for asynchronous memory accesses. It is the
    number of access groups that may still be under way when the wait ends.
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

    code   the instructions' bytes, without the rest of the file that contains them
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
