"""Uneven loads of experts: rows of a rank, the plan's memory, the largest load that fits, refused values."""

from __future__ import annotations

import pytest

from hybridtron.cli.rehearse import require_imbalance
from hybridtron.config.load import load
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.parallel.mesh import RankGroup
from hybridtron.planning.memory import imbalance_line, imbalance_that_fits, plan
from hybridtron.problems import Unusable
from hybridtron.rehearse.expert_loads import row_counts


@pytest.mark.parametrize(
    ("imbalance", "sent", "received"),
    [
        (1.0, [26, 25, 25, 25], [26, 25, 25, 25]),
        (2.0, [17, 17, 50, 17], [50] * 4),
        (0.0, [34, 34, 0, 33], [0] * 4),
        (4.0, [0, 0, 101, 0], [101] * 4),
    ],
)
def test_rows_of_a_rank_follow_from_its_load(imbalance: float, sent: list[int], received: list[int]) -> None:
    counts = row_counts(101, RankGroup(4, 2), imbalance)
    assert (list(counts.sent), list(counts.received)) == (sent, received)
    assert sum(counts.sent) == 101


def test_largest_load_that_fits_is_found() -> None:
    settings = ["recipe=granite4_h_tiny", "parallel.expert=8", "phases.0.micro_batch=2"]
    phase = RunPlan.of(load(settings)).phases[0]
    totals = [plan(phase, 8, imbalance).fullest.memory.total for imbalance in (1.0, 1.5, 2.0, 8.0)]
    assert totals == sorted(totals)
    assert totals[2] - totals[1] == pytest.approx(totals[1] - totals[0], rel=1e-3)
    most = imbalance_that_fits(phase, 8, totals[1])
    assert most == 1.5
    assert imbalance_that_fits(phase, 8, totals[3]) is None
    assert imbalance_that_fits(phase, 8, totals[0] - 1) == 0.0
    line = imbalance_line(most, phase, 8, totals[1])
    assert "up to 1.50 times" in line
    assert f"needs {totals[3] / 1e9:.1f} GB" in line
    assert "even if the loads of experts are even" in imbalance_line(0.0, phase, 8, 1e9)


def test_loads_of_full_experts_change_no_memory() -> None:
    phase = RunPlan.of(load(["recipe=granite4_h_tiny"])).phases[0]
    assert imbalance_that_fits(phase, 8, 1e9) is None


BOUNDED = ["model.layers.-.capacity=1.25", "data.documents=join"]


def laptop(*settings: str) -> ResolvedPhase:
    return RunPlan.of(load(["recipe=moe_laptop", "phases.0.micro_batch=1", *settings])).phases[0]


@pytest.mark.parametrize(
    ("parallel", "slots"),
    [
        (["parallel.expert=2"], True),
        (["parallel.expert=2", "parallel.context=2"], False),
        (["parallel.expert=2", "parallel.tensor=2", "parallel.sequence=true", "parallel.expert_tensor=1"], False),
    ],
)
def test_loads_change_no_memory_of_slots(parallel: list[str], slots: bool) -> None:
    phase = laptop(*parallel, *BOUNDED)
    totals = [plan(phase, 4, imbalance).fullest.memory.total for imbalance in (1.0, 2.0)]
    assert (totals[0] == totals[1]) == slots
    assert (imbalance_that_fits(phase, 4, totals[0]) is None) == slots
    dropless = plan(laptop(*parallel), 4).fullest
    bounded = plan(phase, 4).fullest
    assert (bounded.memory.total > dropless.memory.total) == slots
    assert bounded.traffic.experts == dropless.traffic.experts * (1.25 if slots else 1)


@pytest.mark.parametrize(
    ("imbalance", "settings", "code"),
    [
        (1.5, ["parallel.expert=1"], "no-effect"),
        (1.5, ["parallel.expert=2", *BOUNDED], "no-effect"),
        (4.5, ["parallel.expert=4"], "out-of-range"),
        (-1.0, ["parallel.expert=4"], "out-of-range"),
    ],
)
def test_impossible_loads_are_refused(imbalance: float, settings: list[str], code: str) -> None:
    phase = laptop(*settings)
    with pytest.raises(Unusable) as refused:
        require_imbalance(imbalance, phase)
    assert refused.value.code == code
    require_imbalance(1.0, phase)
    require_imbalance(1.5, laptop("parallel.expert=2", "parallel.context=2", *BOUNDED))
