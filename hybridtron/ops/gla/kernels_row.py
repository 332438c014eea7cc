"""Sizes, grids and constants that the launches for gated linear attention and the delta rule share.

Legend: B rows (sequences in the batch), L tokens per row, H heads, N key channels, P value channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridtron.ops.kernel_launch import ceil_div


@dataclass(frozen=True)
class ChunkTiles:
    """Tile sizes for an op's kernels in one dtype."""

    chunk: int  # tokens per chunk
    part: int  # tokens per part; a chunk is divided into parts
    keys: int  # key channels per slice; a kernel computes a head's slices in different programs, or in a loop
    values: int  # value channels per slice
    warps: int = 4  # warps per program


class ChunkedKernelRow:
    """Helpers for kernel launches. An op's class inherits from this class and from the NamedTuple of the op's inputs.

    All tensors are contiguous. The field `documents_BL` has a mask for tokens that begin a document, not document
    numbers.
    """

    k_BLHN: Tensor
    v_BLHP: Tensor
    documents_BL: Tensor | None

    @property
    def tiles(self) -> ChunkTiles:
        """Tile sizes for v's dtype."""
        raise NotImplementedError

    @property
    def blocks(self) -> dict[str, int]:
        """Kernel constants for sizes along a head's channels, as {name: size}.

        BLOCK_N, BLOCK_P: numbers of key channels and value channels, padded
        KEYS, VALUES: key channels and value channels per slice
        """
        raise NotImplementedError

    @property
    def chunks(self) -> int:
        """Number of chunks in a row."""
        return ceil_div(self.v_BLHP.shape[1], self.tiles.chunk)

    @property
    def lengths(self) -> tuple[int, int]:
        """L and H: tokens per row, and heads."""
        return self.k_BLHN.shape[1], self.k_BLHN.shape[2]

    @property
    def slices(self) -> tuple[int, int]:
        """Number of slices for a head's key channels, and for its value channels."""
        of = self.blocks
        return of["BLOCK_N"] // of["KEYS"], of["BLOCK_P"] // of["VALUES"]

    def grid(self, per_chunk: int, per_head: int) -> tuple[int, int, int]:
        """Return a kernel's grid: (chunks * `per_chunk`, heads * `per_head`, rows)."""
        rows, _, heads, _ = self.k_BLHN.shape
        return self.chunks * per_chunk, heads * per_head, rows

    def named(self, names: tuple[str, ...], others: dict[str, Any]) -> dict[str, Any]:
        """Return the constants in `names`, CHUNK, and the compiler options `num_warps` and `num_stages`.

        `names` may list constants of this class, and constants in `others`, which maps names to values.
        """
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
