"""Sentences in the tables of a report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.rehearse.report import launch_line
from hybridtron.rehearse.step_time import PartTime, StepTime, Work


def step(*, seconds: float, host: float, times: int = 1) -> StepTime:
    """Return a step with an update of 1 ms on both sides, and `times` micro-batches with these seconds."""
    once = PartTime(costs={("update", "optimizer"): Work(launches=10, seconds=0.001, host=0.001)})
    part = PartTime(costs={("forward", "norm"): Work(launches=1000, seconds=seconds, host=host)})
    return StepTime(once, part, micro_batches=times, waiting=0.0)


def rehearsed(time: StepTime, *settings: str) -> Any:
    return SimpleNamespace(time=time, phase=resolve(load(list(settings)))[0])


@pytest.mark.parametrize(("seconds", "bound"), [(0.007, "device-bound"), (0.005, "host-bound")])
def test_line_names_the_longer_side_and_cures_for_a_slow_host(seconds: float, bound: str) -> None:
    time = step(seconds=seconds, host=0.006)
    text = launch_line(rehearsed(time))
    assert (
        f"takes the host 7.0 ms, and the work takes the device {1e3 * (seconds + 0.001):.1f} ms (both modelled)" in text
    )
    assert bound in text
    cured = bound == "host-bound"
    assert ("phases.0.micro_batch" in text) == ("run.compile=true" in text) == cured


@pytest.mark.parametrize(
    "settings",
    [["recipe=moe_laptop"], ["recipe=laptop", "parallel.context=2"], ["precision=fp8_block", "precision.emulate=true"]],
)
def test_line_leaves_out_run_compile_where_it_is_refused(settings: list[str]) -> None:
    text = launch_line(rehearsed(step(seconds=0.005, host=0.006), *settings))
    assert text.endswith("Set a larger phases.0.micro_batch, so that each launch does more work.")


def test_host_time_is_not_added_to_device_time() -> None:
    assert step(seconds=0.007, host=0.006, times=3).seconds == pytest.approx(0.001 + 3 * 0.007)
    assert step(seconds=0.005, host=0.006, times=3).seconds == pytest.approx(0.001 + 3 * 0.006)


def test_waits_and_exposed_traffic_come_after_the_longer_side() -> None:
    time = step(seconds=0.005, host=0.006)
    time.once.exposed = 0.02
    time.once.waits = 2
    assert time.seconds == pytest.approx(0.007 + 0.02 + 2 * 25e-6)
