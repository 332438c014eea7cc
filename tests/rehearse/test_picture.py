"""The picture of a rehearsed step: bytes add up, and so do seconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridtron.planning.rates import GPUS, WAIT_S
from hybridtron.rehearse.memory_timeline import Change, MemoryTimeline

BUILD = ("build", "a.py:1")
FORWARD = ("passes", "b.py:2")
TIMELINE = MemoryTimeline(
    Counter({BUILD: 4 * 10**9}),
    [Change(1, FORWARD, 10**9), Change(1, FORWARD, 2 * 10**9), Change(3, FORWARD, -(10**9)), Change(3, BUILD, 10**8)],
)


def test_held_bytes_are_allocations_minus_releases() -> None:
    assert TIMELINE.total == [5 * 10**9, 7 * 10**9, 6 * 10**9, 61 * 10**8]
    assert TIMELINE.at_peak == {BUILD: 4 * 10**9, FORWARD: 3 * 10**9}
    assert TIMELINE.of([FORWARD, BUILD])[0] == [10**9, 3 * 10**9, 2 * 10**9, 2 * 10**9]
    assert TIMELINE.of([BUILD]) == [[4 * 10**9] * 3 + [41 * 10**8]]


@pytest.fixture
def rehearsed() -> Any:
    """Return a result with three micro-batches in a pipeline of two ranks; two micro-batches were rehearsed."""
    pytest.importorskip("triton")
    from hybridtron.rehearse.census import Operation
    from hybridtron.rehearse.step import CountedPart
    from hybridtron.rehearse.step_time import PartTime, StepTime, Work

    operations = [Operation("forward", "a.py:1", "add", 10**9), Operation("backward", "b.py:2", "add", 10**9)]
    passes = CountedPart(0, operations, [], [], [])
    update = CountedPart(2, operations[:1], [], [], [])
    once = PartTime(exposed=0.25, waits=2)
    micro_batch_time = PartTime(exposed=0.5)
    once.costs["update", "optimizer"].add(Work(1, 0, 0, 1.0))
    micro_batch_time.costs["forward", "products"].add(Work(1, 0, 0, 2.0))
    micro_batch_time.costs["backward", "products"].add(Work(1, 0, 0, 4.0))
    micro_batch_time.costs["backward", "norm"].add(Work(1, 0, 0, 0.01))
    step = SimpleNamespace(rank=0, many=2, timeline=TIMELINE, passes_of_many=passes, update=update)
    phase = SimpleNamespace(config=SimpleNamespace(run=SimpleNamespace(name="small")))
    time = StepTime(once, micro_batch_time, 3, 1.0)
    return SimpleNamespace(step=step, time=time, gpu=GPUS["h200"], phase=phase, kernels=[], planned=7e9, world=2)


def test_bars_add_up_to_the_step(rehearsed: Any) -> None:
    from hybridtron.rehearse.picture import bars_of

    bars = bars_of(rehearsed)
    assert bars["forward"] == {"products": 6.0}
    assert bars["backward"] == pytest.approx({"products": 12.0, "all others": 0.03})
    stands = {"collectives that nothing hides": 1.75, "host waits": 2 * WAIT_S, "the pipeline's bubble": 6.51}
    assert bars["standing still"] == pytest.approx(stands)
    assert sum(sum(kinds.values()) for kinds in bars.values()) == pytest.approx(rehearsed.time.seconds)


def test_picture_marks_peaks_and_allocation_sites(rehearsed: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from hybridtron.rehearse.picture import draw

    draw([rehearsed, rehearsed], tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    assert text.count("<!-- planned peak -->") == 2
    assert "b.py:2" in text
