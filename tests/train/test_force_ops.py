"""`run.force_ops`: on all threads, shown in the table of kernels, and checked before anything starts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hybridtron.ops.dispatch import anything_forced, force, force_on_all_threads
from hybridtron.ops.registry import OPS
from tests.train.conftest import Train
from tests.train.faults import trained

ALL = "run.force_ops={*: reference}"


def test_all_threads_are_forced_and_force_comes_first() -> None:
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


def test_a_run_with_references_learns_the_same(
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
    ("setting", "message"),
    [
        ("run.force_ops.selectve_scan=reference", "is not an op (did you mean selective_scan?)"),
        ("run.force_ops.selective_scan=referense", "(did you mean reference?), must be one of reference, "),
        ("run.force_ops={*: native}", "is 'native', must be one of reference"),
    ],
)
@pytest.mark.parametrize("command", [["run.plan=true"], []], ids=["plan", "train"])
def test_unknown_ops_and_implementations_are_refused(
    setting: str, message: str, command: list[str], train_small: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_small(setting, *command) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_implementation_for_another_device_is_refused(
    train_small: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan allows it: another machine may run it."""
    foreign = next(
        f"run.force_ops.{name}={each.name}"
        for name, op in OPS.items()
        for each in op.implementations
        if each.device == "cuda"
    )
    assert train_small(foreign, "run.plan=true") == 0
    assert train_small(foreign) == 2
    assert "can't run here (for cuda): reference runs everywhere" in capsys.readouterr().err
