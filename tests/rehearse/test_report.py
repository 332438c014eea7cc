"""Sentences in the tables of a report."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridtron.planning.rates import LAUNCH_S
from hybridtron.rehearse.report import launch_line
from hybridtron.rehearse.step_time import PartTime, Work


@pytest.mark.parametrize(("seconds", "bind"), [(0.007, False), (0.005, True)])
def test_launches_that_bind_are_named_with_what_helps(seconds: float, bind: bool) -> None:
    part = PartTime(costs={("forward", "norm"): Work(launches=1000, seconds=seconds)})
    rehearsed: Any = SimpleNamespace(time=SimpleNamespace(micro_batch=part), phase=SimpleNamespace(index=1))
    text = launch_line(rehearsed)
    assert text.startswith(f"The host launches for {1e6 * LAUNCH_S:.1f} ms what takes {1e3 * seconds:.1f} ms")
    assert ("launches bind" in text) == ("phases.1.micro_batch" in text) == ("run.compile=true" in text) == bind
    assert part.seconds == max(seconds, 1000 * LAUNCH_S)
