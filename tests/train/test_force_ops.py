"""`run.force_ops`: on all threads, shown in the table of kernels, and checked before anything starts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hybridtron.ops.dispatch import anything_forced, force, force_on_all_threads
from hybridtron.ops.registry import OPS
from tests.train.conftest import Refused, Train
from tests.train.faults import trained

ALL = "run.force_ops={*: reference}"


def test_forced_ops_reach_all_threads() -> None:
    seen: list[str | None] = []
    with force_on_all_threads({"*": "reference", "swiglu": "native"}):
        thread = threading.Thread(target=lambda: seen.extend([OPS["swiglu"].forced, OPS["linear"].forced]))
        thread.start()
        thread.join()
        assert anything_forced()
        assert OPS["linear"].choice("cpu") == ("reference", "forced")
        with force(swiglu="other"):
            assert (OPS["swiglu"].forced, OPS["linear"].forced) == ("other", "reference")
    assert seen == ["native", "reference"]
    assert not anything_forced()
    assert OPS["linear"].forced is None


@pytest.mark.slow
def test_forced_references_give_the_same_losses(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_small("run.max_steps=3") == 0
    losses = [line["loss"] for line in trained(tmp_path / "run")]
    capsys.readouterr()
    assert train_small("run.max_steps=3", "run.resume=never", ALL) == 0
    table = capsys.readouterr().out.split("kernels")[1].splitlines()
    row = next(line.split() for line in table if line.strip().startswith("selective_scan"))
    assert row == ["selective_scan", "reference", "forced"]
    assert [line["loss"] for line in trained(tmp_path / "run")] == pytest.approx(losses, rel=1e-4)
    assert train_small("run.max_steps=4", "run.resume=never", "run.force_ops.selective_scan=reference") == 0
    assert not anything_forced()


@pytest.mark.parametrize(
    ("setting", "key", "named"),
    [
        ("run.force_ops.selectve_scan=reference", "run.force_ops.selectve_scan", "selective_scan"),
        ("run.force_ops.selective_scan=referense", "run.force_ops.selective_scan", "reference"),
        ("run.force_ops={*: native}", "run.force_ops.*", "'native'"),
    ],
)
@pytest.mark.parametrize("command", [["run.plan=true"], []], ids=["plan", "train"])
def test_unknown_ops_and_implementations_are_refused(
    setting: str, key: str, named: str, command: list[str], refused: Refused
) -> None:
    problem = refused(setting, command)[key]
    assert problem.code == "unknown-name"
    assert named in problem.message


def test_an_implementation_for_another_device_is_refused(
    train_small: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan allows it: another machine may run it."""
    foreign = next(
        f"run.force_ops.{name}={implementation.name}"
        for name, op in OPS.items()
        for implementation in op.implementations
        if implementation.device == "cuda"
    )
    assert train_small(foreign, "run.plan=true") == 0
    assert train_small(foreign) == 2
    message = capsys.readouterr().err
    assert "cuda" in message
    assert "reference" in message
