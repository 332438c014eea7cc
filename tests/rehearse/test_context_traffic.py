"""Traffic of context-parallel ranks in rehearsed steps: a formula by hand, the plan, and no growth with the row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.memory import largest_phase, plan
from tests.rehearse.programs import PATIENT, printed_by

pytest.importorskip("triton")
RANKS = 4
Job = tuple[list[str], int, int, bool]


def job(recipe: str, settings: Sequence[str], ranks: int = RANKS, rank: int = 1) -> Job:
    """Return a job for a middle rank, which takes part in every round, in one direction or the other."""
    return [f"recipe={recipe}", "precision=bf16", f"parallel.context={ranks}", *settings], ranks, rank, False


def handed_over(report: dict[str, Any]) -> float:
    """Bytes of a micro-batch: two are rehearsed."""
    return sum(row[6] for row in report["sent"] if row[0].startswith("parallel/context.py")) / 2


def rehearsed(jobs: list[Job]) -> list[dict[str, Any]]:
    return printed_by("steps", json.dumps(jobs), processor_s=600)


def planned(of: Job) -> float:
    """Bytes of a micro-batch."""
    settings, gpus, _, _ = of
    job_plan = plan(largest_phase(RunPlan.of(load(settings))), gpus)
    return job_plan.ranks[0].traffic.context / job_plan.micro_batches


MIXED = "model.pattern=MSW-"
LAYERS = (
    MIXED,
    "model.width=64",
    "model.layers.M={kind: mamba, state: 8, conv: 4}",
    "model.layers.S={kind: mamba2, state: 16, head_dim: 32, groups: 1, conv: 4}",
    "model.layers.W={kind: attention, heads: 4, kv_heads: 2, window: 33}",
    "phases.0.micro_batch=2",
    "phases.0.global_batch=4",
)


@pytest.mark.slow
def test_traffic_of_a_small_row_equals_a_hand_count() -> None:
    """Send two rows over four ranks: fp32 states in rounds of 1, 1 and 2 ranks, bf16 halos, each there and back."""
    small = job("laptop", [*LAYERS, "phases.0.seq_len=256"])
    (report,) = rehearsed([small])
    inner = 128
    rows = 2
    there_and_back = 2 + 2 + 1  # rank 1 sends 2 ranks further, and gets no gradient from there
    mamba = 2 * inner * 8 * 4 * rows * there_and_back + 3 * inner * 2 * rows * 2
    mamba2 = (inner * 16 + inner // 32) * 4 * rows * there_and_back + 3 * (inner + 2 * 16) * 2 * rows * 2
    window = 32 * 2 * 2 * 16 * 2 * rows * 2
    assert handed_over(report) == mamba + mamba2 + window == planned(small)


@pytest.mark.slow
@PATIENT
@pytest.mark.parametrize(
    "recipe",
    ["samba_421m", "mamba2_130m", "mamba3_swa_421m", "gla_360m", "rwkv6_70m", "sliding_retnet_446m", "mamba_130m"],
)
def test_traffic_of_recurrences_and_windows_does_not_grow_with_the_row(recipe: str) -> None:
    """Recurrences and windows send equal amounts for a row twice as long, and the planned ones.

    Values without a gradient to return are an exception, because the plan does not distinguish them: RetNet's decays,
    and the factors of Mamba-3's angles.
    """
    sizes = ["phases.0.micro_batch=1", "phases.0.global_batch=2", "run.eval_tokens=4M", "run.eval_lengths=[1]"]
    jobs = [job(recipe, [*sizes, f"phases.0.seq_len={length}"]) for length in (16384, 32768)]
    shorter, longer = map(handed_over, rehearsed(jobs))
    assert shorter == longer
    assert planned(jobs[0]) == planned(jobs[1])
    tolerance = 0.0
    if recipe in ("sliding_retnet_446m", "mamba3_swa_421m"):
        tolerance = 5e-4
    assert planned(jobs[0]) == pytest.approx(shorter, rel=tolerance)


@pytest.mark.slow
@PATIENT
def test_traffic_of_full_attention_grows_with_the_row() -> None:
    """The other way round, so that the test above can fail."""
    sizes = ["phases.0.micro_batch=1", "phases.0.global_batch=2", "run.eval_tokens=4M", "run.eval_lengths=[1]"]
    jobs = [job("llama2_438m", [*sizes, f"phases.0.seq_len={length}"]) for length in (16384, 32768)]
    shorter, longer = map(handed_over, rehearsed(jobs))
    assert longer == 2 * shorter
