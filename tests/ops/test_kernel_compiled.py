"""Machine code of compiled kernels: instructions and loops, for several kernels together, each read once."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import pytest

from hybridtron.ops import kernel_compiled
from hybridtron.ops.kernel_compiled import Loop, MachineCode

HOPPER = (9, 0)
CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 FFMA R2, R3, R4, R2 ;
        /*0020*/               @P1 BRA 0x10 ;
        /*0030*/                   EXIT ;
        /*0040*/                   MOV R1, c[0x0][0x28] ;
        /*0050*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0060*/                   FADD R5, R4, R5 ;
        /*0070*/                   BRA.U UP0, 0x60 ;
        /*0080*/              @!P0 BRA 0xa0 ;
        /*0090*/               @P0 BRA 0x50 ;
        /*00a0*/                   BRA 0xa0;
"""  # two kernels, of 4 and 7 instructions


def test_loops_of_several_kernels_are_separated() -> None:
    (first, loops), (second, nested) = kernel_compiled.disassembled(CODE, [4, 7])
    assert first == ["MOV", "FFMA", "BRA", "EXIT"]
    assert loops == [Loop(1, 2, 0)]
    assert second == ["MOV", "LDG.E.128", "FADD", "BRA.U", "BRA", "BRA", "BRA"]
    assert nested == [Loop(2, 3, 1), Loop(1, 5, 0)]  # what jumps ahead, or to itself, is none


def test_instructions_are_read_from_the_text_section_of_a_kernel() -> None:
    names = b"\0.shstrtab\0.text._walk\0"
    text = bytes(range(48))
    begins = (64, 64 + len(names))
    sections = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, begin, size, 0, 0, 1, 0)
        for name, begin, size in ((0, 0, 0), (1, begins[0], len(names)), (11, begins[1], len(text)))
    )
    header = bytearray(64)
    struct.pack_into("<Q", header, 40, begins[1] + len(text))
    struct.pack_into("<HHH", header, 58, 64, 3, 1)
    assert kernel_compiled.instructions_of(bytes(header) + names + text + sections) == text


def test_machine_code_is_read_once_and_again_after_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = MachineCode(b"a", 4, 128)
    b = MachineCode(b"b", 8, 0)
    calls: list[str] = []

    def answer(code: bytes, *command: str) -> str:
        calls.append(command[1])
        if command[1].endswith("usage"):
            return "REG:32 STACK:0"
        return CODE

    pytest.importorskip("triton")  # which has the programs
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_compiled, "_answer", answer)
    monkeypatch.setattr(kernel_compiled, "instructions_of", lambda cubin: bytes(64 if cubin == b"a" else 112))
    first, second, again = kernel_compiled.read(HOPPER, [a, b, a])
    assert calls == ["--binary", "--dump-resource-usage", "--dump-resource-usage"]
    assert kernel_compiled.read(HOPPER, [b, a]) == [second, first]
    assert len(calls) == 3
    for damage in (b"", bytes(100), b'{"registers": 32'):  # by a full disk or a lost node
        for kept in (tmp_path / "hybridtron" / "kernels").iterdir():
            kept.write_bytes(damage)
        assert kernel_compiled.read(HOPPER, [a, b]) == [first, second]
    assert len(calls) == 12
    assert first == again
    assert first.executed([10]) == Counter({"MOV": 1, "FFMA": 10, "BRA": 10, "EXIT": 1})
    assert (second.warps, second.shared, len(second.instructions)) == (8, 0, 7)
