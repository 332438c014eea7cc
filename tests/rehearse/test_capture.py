"""The rehearsal shows what prevents a CUDA graph from repeating a micro-batch: faults planted into the passes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rehearse.programs import PATIENT, printed_by

pytest.importorskip("triton")
pytestmark = [pytest.mark.one_slice, pytest.mark.slow, PATIENT]


@pytest.fixture(scope="module")
def proofs() -> dict[str, Any]:
    return printed_by("captures", processor_s=300)


@pytest.mark.parametrize("case", ["samba", "mamba2", "dropout"])
def test_passes_can_be_repeated(proofs: dict[str, Any], case: str) -> None:
    proof = proofs[case]
    assert proof["launches"] > 100
    assert (proof["waits"], proof["copies"], proof["differences"]) == ([], [], [])


@pytest.mark.parametrize(
    ("plant", "kind", "shown"),
    [
        ("a host wait", "waits", "item"),
        ("a copy from the host", "copies", "_to_copy"),
        ("a baked scalar", "differences", "mul: 3.0 and 5.0"),
        ("another kernel", "differences", "clone"),
        ("other memory", "differences", "embedding: memory"),
        ("other boundaries", "differences", "flash_attn_varlen_func"),
        ("numbers of the host", "differences", "ops/dropout/numbers.py"),
    ],
)
def test_planted_faults_are_shown(proofs: dict[str, Any], plant: str, kind: str, shown: str) -> None:
    proof = proofs[plant]
    assert any(shown in line for line in proof[kind]), proof
    others = {"waits", "copies", "differences"} - {kind}
    assert all(proof[other] == [] for other in others), proof


def test_boundaries_without_padding_change_a_scalar_argument(proofs: dict[str, Any]) -> None:
    """Two rows of three documents have 7 boundaries, two rows of five have 11."""
    lines = [line for line in proofs["other boundaries"]["differences"] if "flash_attn_varlen_func" in line]
    assert all("7 and 11" in line for line in lines)
    assert not any("7 and 11" in line for line in proofs["other memory"]["differences"])
