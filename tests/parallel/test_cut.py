"""Cutting weights over tensor-parallel ranks, and joining them: every weight of every mixer."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture.base import Normal, Parameter
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import parameter_table
from hybridtron.parallel.cut import cut, join
from hybridtron.parallel.linear import TensorGroup

LAYERS = {
    "M": {"kind": "mamba", "state": 4},
    "S": {"kind": "mamba2", "state": 4, "head_dim": 4, "groups": 2},
    "G": {"kind": "attention", "heads": 12, "kv_heads": 4, "conv": 4},
    "Q": {"kind": "attention", "heads": 12, "kv_heads": 1, "conv": 4},
    "-": {"kind": "swiglu", "hidden": 36},
}
TABLE = parameter_table(ModelConfig(24, 60, "MGQ-S", LAYERS, tie_embeddings=False))


def numbered(parameter: Parameter) -> torch.Tensor:
    """A weight whose entries are all different."""
    return torch.arange(parameter.size).view(parameter.shape)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", TABLE)
def test_shares_of_all_ranks_make_the_whole(name: str, ranks: int) -> None:
    parameter = TABLE[name]
    whole = numbered(parameter)
    shares = [cut(whole, parameter, TensorGroup(ranks, rank)) for rank in range(ranks)]
    assert torch.equal(join(shares, parameter), whole)
    if parameter.cut_axis(ranks) is None:
        assert all(torch.equal(share, whole) for share in shares)
    else:
        entries = torch.cat([share.flatten() for share in shares])
        assert torch.equal(entries.sort().values, whole.flatten()), "every entry on one rank"
        assert len({share.shape for share in shares}) == 1


def test_each_part_of_a_fused_weight_is_cut_for_itself() -> None:
    parameter = Parameter((8, 1), Normal(1.0), parts=(("x", 4), ("z", 4)), split=0)
    whole = numbered(parameter)
    assert cut(whole, parameter, TensorGroup(2, 0)).flatten().tolist() == [0, 1, 4, 5]
    assert cut(whole, parameter, TensorGroup(2, 1)).flatten().tolist() == [2, 3, 6, 7]


def test_parts_are_no_matter_where_the_other_axis_is_cut() -> None:
    parameter = Parameter((3, 4), Normal(1.0), parts=(("dt", 1), ("B", 2)), split=1)
    assert cut(numbered(parameter), parameter, TensorGroup(2, 1)).tolist() == [[2, 3], [6, 7], [10, 11]]


def test_heads_stay_together_or_the_weight_stays_whole() -> None:
    kv = {letter: TABLE[f"layers.{index}.mixer.kv.weight"] for index, letter in ((1, "G"), (2, "Q"))}
    assert [kv["G"].cut_axis(ranks) for ranks in (1, 2, 3, 4)] == [None, 0, None, 0]
    assert [kv["Q"].cut_axis(ranks) for ranks in (1, 2, 3, 4)] == [None] * 4
    second = cut(numbered(kv["G"]), kv["G"], TensorGroup(4, 1))[:, 0] // 24
    assert second.tolist() == [2, 3, 10, 11], "the second key head of two rows, the second value head"
