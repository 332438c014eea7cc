"""What the launchers of gated linear attention's and of the delta rule's kernels share: sizes, chunks and programs.

Legend: as in `reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridtron.ops.kernel_launch import ceil_div


@dataclass(frozen=True)
class ChunkTiles:
    """Tokens of a chunk and of its parts; keys and values that a program holds at a time; warps of a program."""

    chunk: int
    part: int
    keys: int
    values: int
    warps: int = 4


class ChunkedKernelRow:
    """Beside an op's inputs, contiguous; in the place of documents, which tokens begin one."""

    k_BLHN: Tensor
    v_BLHP: Tensor
    documents_BL: Tensor | None

    @property
    def tiles(self) -> ChunkTiles:
        raise NotImplementedError

    @property
    def blocks(self) -> dict[str, int]:
        """BLOCK_N and BLOCK_P, a head's keys and values, and KEYS and VALUES, those of a program."""
        raise NotImplementedError

    @property
    def chunks(self) -> int:
        return ceil_div(self.v_BLHP.shape[1], self.tiles.chunk)

    @property
    def lengths(self) -> tuple[int, int]:
        """L, H."""
        return self.k_BLHN.shape[1], self.k_BLHN.shape[2]

    @property
    def slices(self) -> tuple[int, int]:
        """Programs among which a head's keys are divided, and its values."""
        of = self.blocks
        return of["BLOCK_N"] // of["KEYS"], of["BLOCK_P"] // of["VALUES"]

    def grid(self, per_chunk: int, per_head: int) -> tuple[int, int, int]:
        rows, _, heads, _ = self.k_BLHN.shape
        return self.chunks * per_chunk, heads * per_head, rows

    def named(self, names: tuple[str, ...], others: dict[str, Any]) -> dict[str, Any]:
        """Constants of a launch: the chunk and how it is run, and of these and the row's sizes those that are named."""
        sizes = {
            **self.blocks,
            "N": self.k_BLHN.shape[3],
            "P": self.v_BLHP.shape[3],
            "PART": self.tiles.part,
            "DOCUMENTS": self.documents_BL is not None,
            **others,
        }
        shared = {"CHUNK": self.tiles.chunk, "num_warps": self.tiles.warps, "num_stages": 1}
        return shared | {name: sizes[name] for name in names}
