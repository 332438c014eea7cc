"""Small programs on a simulated GPU: every number is one that was counted by hand.

They run in a process of their own, because it cannot compute on a real device afterwards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridtron.ops.attention import AttentionInputs, torch_kernels
from hybridtron.planning.rates import FLOOR_S, GAP_S
from hybridtron.rehearse import events
from hybridtron.rehearse.attention_cost import flex_kernel, seen_pairs, varlen_kernel
from tests.rehearse.programs import PATIENT, printed_by

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.one_slice, PATIENT]
MIB = 1 << 20
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    """Run the programs of `by_hand`, and return the counted operations of each."""
    return printed_by("by_hand", processor_s=200)


def test_elementwise_operations_move_hand_counted_bytes(seen: dict[str, Seen]) -> None:
    values = 4 * 1000
    assert seen["elementwise"]["operations"] == [
        ["forward", "mul", 3 * values, 0],
        ["forward", "mul_", 3 * values, 0],
        ["forward", "zero_", values, 0],
        ["forward", "copy_", 2 * values, 0],
        ["forward", "add", 2 * values + 4, 0],
    ]
    cast, zeros, embedding = seen["cast_and_pick"]["operations"]
    assert cast == ["forward", "_to_copy", 1000 * (4 + 2), 0]
    assert zeros == ["forward", "zeros", 3 * 8, 0]
    assert embedding == ["forward", "embedding", 3 * 8 + 2 * 3 * 8 * 4, 0]  # not the table of 5000


def test_products_have_hand_counted_flops_in_both_passes(seen: dict[str, Seen]) -> None:
    products = [op for op in seen["product"]["operations"] if op[1] == "mm"]
    assert [(part, flops) for part, _, _, flops in products] == [
        ("forward", 2 * 30 * 40 * 50),
        ("backward", 2 * 30 * 40 * 50),
        ("backward", 2 * 30 * 40 * 50),
    ]
    assert products[0][2] == 2 * (30 * 40 + 40 * 50 + 30 * 50)


def test_product_added_in_place_moves_hand_counted_bytes(seen: dict[str, Seen]) -> None:
    moved = 2 * (30 * 40 + 40 * 50) + 4 * 2 * 30 * 50
    assert seen["added_up"]["operations"] == [["forward", "addmm", moved, 2 * 30 * 40 * 50]]


def test_grouped_products_have_hand_counted_flops_and_no_waits(seen: dict[str, Seen]) -> None:
    operations = seen["grouped"]["operations"]
    up = 2 * 32 * 24 * 2 * 40
    down = 2 * 32 * 40 * 24
    products = [(part, flops) for part, name, _, flops in operations if name == "_grouped_mm"]
    assert products == [
        ("forward", up), ("forward", down), ("backward", down), ("backward", down), ("backward", up), ("backward", up),
    ]  # fmt: skip
    assert seen["grouped"]["waits"] == []
    assert len(operations) <= 40


def test_rows_to_and_from_experts_are_read_and_written_once(seen: dict[str, Seen]) -> None:
    x = 2 * 16 * 24
    rows = 2 * 32 * 24
    places = 8 * 32
    weights = 4 * 32
    scores = 4 * 16 * 4  # of one tile of tokens
    loads = 4 * 4
    kernels = [op[:3] for op in seen["grouped"]["operations"] if op[1].startswith("experts.")]
    assert kernels == [
        ["forward", "experts.choose", 2 * scores + places + weights + loads + 4],  # and one entropy
        ["forward", "experts.total", loads + 4 + 2 * loads + 8],
        ["forward", "experts.count", places + places // 2 + loads],
        ["forward", "experts.starts", loads + 2 * loads + loads],
        ["forward", "experts.place", places + places // 2 + loads + 2 * places],
        ["forward", "experts.copy", x + rows + places],
        ["forward", "experts.add", x + rows + places + weights],
        ["backward", "experts.spread", x + 2 * rows + places + 2 * weights],
        ["backward", "experts.add", x + rows + places],
        ["backward", "experts.logit_gradients", 2 * scores + places + weights],
    ]


def test_operations_with_a_gpu_kernel_are_counted_as_one(seen: dict[str, Seen]) -> None:
    """A build without CUDA would take silu's gradient apart into some twelve."""
    assert seen["gate"]["operations"] == [["forward", "silu", 8000, 0], ["backward", "silu_backward", 12000, 0]]
    assert seen["composite"]["listed"] == seen["composite"]["taken apart"]


def test_separate_calls_have_hand_counted_work(seen: dict[str, Seen]) -> None:
    added, product, norm = seen["calls"]["works"]
    assert added[:3] == [1, 4 * 3 * 30 * 40, 0]
    assert product[:3] == [1, 4 * (30 * 40 + 40 * 50 + 30 * 50), 2 * 30 * 40 * 50]
    # x and y of ten rows of six channels in bf16; in fp32 the weight, and a number a row that backward needs
    assert norm[:3] == [1, 2 * (2 * 10 * 6) + 4 * 6 + 4 * 10, 0]
    assert [work[3] for work in (added, product, norm)] == pytest.approx([FLOOR_S + GAP_S] * 3)


def test_host_waits_are_counted_by_kind(seen: dict[str, Seen]) -> None:
    assert seen["asked"]["waits"] == [
        "item", "item", "item", "tolist", "nonzero", "copy to the host",
        "copy to the device", "copy to the device", "copy to the device", "device", "stream",
    ]  # fmt: skip


def test_random_numbers_write_hand_counted_bytes(seen: dict[str, Seen]) -> None:
    assert seen["drawn"]["operations"] == [["forward", "randn", 4000, 0]]


def test_copies_of_one_number_and_several_do_not_wait(seen: dict[str, Seen]) -> None:
    assert [operation[1] for operation in seen["one_number"]["operations"]] == ["_to_copy", "_to_copy"]
    assert seen["one_number"]["waits"] == []


def test_peak_memory_equals_a_hand_count(seen: dict[str, Seen]) -> None:
    # x, y and z of 4 MiB, and in the backward pass of the cosine sin(y), -sin(y) and its product with the gradient;
    # besides the sum and its gradient, a number each
    assert seen["held"]["most"] == 6 * 4 * MIB + 2 * 4
    assert seen["held"]["left"] == 0


def test_recomputed_operations_are_counted_in_the_backward_pass(seen: dict[str, Seen]) -> None:
    names = [name for part, name, _, _ in seen["run_again"]["operations"] if part == "backward"]
    assert names[:3] == ["sin", "cos", "sin"]  # the last of the four is not needed for any gradient


def test_collectives_send_hand_counted_bytes(seen: dict[str, Seen]) -> None:
    shard = 4 * 1600
    whole = 4 * 1600 * 16
    assert seen["sent"]["sent"] == [
        ["all_reduce", 2 * shard * 15 // 16, 16, True, 0],
        ["all_gather_into_tensor", whole * 15 // 16, 16, True, 0],
        ["reduce_scatter_tensor", whole * 15 // 16, 16, True, 1],  # one operation runs before it is waited for
    ]


@pytest.mark.parametrize("before", [-1, 0, 3, 100])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (5, 9)])
def test_pairs_of_queries_and_keys_equal_a_count_one_by_one(queries: int, keys: int, before: int) -> None:
    places = [(q + keys - queries, k) for q in range(queries) for k in range(keys)]
    seen = [k <= q and (before < 0 or q - k <= before) for q, k in places]
    assert seen_pairs(queries, keys, True, before) == sum(seen)
    assert seen_pairs(queries, keys, False, before) == queries * keys


def test_flex_attention_is_counted_by_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(events, "report_kernel", lambda name, moved, flops, kind: counted.append(flops))
    q_BHLK = torch.empty(1, 4, 300, 16)
    k_BGSK = torch.empty(1, 2, 400, 16)
    for window in (50, None):
        flex_kernel(window)(q_BHLK, k_BGSK, k_BGSK, block_mask=None, enable_gqa=True)
    products = 2 * 2 * 4 * 16  # two of them, over the channels of 4 heads
    assert counted == [products * 300 * 50, products * sum(range(101, 401))]


@pytest.mark.parametrize(("window", "seen"), [(50, 50 * 300 - 50 * 49 // 2), (None, 300 * 301 // 2)])
def test_attention_of_documents_in_torch_is_counted_by_its_window(
    window: int | None, seen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(events, "report_kernel", lambda name, moved, flops, kind: counted.append(flops))
    monkeypatch.setattr(torch_kernels, "_varlen_attn", lambda: varlen_kernel)
    q_BLHK = torch.empty(2, 300, 4, 16)
    k_BLGK = torch.empty(2, 300, 2, 16)
    y = torch_kernels.varlen(AttentionInputs(q_BLHK, k_BLGK, k_BLGK, window))
    assert y.shape == q_BLHK.shape
    assert counted == [2 * 2 * 2 * 4 * 16 * seen]
