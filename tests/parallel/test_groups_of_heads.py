"""Heads whose groups do not share out as they do: each rank finds the groups of its own heads, and nothing changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridtron.config.schema import Documents, ParallelConfig
from hybridtron.parallel.linear import TensorGroup
from hybridtron.proving.audit.audit import Audit
from hybridtron.proving.audit.cases import Case, Layout, small, small_model
from hybridtron.proving.audit.differences import PRECISIONS
from tests.distributed import pool


@pytest.mark.parametrize(
    ("ranks", "heads", "groups", "used"),
    [
        (2, 8, 1, [slice(0, 1)] * 2),
        (4, 8, 2, [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]),
        (2, 8, 4, [slice(0, 2), slice(2, 4)]),
        (3, 12, 2, [slice(0, 1), slice(0, 2), slice(1, 2)]),
        (2, 6, 3, [[0, 0, 1], [1, 2, 2]]),
    ],
)
def test_ranks_use_the_groups_of_their_heads(
    ranks: int, heads: int, groups: int, used: list[slice | list[int]]
) -> None:
    assert [TensorGroup(ranks, rank).groups_used(heads, groups) for rank in range(ranks)] == used


@pytest.mark.gloo
@pytest.mark.parametrize(("ranks", "groups"), [(4, 2), (2, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_mamba2_with_any_groups_equals_one_process(ranks: int, groups: int) -> None:
    """12 heads: each group on two of four ranks; one group across the border of two; both on the second of three."""
    model = replace(small_model("SG", tied=True, heads={}), width=24)
    model.layers["G"]["groups"] = groups
    config = small(model, Layout(tensor=ranks).on(ParallelConfig()), Documents.isolate, data=1)
    worst = Audit(pool()).compare(Case("groups", f"tp{ranks}", config, 1), PRECISIONS[0])[0]
    assert worst.passes, f"{worst.what} is off by {worst.relative:.1e}"
