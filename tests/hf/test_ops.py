"""The shipped ops are those of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import make_hf_ops


def test_the_shipped_ops_are_what_the_package_computes_with() -> None:
    assert make_hf_ops.TARGET.read_text(encoding="utf-8") == make_hf_ops.generated(), "run `make hf-ops`"


def test_a_change_of_an_op_is_a_change_of_what_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in make_hf_ops.OPS.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        copy = tmp_path / file.relative_to(make_hf_ops.OPS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text.replace("F.silu(gate) * up", "F.gelu(gate) * up"), encoding="utf-8")
    monkeypatch.setattr(make_hf_ops, "OPS", tmp_path)
    make_hf_ops.Source.of.cache_clear()
    changed = make_hf_ops.generated()
    make_hf_ops.Source.of.cache_clear()
    assert "F.gelu(gate) * up" in changed
    assert changed != make_hf_ops.TARGET.read_text(encoding="utf-8")
