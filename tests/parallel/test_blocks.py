"""Blocks of all ranks tile the whole tensors: weights, flat shards of them, and carried states."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.base import Cut, Parameter, StatePart
from hybridtron.architecture.inits import Normal
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.parallel.blocks import flat_rectangles, full_rectangle, lane_blocks, weight_blocks
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.sharding import cut

LAYERS = {
    "M": {"kind": "mamba", "state": 4},
    "S": {"kind": "mamba2", "state": 4, "head_dim": 4, "groups": 2},
    "G": {"kind": "attention", "heads": 12, "kv_heads": 4, "conv": 4, "window": 6},
    "Q": {"kind": "attention", "heads": 12, "kv_heads": 3, "conv": 4, "window": 6},
    "-": {"kind": "swiglu", "hidden": 36},
}
MODEL = ModelConfig(24, 60, "MGQ-S", LAYERS, tie_embeddings=False)
TABLE = architecture(MODEL).table


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def mesh_of(size: int, rank: int) -> Mesh:
    return Mesh({"tensor": RankGroup(size, rank)})


def parts_of(whole: Tensor, parameter: Parameter, name: str) -> dict[str, Tensor]:
    if not parameter.parts:
        return {name: whole}
    pieces = whole.split([size for _, size in parameter.parts], parameter.parts_axis)
    return {f"{name}.{part}": piece for (part, _), piece in zip(parameter.parts, pieces, strict=True)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", TABLE)
def test_flat_shards_of_all_ranks_tile_each_part_of_a_weight(name: str, ranks: int) -> None:
    parameter = TABLE[name]
    expected = parts_of(numbered(*parameter.shape), parameter, name)
    written = {key: torch.full_like(part, -1) for key, part in expected.items()}
    writers = ranks
    if parameter.cut_over("tensor", ranks) is None:
        writers = 1
    for rank in range(writers):
        mesh = mesh_of(ranks, rank)
        flat = cut(numbered(*parameter.shape), parameter, mesh)
        shape = flat.shape
        flat = flat.flatten()
        borders = sorted({0, len(flat) // 7, len(flat) // 2, len(flat) * 5 // 6 + 1, len(flat)})
        for start, stop in itertools.pairwise(borders):
            for block in weight_blocks(name, flat_rectangles(flat[start:stop], start, shape), parameter, mesh):
                into = written[block.key][tuple(map(slice, block.global_offset, ends(block)))]
                assert block.global_shape == expected[block.key].shape
                assert bool((into == -1).all()), "no entry twice"
                into.copy_(block.data)
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def ends(block) -> list[int]:
    return [first + size for first, size in zip(block.global_offset, block.local_shape, strict=True)]


def test_blocks_are_views() -> None:
    parameter = TABLE["layers.1.mixer.kv.weight"]
    weight = torch.zeros(parameter.shape[0] // 2, parameter.shape[1])
    for block in weight_blocks("w", [full_rectangle(weight)], parameter, mesh_of(2, 1)):
        block.data.fill_(1)
    assert bool((weight == 1).all())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("layer", [0, 1, 2, 4])
def test_states_of_all_ranks_and_lanes_tile_the_whole(layer: int, ranks: int) -> None:
    arch = architecture(MODEL)
    lanes = 4
    halves = (range(2), range(2, 4))
    for name, part in arch.specs[layer].state_parts(arch.sizes).items():
        if (layer == 4 and ranks in (3, 6)) or (layer == 1 and ranks == 6 and name == "kv_conv"):
            continue
        whole = numbered(lanes, *[size or 5 for size in part.shape])
        written = torch.full_like(whole, -1)
        read = []
        for rank, rows in itertools.product(range(ranks), halves):
            share = cut(whole[rows.start : rows.stop], part, mesh_of(ranks, rank), leading=1)
            for block in lane_blocks("key", share, part, rows, lanes, mesh_of(ranks, rank)):
                assert block.global_shape == whole.shape
                place = tuple(map(slice, block.global_offset, ends(block)))
                assert torch.equal(whole[place], block.data)
                if block.replica_id == 0:
                    assert bool((written[place] == -1).all()), "no entry twice"
                    written[place] = block.data
            read.append(share)
        assert torch.equal(written, whole), name


@pytest.mark.parametrize(("axis", "size"), [(0, 2), (1, 3)])
def test_flat_shards_over_two_dimensions_of_the_mesh_tile_each_part(axis: int, size: int) -> None:
    parts = (("first", size), ("second", size))
    parameter = Parameter((4, 6, 5), Normal(1.0), cuts=(Cut(0, "expert"), Cut(1)), parts=parts, parts_axis=axis)
    expected = parts_of(numbered(*parameter.shape), parameter, "w")
    assert {key: tuple(part.shape) for key, part in expected.items()} == parameter.stored("w")
    written = {key: torch.full_like(part, -1) for key, part in expected.items()}
    for expert, rank in itertools.product(range(2), range(3)):
        mesh = Mesh({"expert": RankGroup(2, expert), "tensor": RankGroup(3, rank)})
        flat = cut(numbered(*parameter.shape), parameter, mesh)
        shape = flat.shape
        flat = flat.flatten()
        for start, stop in itertools.pairwise((0, 3, 11, len(flat))):
            for block in weight_blocks("w", flat_rectangles(flat[start:stop], start, shape), parameter, mesh):
                into = written[block.key][tuple(map(slice, block.global_offset, ends(block)))]
                assert bool((into == -1).all()), "no entry twice"
                into.copy_(block.data)
    assert all(torch.equal(written[key], expected[key]) for key in expected)


def test_states_over_two_dimensions_of_the_mesh_tile_the_whole() -> None:
    """Keys that two query heads each read are on several ranks, and one of them writes; the tokens are cut too."""
    part = StatePart("kv", (8, 3, 2), cuts=(Cut(0, "context"), Cut(1, readers=6)))
    whole = numbered(2, *part.shape)
    written = torch.full_like(whole, -1)
    for context, rank in itertools.product(range(4), range(2)):
        mesh = Mesh({"context": RankGroup(4, context), "tensor": RankGroup(2, rank)})
        share = cut(whole, part, mesh, leading=1)
        for block in lane_blocks("key", share, part, range(2), 2, mesh):
            place = tuple(map(slice, block.global_offset, ends(block)))
            assert torch.equal(whole[place], block.data)
            if block.replica_id == 0:
                assert bool((written[place] == -1).all()), "no entry twice"
                written[place] = block.data
    assert torch.equal(written, whole)
