"""The rows that a rank's experts compute: one count for plans and for warnings in training."""

from __future__ import annotations

import pytest

from hybridtron.architecture.moe import MoESpec
from hybridtron.config.load import load
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.planning.activations import even_rows_gib, row_use, sublayer_uses, with_rows

FULL_EXPERTS = ("parallel.tensor=2", "parallel.sequence=true", "parallel.expert_tensor=1")


def phase_of(*settings: str) -> ResolvedPhase:
    return RunPlan.of(load(["recipe=moe_laptop", "parallel.expert=2", *settings])).phases[0]


def experts_of(phase: ResolvedPhase) -> tuple[int, MoESpec]:
    """Return the first layer with experts: its index and options."""
    return next((index, spec) for index, spec in enumerate(phase.arch.specs) if isinstance(spec, MoESpec))


def test_memory_of_rows_counts_saved_and_passing_elements() -> None:
    """A row saves its input, gate, up and their product; its passes hold its input and output twice."""
    phase = phase_of()
    _, spec = experts_of(phase)
    rows = phase.settings.micro_batch * phase.settings.seq_len * spec.top_k
    inner = 3 * spec.hidden
    values = (phase.model.width + inner) + (2 * phase.model.width + inner // 2)
    assert even_rows_gib(spec, phase) == pytest.approx(rows * values * 4 / 2**30)
    half = phase_of("parallel.context=2")
    assert even_rows_gib(spec, half) == even_rows_gib(spec, phase) / 2


@pytest.mark.parametrize(("recompute", "saved"), [("none", 4), ("layer", 1)])
def test_memory_of_rows_counts_the_chunks_of_a_pass(recompute: str, saved: int) -> None:
    """Four chunks pass together; a pass that runs them again saves the rows of one at a time."""
    settings = ("states.mode=tbtt", "states.chunks=4", f"parallel.recompute={recompute}")
    alone, together = (phase_of(*settings, f"states.through_time={value}") for value in ("false", "true"))
    _, spec = experts_of(alone)
    row = row_use(spec, alone)
    more = (saved * row.kept + row.working) / (row.kept + row.working)
    assert even_rows_gib(spec, together) == pytest.approx(more * even_rows_gib(spec, alone))


@pytest.mark.parametrize("settings", [(), ("parallel.recompute=layer",), ("parallel.context=2",), FULL_EXPERTS])
def test_plans_count_further_rows_as_warnings_do(settings: tuple[str, ...]) -> None:
    """Three times the rows need twice the memory of even rows in addition."""
    phase = phase_of(*settings)
    index, spec = experts_of(phase)
    even, uneven = (with_rows(sublayer_uses(phase), phase, imbalance)[index] for imbalance in (1.0, 3.0))
    added = uneven.kept + uneven.working - even.kept - even.working
    assert added * phase.tokens_of_rank * 4 / 2**30 == pytest.approx(2 * even_rows_gib(spec, phase), rel=1e-5)
