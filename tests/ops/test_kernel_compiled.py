"""What a compiled kernel was read as is kept, so that no kernel is disassembled twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hybridtron.ops import kernel_compiled

CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 FFMA R2, R3, R4, R2 ;
        /*0020*/               @P1 BRA `(.L_x_1) ;
        /*0030*/                   EXIT ;
"""


def test_code_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, loops = kernel_compiled.disassembled(CODE)
    calls: list[bytes] = []

    def read(cubin: bytes) -> dict[str, Any]:
        calls.append(cubin)
        return {"registers": 32, "stack": 0, "names": names, "loops": [[x.first, x.last, x.depth] for x in loops]}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_compiled, "_read", read)
    first = kernel_compiled.read(b"a", 4, 128)
    kernel_compiled.read.cache_clear()  # as another process would
    assert kernel_compiled.read(b"a", 4, 128) == first
    assert kernel_compiled.read(b"b", 8, 0).warps == 8
    assert calls == [b"a", b"b"]
    assert first.executed([10]) == Counter({"MOV": 1, "FFMA": 10, "BRA": 10, "EXIT": 1})
