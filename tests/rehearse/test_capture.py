"""The rehearsal shows the obstacles to a CUDA graph of a micro-batch: faults planted into the passes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hybridtron.cli import rehearse
from hybridtron.problems import ConfigError
from hybridtron.rehearse.capture import CaptureProof, RecordedLaunch, differences_of, lines_of
from hybridtron.rehearse.census import Wait
from tests.rehearse.programs import PATIENT, ROOT, printed_by

pytest.importorskip("triton")
pytestmark = [pytest.mark.one_slice, PATIENT]
MUL = RecordedLaunch("a.py:1", "mul", (("allocation 0", "torch.float32", (2, 3), (3, 1), 0), 2.0))
SUM = RecordedLaunch("a.py:2", "sum", (("allocation 1", "torch.float32", (2, 3), (3, 1), 0),))


@pytest.fixture(scope="module")
def proofs() -> dict[str, Any]:
    return printed_by("captures", processor_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["samba", "mamba2", "flex", "dropout"])
def test_passes_can_be_repeated(proofs: dict[str, Any], case: str) -> None:
    proof = proofs[case]
    assert proof["launches"] > 100
    assert (proof["waits"], proof["copies"], proof["differences"]) == ([], [], [])


@pytest.mark.slow
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


@pytest.mark.slow
def test_boundaries_without_padding_change_a_scalar_argument(proofs: dict[str, Any]) -> None:
    """Two rows of three documents have 7 boundaries, two rows of five have 11."""
    lines = [line for line in proofs["other boundaries"]["differences"] if "flash_attn_varlen_func" in line]
    assert all("7 and 11" in line for line in lines)
    assert not any("7 and 11" in line for line in proofs["other memory"]["differences"])


def test_equal_launches_do_not_differ() -> None:
    assert differences_of([MUL, SUM], [MUL, SUM]) == []


def test_arguments_that_differ_are_named() -> None:
    tensor, _ = MUL.values
    (scalar,) = differences_of([MUL, SUM], [RecordedLaunch(MUL.place, MUL.name, (tensor, 3.0)), SUM])
    assert str(scalar) == "a.py:1: mul: 2.0 and 3.0"
    other = ("allocation 0", "torch.float32", (4, 3), (3, 1), 0)
    (shape,) = differences_of([MUL], [RecordedLaunch(MUL.place, MUL.name, (other, 2.0))])
    assert str(shape) == "a.py:1: mul: 2 and 4"


def test_comparison_ends_at_another_kernel() -> None:
    (difference,) = differences_of([MUL, SUM, SUM], [MUL, MUL, MUL])
    assert (difference.first, difference.second) == (SUM, MUL)
    (difference,) = differences_of([MUL], [MUL, SUM])
    assert str(difference) == "a.py:2: sum: then no more launches, and sum at a.py:2"


def test_report_lists_each_line_once() -> None:
    wait = Wait("passes", "b.py:7", "item")
    lines = lines_of(CaptureProof(9, [wait, wait], [], []), "small")
    assert lines[1:3] == ["waits of the host: 1", "    b.py:7: item"]
    assert lines[-1] == "A CUDA graph can't repeat them."
    assert lines_of(CaptureProof(9, [], [], []), "small")[-1].endswith("No GPU has captured them so far.")


def test_command_refuses_other_mixers() -> None:
    with pytest.raises(ConfigError) as refused:
        rehearse.main(["recipe=gla_360m", "--capture"])
    assert [problem.key for problem in refused.value.problems] == ["run.cuda_graph"]


@pytest.mark.slow
def test_command_prints_the_proof() -> None:
    command = [sys.executable, "-m", "hybridtron", "rehearse", "recipe=mamba2_laptop", "precision=bf16", "--capture"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "waits of the host: none" in done.stdout
