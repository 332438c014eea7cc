"""Values and tensors arrive at other ranks as they were sent; a pickle that a peer sends is not opened."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.parallel import plain_values
from hybridtron.parallel.plain_values import all_gather_tensors, all_gather_values, broadcast_value
from hybridtron.parallel.pool import Seat
from tests.distributed import run_distributed


def join(seat: Seat) -> None:
    place = {"rank": seat.rank, "world_size": seat.world_size}
    dist.init_process_group("gloo", init_method=f"file://{seat.meeting_file}", **place)


def of_rank(rank: int) -> list[Any]:
    """Plain values of every kind, whose lengths differ by rank."""
    return [None, rank, 0.1 * rank, float("inf"), "ü" * rank, {"key": [True] * rank}]


def tensors_of(rank: int) -> dict[str, Tensor]:
    """Tensors whose names, shapes and types differ by rank."""
    draw = torch.Generator().manual_seed(rank)
    if rank == 0:
        return {}
    tensors = {"7": torch.randn(3, rank, generator=draw, dtype=torch.float64), "scalar": torch.tensor(rank)}
    return tensors | {str(rank): torch.randn(2, 5, generator=draw).bfloat16().T}


def _exchanged(seat: Seat) -> tuple[list[Any], Any, bool]:
    join(seat)
    group = dist.new_group([0, 2])
    every = all_gather_tensors(tensors_of(seat.rank))
    right = all(
        got.keys() == tensors_of(rank).keys()
        and all(sent.dtype == got[name].dtype and sent.equal(got[name]) for name, sent in tensors_of(rank).items())
        for rank, got in enumerate(every)
    )
    said = ["from", 2]
    if seat.rank != 1:
        said = broadcast_value(["from", seat.rank], 2, group)
    return all_gather_values(of_rank(seat.rank)), said, right


@pytest.mark.gloo
def test_values_and_tensors_of_three_ranks_arrive_unchanged() -> None:
    for values, said, right in run_distributed(_exchanged, 3):
        assert values == [of_rank(rank) for rank in range(3)]
        assert said == ["from", 2]
        assert right


class Opened:
    """An object that touches a file when it is unpickled."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path(self.file),)  # type: ignore[return-value]


def _hostile(seat: Seat, file: str) -> str:
    """Send a pickle from rank 1, as torch's collectives do; return the error that another rank raises."""
    join(seat)
    if seat.rank == 1:
        sent = torch.frombuffer(bytearray(pickle.dumps(Opened(file))), dtype=torch.uint8)
        plain_values._all_gather_bytes(sent, None)
        return ""
    try:
        return str(all_gather_values("mine"))
    except ValueError as error:
        return type(error).__name__


@pytest.mark.gloo
def test_pickles_of_a_peer_are_not_loaded(tmp_path: Path) -> None:
    assert run_distributed(_hostile, 2, str(tmp_path / "opened"))[0] in ("JSONDecodeError", "UnicodeDecodeError")
    assert not (tmp_path / "opened").exists()


@contextmanager
def one_process() -> Iterator[None]:
    """Form a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_collectives_of_one_process_return_its_own_values() -> None:
    with one_process():
        assert all_gather_values(("a", 1)) == [["a", 1]]
        assert broadcast_value({"a": (1,)}, 0) == {"a": [1]}
        (received,) = all_gather_tensors({"x": torch.ones(2, 0), "y": torch.tensor(1.5)})
        assert received["x"].shape == (2, 0)
        assert received["y"] == 1.5


@pytest.mark.parametrize("dtype", [*plain_values.TYPES.values(), torch.int32, torch.uint8, torch.bool], ids=str)
def test_every_supported_type_arrives(dtype: torch.dtype) -> None:
    sent = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    with one_process():
        (received,) = all_gather_tensors({"x": sent})
    assert received["x"].dtype == dtype
    assert received["x"].equal(sent)


def test_tensor_of_an_unsupported_type_is_refused_by_its_sender() -> None:
    with one_process(), pytest.raises(TypeError, match=r"torch\.complex64"):
        all_gather_tensors({"x": torch.zeros(2, dtype=torch.complex64)})


def test_values_that_are_not_plain_are_refused() -> None:
    with pytest.raises(TypeError, match="JSON"):
        plain_values._bytes({"path": Path()})
