"""Rectangles of tensors that are read from chunks of any other cut are those of the whole tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.checkpoint import fill as module
from hybridtron.checkpoint.files import write_tensors
from hybridtron.checkpoint.fill import Target, fill
from hybridtron.checkpoint.manifest import BrokenCheckpoint, File, StoredShard
from hybridtron.parallel.blocks import block, flat_rectangles, full_rectangle

Cut = list[tuple[tuple[int, ...], Tensor]]


def columns(whole: Tensor) -> Cut:
    """As tensor-parallel ranks hold them, of unequal widths."""
    return [((0, first), part) for first, part in zip((0, 2, 3), whole.split([2, 1, 4], dim=1), strict=True)]


def rows(whole: Tensor) -> Cut:
    return [((first, 0), part) for first, part in zip((0, 4, 5), whole.split([4, 1, 8]), strict=True)]


def flat(whole: Tensor) -> Cut:
    """As data-parallel ranks hold them: parts of rows, whole rows, parts of rows."""
    parts = zip((0, 17, 60), whole.flatten().split([17, 43, 31]), strict=True)
    return [tuple(one) for start, part in parts for one in flat_rectangles(part, start, whole.shape)]


def squares(whole: Tensor) -> Cut:
    return [((r, c), whole[r : r + 5, c : c + 3]) for r in (0, 5, 10) for c in (0, 3, 6)]


CUTS = {"columns": columns, "rows": rows, "flat": flat, "squares": squares}


def written(folder: Path, whole: Tensor, cut: Cut) -> tuple[list[StoredShard], dict[str, File]]:
    """Each chunk in a file of its own."""
    chunks, files = [], {}
    for number, (offset, part) in enumerate(cut):
        name = f"model-{number:05}.safetensors"
        one = block("w", tuple(whole.shape), offset, part.contiguous(), main=True)
        files[name], found = write_tensors(folder / name, [one])
        chunks += found
    return chunks, files


@pytest.mark.parametrize("at_once", [1, 60, 2**19])
@pytest.mark.parametrize("stored", CUTS)
@pytest.mark.parametrize("wanted", CUTS)
def test_any_cut_is_read_from_any_other(
    tmp_path: Path, stored: str, wanted: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it is read into views of wider memory, as parts of fused projections are."""
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    whole = torch.randn(13, 7)
    chunks, files = written(tmp_path, whole, CUTS[stored](whole))
    expected = CUTS[wanted](whole)
    into = [torch.full((part.shape[0], part.shape[1] + 2), 9.0) for _, part in expected]
    asked = [Target(held[:, 1:-1], offset) for held, (offset, _) in zip(into, expected, strict=True)]
    assert fill(tmp_path, chunks, files, asked) == whole.numel()
    assert all(torch.equal(held[:, 1:-1], part) for held, (_, part) in zip(into, expected, strict=True))
    assert all((held[:, [0, -1]] == 9).all() for held in into)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)])
def test_other_shapes_and_types(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """What was written in bf16 can be read into fp32."""
    whole = torch.randn(shape).bfloat16()
    chunks, files = written(tmp_path, whole, [full_rectangle(whole)])
    for into in (torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)):
        assert fill(tmp_path, chunks, files, [Target(into, (0,) * len(shape))]) == whole.numel()
        assert torch.equal(into, whole.to(into.dtype))


def test_a_chunk_beside_others_that_is_not_as_it_was_written_is_named(tmp_path: Path) -> None:
    whole = torch.randn(13, 7)
    chunks, files = written(tmp_path, whole, columns(whole))
    asked = [Target(torch.empty_like(whole), (0, 0))]
    path = tmp_path / "model-00001.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(BrokenCheckpoint, match=f"{path} is not as it was written"):
        fill(tmp_path, chunks, files, asked)
    path.unlink()
    with pytest.raises(BrokenCheckpoint, match=f"{path} is missing"):
        fill(tmp_path, chunks, files, asked)
    path.write_bytes(sound)
    with pytest.raises(BrokenCheckpoint, match="entries of type 'F8', which is not known"):
        fill(tmp_path, [one._replace(dtype="F8") for one in chunks], files, asked)
