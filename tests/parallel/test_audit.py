"""Parallel equals serial, by the audit's own cases; and the audit finds every bug that it is given."""

from __future__ import annotations

import itertools

import pytest

from hybridtron.config.schema import Recompute
from hybridtron.proving.audit.audit import Audit
from hybridtron.proving.audit.bugs import BUGS
from hybridtron.proving.audit.cases import ARCHITECTURES, LAYOUTS, Case, table
from hybridtron.proving.audit.differences import PRECISIONS, AuditPrecision
from tests.distributed import pool
from tests.slow import slow_except

CASES = list(table())
FAST_CASES = {
    ("samba", "tp2-pp2"),
    ("mamba-swa-mlp", "pp2-dp2"),
    ("mamba-mlp", "tp2-sp"),
    ("mamba", "pp4"),
    ("mamba2", "tp2"),
    ("samba", "cp2"),
    ("mamba3-swa", "tp2"),
    ("granite", "tp2-pp2"),
    ("sliding-gla", "tp2-sp"),
    ("sliding-retnet", "tp2"),
    ("gated-deltanet", "tp2-sp"),
    ("kda", "tp2"),
    ("rwkv6", "tp2-sp"),
    ("mistral", "tp2-dp2"),
    ("attention", "dp2"),
    ("mamba-hax", "tp2-sp"),
    ("samba-span", "tp2-pp2"),
    ("span-variants", "tp2"),
    ("zamba2", "pp2"),
    ("falcon-h1", "pp2-virtual2"),
    ("mup", "tp2"),
    ("jamba", "tp2"),
    ("capacity", "dp2-ep2"),
    ("capacity", "tp2-ep2-et1"),
    ("experts", "tp2-sp"),
    ("experts", "tp2-ep2-et1"),
    ("experts", "pp2-dp2-ep2"),
    ("adapters", "tp4"),
    ("adapters-dropout", "cp2-tp2"),
    ("adapters-dora", "tp2-sp"),
    ("kda", "cp4"),
    ("mamba2-attention", "cp2-pp2"),
    ("rwkv6", "cp2-dp2"),
}
COVERED_LAYOUTS = {"dp4-ep2", "dp4-ep4", "tp2-dp2-ep2", "tp2-dp2-ep4-et1", "tp2-et1", "cp2-ep2"}
"""Layouts without a fast case: fast cases have the same messages between experts."""
WITH_EXPERTS = ("jamba", "experts", "capacity")
FAST_BUGS = {
    "x_proj_backward",
    "beside_lost_at_border",
    "adapter_gradient",
    "lengths_of_rank",
    "document_at_cut",
    "micro_batch_scale",
}


def is_fast(case: Case, precision: AuditPrecision) -> bool:
    """Select every fast case in float64, and one layout in fp32, whose limit is another."""
    fast_precision = precision == PRECISIONS[0] or case.layout == "cp2-dp2"
    return (case.name, case.layout) in FAST_CASES and fast_precision


def params() -> list:
    cases = []
    for case, precision in itertools.product(CASES, PRECISIONS):
        marks = [pytest.mark.slow] * (not is_fast(case, precision))
        cases.append(pytest.param(case, precision, id=f"{case.name}-{case.layout}-{precision.name}", marks=marks))
    return cases


@pytest.mark.gloo
@pytest.mark.parametrize(("case", "precision"), params())
def test_every_layout_equals_one_process(case: Case, precision: AuditPrecision) -> None:
    worst = Audit(pool()).compare(case, precision)[0]
    assert worst.passes, f"{worst.what} is off by {worst.relative:.1e}, {worst.of_limit:.1f} times what it may"


@pytest.mark.gloo
@pytest.mark.parametrize("bug", slow_except(BUGS, *FAST_BUGS))
def test_every_planted_bug_is_noticed(bug: str) -> None:
    place = BUGS[bug].architecture, BUGS[bug].layout
    case = next(case for case in CASES if (case.name, case.layout) == place)
    worst = Audit(pool()).compare(case, PRECISIONS[0], bug)[0]
    assert not worst.passes


def test_fast_cases_cover_every_architecture_and_layout() -> None:
    assert {name for name, _ in FAST_CASES} == set(ARCHITECTURES)
    assert {layout for _, layout in FAST_CASES} == set(LAYOUTS) - COVERED_LAYOUTS


@pytest.mark.parametrize("layout", [name for name, sizes in LAYOUTS.items() if not sizes.divides_experts])
def test_cases_of_every_layout_have_every_option(layout: str) -> None:
    configs = [case.config for case in CASES if case.layout == layout]
    attention = [options for c in configs for letter, options in c.model.layers.items() if letter in c.model.pattern]
    assert {c.model.tie_embeddings for c in configs} == {True, False}
    assert {c.parallel.recompute for c in configs} == set(Recompute)
    assert len({c.data.documents for c in configs}) == 2
    assert {c.parallel.regather for c in configs} == {False, LAYOUTS[layout].sequence}
    assert {options["kv_heads"] for options in attention if options["kind"] == "attention"} == {1, 2}


def test_cases_that_divide_experts_have_every_recomputation() -> None:
    cases = [case for case in CASES if LAYOUTS[case.layout].divides_experts]
    layouts = [name for name, sizes in LAYOUTS.items() if sizes.divides_experts]
    assert {(case.name, case.layout) for case in cases} == set(itertools.product(WITH_EXPERTS, layouts))
    for name in WITH_EXPERTS:
        assert {case.config.parallel.recompute for case in cases if case.name == name} == set(Recompute)
