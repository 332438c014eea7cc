"""Steps of training -> batches. The loader has no position of its own: it is asked for a step and answers with it.

Lanes are the rows of the global batch; lane i of step s is row s * global_batch + i of the phase, and a micro-batch is
a fixed slice of the lanes. So neither its size nor the order of the questions changes what is read, and a checkpoint
needs nothing but the step and `fingerprint`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from hybridtron.config.problems import ConfigError
from hybridtron.config.schema import Config, Documents, Source
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.data.corpus import prepare_embedded
from hybridtron.data.folder import TokenFolder, problems
from hybridtron.data.packing import (
    ShuffledWindows,
    Span,
    gather,
    positions_in_document,
    same_document,
    sequential_rows,
)


class Loader:
    """The batches of one phase, on the CPU: step -> micro-batches, in which every row is full.

    Of so many data-parallel `ranks` each reads its own run of lanes; what a lane reads does not depend on them.
    """

    def __init__(
        self,
        folder: TokenFolder,
        documents: Documents,
        seq_len: int,
        global_batch: int,
        micro_batch: int,
        seed: int,
        split: str = "train",
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if global_batch % (micro_batch * ranks):
            wanted = f"micro_batch={micro_batch} on {ranks} ranks"
            raise ValueError(f"global_batch={global_batch} is not a multiple of {wanted}")
        self.folder = folder
        self.documents = documents
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.lanes = range(rank * global_batch // ranks, (rank + 1) * global_batch // ranks)
        self._tokens = folder.tokens(split)
        self._windows = ShuffledWindows(folder.lengths(split), seq_len, seed)
        order = (folder.digest, split, documents.value, seq_len, global_batch, seed)
        self._fingerprint = hashlib.blake2b(repr(order).encode(), digest_size=8).hexdigest()

    @property
    def fingerprint(self) -> str:
        """Digest of all that determines which tokens a step reads; a resumed run must find the same one."""
        return self._fingerprint

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """The batches of this rank's lanes in a step, which counts from 0 at the start of the phase."""
        first_row = step * self.global_batch
        for lane in self.lanes[:: self.micro_batch]:
            rows = range(first_row + lane, first_row + lane + self.micro_batch)
            yield _batch(self._tokens, [self._windows.spans(row) for row in rows], self.documents)

    def iterate(self, first_step: int, end_step: int) -> Generator[list[Batch], None, None]:
        """The micro-batches of each step from `first_step` to before `end_step`; a thread reads one step ahead."""
        with ThreadPoolExecutor(1, "loader") as pool:
            reads = (pool.submit(self._read, step) for step in range(first_step, end_step))
            following = next(reads, None)
            while following is not None:
                current, following = following.result(), next(reads, None)
                yield current

    def _read(self, step: int) -> list[Batch]:
        return list(self.micro_batches(step))


def held_out(folder: TokenFolder, documents: Documents, seq_len: int, tokens: int, micro_batch: int) -> Iterator[Batch]:
    """The validation split from its start on, about `tokens` of it, in its own order; the last batch may be smaller.

    Every seq_len reads the same text, up to a row, so that losses at several lengths can be compared.
    """
    stored = folder.tokens("validation")
    rows = sequential_rows(folder.lengths("validation"), seq_len, tokens)
    for first in range(0, len(rows), micro_batch):
        yield _batch(stored, rows[first : first + micro_batch], documents)


def build_loader(config: Config, phase_index: int, rank: int = 0, ranks: int = 1) -> Loader:
    """The loader of a phase. An embedded corpus that is not there yet is prepared first."""
    phase = config.phases[phase_index]
    data = config.data_of(phase)
    path = Path(data.path)
    if data.source == Source.embedded:
        prepare_embedded(path, config.model.vocab_size)
        if found := problems(config):  # what nobody could know before it was prepared
            raise ConfigError(found)
    folder = TokenFolder.open(path)
    seed = phase_seed(config.run.seed, phase_index)
    return Loader(
        folder, data.documents, phase.seq_len, phase.global_batch, phase.micro_batch, seed, "train", rank, ranks
    )


def phase_seed(seed: int, phase_index: int) -> int:
    """64 bits from the run's seed and the phase, so that two phases on the same data read it in different orders."""
    digest = hashlib.blake2b(f"{seed}/{phase_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _batch(tokens: np.ndarray, rows: Sequence[Sequence[Span]], documents: Documents) -> Batch:
    tokens_BT, documents_BT = gather(tokens, rows)
    tokens_BL, labels_BL = torch.from_numpy(tokens_BT[:, :-1].copy()), torch.from_numpy(tokens_BT[:, 1:].copy())
    if documents is Documents.join:
        mask_BL = torch.ones(tokens_BL.shape, dtype=torch.bool)
        return Batch(tokens_BL, labels_BL, mask_BL, SeqInfo.stream(len(tokens_BL), tokens_BL.shape[1]))
    documents_BL = np.ascontiguousarray(documents_BT[:, :-1])
    positions_BL = torch.from_numpy(positions_in_document(documents_BL))
    mask_BL = torch.from_numpy(same_document(documents_BT))
    return Batch(tokens_BL, labels_BL, mask_BL, SeqInfo(positions_BL, torch.from_numpy(documents_BL)))
