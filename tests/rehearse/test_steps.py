"""Rehearsed steps of a real recipe: FLOPs, traffic and memory, compared with values known without a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.planning.activations import MARGIN
from hybridtron.planning.count import count
from hybridtron.planning.memory import RankPlan, largest_phase, plan
from tests.rehearse.programs import PATIENT, printed_by

pytest.importorskip("triton")
pytestmark = [pytest.mark.one_slice, PATIENT]
RECIPE = "recipe=samba_421m"
CUT = [RECIPE, "parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2"]
JOBS = {
    "laptop": (["recipe=laptop", "precision=bf16"], 1, 0),
    "mamba2 laptop": (["recipe=mamba2_laptop", "precision=bf16"], 1, 0),
    "mamba2": (["recipe=mamba2_130m"], 1, 0),
    "alone": ([RECIPE], 1, 0),
    "first of four, four times": (CUT, 16, 0),  # so that two ranks are tensor ranks or pipeline ranks
    "last of four, four times": (CUT, 16, 8),
}
LARGE = list(JOBS)[3:]
Report = dict[str, Any]


def rehearsed(jobs: list[str]) -> dict[str, Report]:
    job_reports = printed_by("steps", json.dumps([JOBS[job] for job in jobs]), processor_s=600)
    return dict(zip(jobs, job_reports, strict=True))


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return rehearsed(LARGE)


def planned(job: str) -> RankPlan:
    settings, gpus, rank = JOBS[job]
    ranks = plan(largest_phase(RunPlan.of(load(settings))), gpus).ranks
    if rank == 0:
        return ranks[0]
    return ranks[-1]


def summed(report: Report, value: str, kind: str, part: str | None = None) -> float:
    costs = report["per_micro_batch"]["costs"]
    return sum(cost[value] for cost in costs if cost["kind"] == kind and part in (None, cost["part"]))


def sent(report: Report, kinds: tuple[str, ...], ranks: int, once: bool) -> float:
    """Bytes of calls that happen once a step, or for each micro-batch, in the rehearsed step."""
    return sum(row[6] for row in report["sent"] if row[1] in kinds and row[2] == ranks and is_once(row) == once)


def is_once(row: list[Any]) -> bool:
    return row[0].startswith(("engine/", "megatron"))


def assert_flops(report: Report, job: str) -> None:
    """Products three times, and attention's two products twice and a half again in the backward pass."""
    phase = largest_phase(RunPlan.of(load(JOBS[job][0])))
    parts = count(phase.arch, phase.settings.seq_len).flops_by_part
    tokens = phase.settings.micro_batch * phase.settings.seq_len
    products = 3 * (parts["projections"] + parts["head"]) * tokens
    attention = parts.get("attention", 0) * tokens
    assert summed(report, "flops", "products") == products
    assert summed(report, "flops", "attention", "forward") == attention
    assert summed(report, "flops", "attention", "backward") == 2.5 * attention


@pytest.mark.slow
def test_rehearsed_mamba2_step_has_the_planned_flops_and_memory() -> None:
    report = rehearsed(["mamba2 laptop"])["mamba2 laptop"]
    assert_flops(report, "mamba2 laptop")
    assert report["memory"]["planned"] == planned("mamba2 laptop").memory.total
    assert {"ssd.outputs", "conv.forward", "gated_norm.norm"} <= {kernel["name"] for kernel in report["kernels"]}
    assert report["once"]["waits"] == 1


@pytest.mark.slow
def test_rehearsed_laptop_step_has_the_planned_flops_and_memory() -> None:
    laptop = rehearsed(["laptop"])["laptop"]
    assert_flops(laptop, "laptop")
    chosen = laptop["implementations"]
    assert (chosen["attention"], chosen["selective_scan"], chosen["rms_norm"]) == ("flash-attn", "triton", "triton")
    assert laptop["memory"]["planned"] == planned("laptop").memory.total
    kernels = {kernel["name"]: kernel for kernel in laptop["kernels"]}
    assert {"scan.walk", "scan.gradients", "conv.backward", "norm.forward"} <= kernels.keys()
    assert all(kernel["seconds"] > 0 for kernel in kernels.values())


@pytest.mark.slow
def test_rehearsed_flops_equal_the_count(reports: dict[str, Report]) -> None:
    assert_flops(reports["alone"], "alone")


@pytest.mark.slow
def test_rehearsed_memory_is_within_the_margin_of_the_plan(reports: dict[str, Report]) -> None:
    """The plan is the rehearsal's own, and within its margin."""
    for job, report in reports.items():
        peak = report["memory"]["peak"]
        total = planned(job).memory.total
        assert report["memory"]["planned"] == total
        assert abs(peak - total) < MARGIN * peak, job


@pytest.mark.slow
def test_compiled_kernels_do_not_spill(reports: dict[str, Report]) -> None:
    for report in (reports["alone"], rehearsed(["mamba2"])["mamba2"]):
        assert [kernel["name"] for kernel in report["kernels"] if kernel["spilled"]] == []


@pytest.mark.slow
def test_traffic_of_tensor_ranks_equals_the_plan(reports: dict[str, Report]) -> None:
    """Compare four micro-batches; the plan leaves out the loss's scalars and uncut weights."""
    for job in ("first of four, four times", "last of four, four times"):
        report = reports[job]
        rank_plan = planned(job)
        kinds = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
        per_micro_batch = sent(report, kinds, ranks=2, once=False) / 4
        assert per_micro_batch * report["micro_batches"] == pytest.approx(rank_plan.traffic.tensor, rel=0.03), job


@pytest.mark.slow
def test_rows_between_owners_of_experts_equal_the_plan() -> None:
    """In each layer, two exchanges in each pass, one message of numbers, and one wait for them.

    With slots there are more rows by the capacity, and neither numbers nor waits.
    """
    settings = ["recipe=moe_laptop", "precision=bf16", "parallel.expert=2", "phases.0.micro_batch=4"]
    settings += ["data.documents=join"]
    bounded = [*settings, "model.layers.-.capacity=1.25"]
    jobs = [[settings, 2, 0, False], [settings, 2, 0, False, None, 1.5], [bounded, 2, 0, False]]
    report, uneven, slots = printed_by("steps", json.dumps(jobs), processor_s=600)
    run_plan = RunPlan.of(load(settings))
    assert uneven["memory"]["peak"] > 1.02 * report["memory"]["peak"]
    assert uneven["memory"]["planned"] > 1.02 * report["memory"]["planned"]
    grown = [reported["memory"]["peak"] / reported["memory"]["planned"] for reported in (report, uneven, slots)]
    assert grown[1:] == pytest.approx([grown[0]] * 2, rel=0.01)
    assert slots["memory"]["planned"] > 1.01 * report["memory"]["planned"]
    layers = len([spec for spec in run_plan.arch.specs if spec.kind == "moe"])
    exchanges = [row for row in report["sent"] if row[1] == "all_to_all_single"]
    rows, numbers = max(exchanges, key=lambda row: row[6]), min(exchanges, key=lambda row: row[6])
    assert rows[5:] == [4 * layers, plan(largest_phase(run_plan), 2).ranks[0].traffic.experts]
    assert numbers[5] == layers
    assert [count for part, _, _, count in report["waits"] if part == "passes"] == [layers]
    ((*_, messages, bytes_sent),) = [row for row in slots["sent"] if row[1] == "all_to_all_single"]
    planned_bytes = plan(largest_phase(RunPlan.of(load(bounded))), 2).ranks[0].traffic.experts
    assert (messages, bytes_sent) == (4 * layers, planned_bytes)
    assert planned_bytes == 1.25 * rows[6]
    assert [count for part, _, _, count in slots["waits"] if part == "passes"] == []
