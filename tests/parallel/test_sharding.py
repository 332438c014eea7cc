"""Cutting weights over tensor-parallel ranks, and joining them: every weight of every mixer."""

from __future__ import annotations

import pytest
import torch

from hybridtron.architecture.base import Cut, Parameter
from hybridtron.architecture.inits import Normal
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.pool import Seat
from hybridtron.parallel.sharding import cut, gather, join
from tests.distributed import run_distributed

LAYERS = {
    "M": {"kind": "mamba", "state": 4},
    "S": {"kind": "mamba2", "state": 4, "head_dim": 4, "groups": 2},
    "G": {"kind": "attention", "heads": 12, "kv_heads": 4, "conv": 4},
    "Q": {"kind": "attention", "heads": 12, "kv_heads": 1, "conv": 4},
    "-": {"kind": "swiglu", "hidden": 36},
}
TABLE = architecture(ModelConfig(24, 60, "MGQ-S", LAYERS, tie_embeddings=False)).table


def mesh(ranks: int, rank: int) -> Mesh:
    return Mesh({"tensor": RankGroup(ranks, rank)})


def numbered(parameter: Parameter) -> torch.Tensor:
    """A weight whose entries are all different."""
    return torch.arange(parameter.size).view(parameter.shape)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", TABLE)
def test_shards_of_all_ranks_join_to_the_whole(name: str, ranks: int) -> None:
    parameter = TABLE[name]
    whole = numbered(parameter)
    shards = [cut(whole, parameter, mesh(ranks, rank)) for rank in range(ranks)]
    if (over := parameter.cut_over("tensor", ranks)) is None:
        assert all(torch.equal(shard, whole) for shard in shards)
    else:
        entries = torch.cat([shard.flatten() for shard in shards])
        assert torch.equal(entries.sort().values, whole.flatten()), "every entry on one rank"
        assert {tuple(shard.shape) for shard in shards} == {parameter.shard_shape({"tensor": ranks})}
        assert torch.equal(join(shards, parameter, over), whole)


def test_parts_of_a_fused_weight_are_cut_separately() -> None:
    parameter = Parameter((8, 1), Normal(1.0), parts=(("x", 4), ("z", 4)), cuts=(Cut(0),))
    whole = numbered(parameter)
    assert cut(whole, parameter, mesh(2, 0)).flatten().tolist() == [0, 1, 4, 5]
    assert cut(whole, parameter, mesh(2, 1)).flatten().tolist() == [2, 3, 6, 7]


def test_parts_may_be_fused_along_another_axis() -> None:
    parameter = Parameter((2, 4), Normal(1.0), parts=(("x", 2), ("z", 2)), parts_axis=1, cuts=(Cut(1),))
    assert cut(numbered(parameter), parameter, mesh(2, 1)).tolist() == [[1, 3], [5, 7]]


def test_parts_do_not_matter_where_another_axis_is_cut() -> None:
    parameter = Parameter((3, 4), Normal(1.0), parts=(("dt", 1), ("B", 2)), cuts=(Cut(1),))
    assert cut(numbered(parameter), parameter, mesh(2, 1)).tolist() == [[2, 3], [6, 7], [10, 11]]


def test_heads_are_never_split_by_a_cut() -> None:
    kv = {letter: TABLE[f"layers.{index}.mixer.kv.weight"] for index, letter in ((1, "G"), (2, "Q"))}
    assert [kv["G"].cut_over("tensor", ranks) is not None for ranks in (1, 2, 3, 4)] == [False, True, False, True]
    assert [kv["Q"].cut_over("tensor", ranks) for ranks in (1, 2, 3, 4)] == [None] * 4
    second = cut(numbered(kv["G"]), kv["G"], mesh(4, 1))[:, 0] // 24
    assert second.tolist() == [2, 3, 10, 11], "the second key head of two rows, the second value head"


EXPERTS = Parameter(
    (4, 12, 6), Normal(1.0), cuts=(Cut(0, "expert"), Cut(1, "tensor", unit=3)), parts=(("first", 2), ("second", 2))
)
"""The weights of four experts, fused two and two, each column-parallel."""


def test_tensor_is_cut_over_several_dimensions_of_the_mesh() -> None:
    whole = numbered(EXPERTS)
    place = Mesh({"expert": RankGroup(2, 1), "tensor": RankGroup(4, 2)})
    shard = cut(whole, EXPERTS, place)
    assert shard.shape == EXPERTS.shard_shape({"expert": 2, "tensor": 4}) == (2, 3, 6)
    assert torch.equal(shard, torch.stack([whole[1, 6:9], whole[3, 6:9]])), "the second expert of each part, unit 2"
    assert torch.equal(cut(whole[None], EXPERTS, place, leading=1), shard[None])


def test_shards_over_several_dimensions_join_in_the_opposite_order() -> None:
    whole = numbered(EXPERTS)
    (over_experts, over_tensor) = EXPERTS.cuts
    by_expert = []
    for expert in range(2):
        meshes = [Mesh({"expert": RankGroup(2, expert), "tensor": RankGroup(4, rank)}) for rank in range(4)]
        by_expert.append(join([cut(whole, EXPERTS, mesh) for mesh in meshes], EXPERTS, over_tensor))
    assert torch.equal(join(by_expert, EXPERTS, over_experts), whole)


def _gathered(seat: Seat) -> tuple[bool, bool]:
    """Four ranks as a mesh of two by two."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{seat.meeting_file}", rank=seat.rank, world_size=seat.world_size
    )
    expert, tensor = divmod(seat.rank, 2)
    rows = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mesh = Mesh({"expert": RankGroup(2, expert, columns[tensor]), "tensor": RankGroup(2, tensor, rows[expert])})
    whole = numbered(EXPERTS)
    shard = cut(whole, EXPERTS, mesh)
    return torch.equal(gather(shard, EXPERTS, mesh), whole), torch.equal(shard, whole)


@pytest.mark.gloo
def test_ranks_of_a_mesh_gather_their_shards() -> None:
    assert run_distributed(_gathered, 4) == [(True, False)] * 4
