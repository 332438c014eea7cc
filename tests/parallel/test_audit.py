"""Parallel equals serial, by the audit's own cases; and the audit finds every bug that it is given."""

from __future__ import annotations

import pytest

from hybridtron.config.schema import Recompute
from hybridtron.proving.audit.bugs import BUGS
from hybridtron.proving.audit.cases import ARCHITECTURES, LAYOUTS, Case, table
from hybridtron.proving.audit.compared import PRECISIONS, AuditPrecision
from hybridtron.proving.audit.run import Audit
from tests.distributed import pool

CASES = list(table())
FAST_CASES = {
    ("samba", "tp2-pp2"),
    ("samba", "pp2-virtual2"),
    ("mamba-swa-mlp", "tp2"),
    ("mamba-swa-mlp", "pp2-dp2"),
    ("mamba-mlp", "tp2-sp"),
    ("mamba-mlp", "pp2"),
    ("mamba", "pp4"),
    ("mamba2", "tp2"),
    ("mamba2-attention", "tp2-sp"),
    ("mamba3-swa", "tp2"),
    ("granite", "tp2-pp2"),
    ("sliding-gla", "tp2-sp"),
    ("sliding-retnet", "tp2"),
    ("gated-deltanet", "tp2-sp"),
    ("kda", "tp2"),
    ("rwkv6", "tp2-sp"),
    ("mistral", "tp2-dp2"),
    ("attention", "dp2"),
    ("attention", "tp2-sp"),
    ("mamba-hax", "tp2-sp"),
    ("samba-span", "tp2-pp2"),
    ("span-variants", "tp2"),
    ("span-variants", "dp2"),
    ("zamba2", "pp2"),
    ("falcon-h1", "tp2-sp"),
    ("falcon-h1", "pp2-virtual2"),
    ("adapters", "tp2"),
    ("adapters", "tp4"),
    ("adapters", "tp2-pp2"),
    ("adapters-dropout", "cp2-tp2"),
    ("adapters-dora", "tp2-sp"),
    ("samba", "cp2"),
    ("kda", "cp4"),
    ("sliding-gla", "cp2-tp2"),
    ("mamba2-attention", "cp2-pp2"),
    ("rwkv6", "cp2-dp2"),
}
FAST_BUGS = {
    "x_proj_backward",
    "tied_gradient",
    "multiplied_stages",
    "shared_gradient",
    "lost_embedding",
    "beside_norm_gradient",
    "beside_lost_at_border",
    "kv_gradient",
    "group_norm_backward",
    "regathered_order",
    "adapter_gradient",
    "dropout_of_own_channels",
    "lengths_of_rank",
    "document_at_cut",
    "sums_over_data",
}


def params() -> list:
    return [
        pytest.param(
            case,
            precision,
            id=f"{case.name}-{case.layout}-{precision.name}",
            marks=() if (case.name, case.layout) in FAST_CASES else pytest.mark.slow,
        )
        for case in CASES
        for precision in PRECISIONS
    ]


@pytest.mark.gloo
@pytest.mark.parametrize(("case", "precision"), params())
def test_parallel_equals_serial(case: Case, precision: AuditPrecision) -> None:
    worst = Audit(pool()).compare(case, precision)[0]
    assert worst.passes, f"{worst.what} is off by {worst.relative:.1e}, {worst.of_limit:.1f} times what it may"


@pytest.mark.gloo
@pytest.mark.parametrize("bug", [pytest.param(b, marks=() if b in FAST_BUGS else pytest.mark.slow) for b in BUGS])
def test_every_bug_is_found(bug: str) -> None:
    place = BUGS[bug].architecture, BUGS[bug].layout
    case = next(case for case in CASES if (case.name, case.layout) == place)
    worst = Audit(pool()).compare(case, PRECISIONS[0], bug)[0]
    assert not worst.passes


def test_the_fast_selection_covers_every_architecture_and_layout() -> None:
    assert {name for name, _ in FAST_CASES} == set(ARCHITECTURES)
    assert {layout for _, layout in FAST_CASES} == set(LAYOUTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_every_option(layout: str) -> None:
    configs = [case.config for case in CASES if case.layout == layout]
    attention = [options for c in configs for letter, options in c.model.layers.items() if letter in c.model.pattern]
    assert {c.model.tie_embeddings for c in configs} == {True, False}
    assert {c.parallel.recompute for c in configs} == set(Recompute)
    assert len({c.data.documents for c in configs}) == 2
    assert {c.parallel.regather for c in configs} == ({True, False} if LAYOUTS[layout].sequence else {False})
    assert {options["kv_heads"] for options in attention if options["kind"] == "attention"} == {1, 2}
