"""Transfer of a node's checkpoint files between the first ranks of two nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.manifest import FILE
from hybridtron.parallel.passing import pass_on, pieces_of
from hybridtron.storage.durable import sync

FileSizes = Sequence[tuple[str, int]]
"""The name and the size of each file of a part."""


def files_of(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """List the files of a part with their sizes."""
    sizes = [(name, file.size) for name, file in checkpoint.manifest.files.items()]
    return [*sizes, (FILE, (checkpoint.folder / FILE).stat().st_size)]


def files_in(message: Sequence[Sequence[Any]]) -> list[tuple[str, int]]:
    """Return the files that another node's message lists. A name that would lead out of the folder is replaced."""
    return [(Path(str(name)).name or "unnamed", int(size)) for name, size in message]


class Sender:
    """Messages with the bytes of a part's files. After an error of the disk zeros are sent, so that no rank waits."""

    def __init__(self, folder: Path, files: FileSizes) -> None:
        self.folder = folder
        self.files = files
        self.fault: OSError | None = None

    def messages(self) -> Iterator[Tensor]:
        """Yield each message, in the order in which `Receiver` writes them."""
        for name, size in self.files:
            position = 0
            for count in pieces_of(size):
                yield self._read(self.folder / name, position, count)
                position += count

    def _read(self, path: Path, position: int, count: int) -> Tensor:
        stored = bytearray(count)
        try:
            with path.open("rb") as file:
                file.seek(position)
                if file.readinto(stored) != count:
                    self.fault = OSError(f"{path} has fewer than {position + count} bytes")
        except OSError as error:
            self.fault = error
        return torch.frombuffer(stored, dtype=torch.uint8)


class Receiver:
    """A folder into which the messages of a `Sender` are written. After an error of the disk they are dropped."""

    def __init__(self, folder: Path, files: FileSizes) -> None:
        self.folder = folder
        self.fault: OSError | None = None
        self._open = [(name, count) for name, size in files for count in pieces_of(size)]
        self._next = 0
        try:
            folder.mkdir(parents=True)
            for name, _ in files:
                (folder / name).touch()
        except OSError as error:
            self.fault = error

    @property
    def sizes(self) -> list[int]:
        """The sizes of the messages that are expected."""
        return [count for _, count in self._open]

    def take(self, message: memoryview) -> None:
        """Append a message to its file."""
        name, _ = self._open[self._next]
        self._next += 1
        if self.fault is not None:
            return
        try:
            with (self.folder / name).open("ab", buffering=0) as file:
                while message:
                    message = message[file.write(message) :]
        except OSError as error:
            self.fault = error

    def flush(self) -> None:
        """Wait until all files are on disk."""
        if self.fault is not None:
            return
        try:
            for path in self.folder.iterdir():
                sync(path)
            sync(self.folder)
        except OSError as error:
            self.fault = error


def pass_files(
    group: dist.ProcessGroup, sender: Sender | None, target: int, receiver: Receiver | None, source: int
) -> None:
    """Send a part's files to the rank `target`, and at the same time receive a part's files from the rank `source`."""
    outgoing = iter(()) if sender is None else sender.messages()
    incoming = [] if receiver is None else receiver.sizes

    def take(message: memoryview) -> None:
        assert receiver is not None
        receiver.take(message)

    pass_on(group, outgoing, target, incoming, source, take)
    if receiver is not None:
        receiver.flush()
