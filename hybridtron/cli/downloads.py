"""Downloads of published files for commands, with progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hybridtron.progress import progress_bar
from hybridtron.storage.published import Moved, RemoteFile, download, download_file


def download_folder(output: Path) -> Path:
    """Return the folder for the files that become `output`; they stay there after the command."""
    return output.with_name(f"{output.name}.downloads")


def with_progress(source: str, folder: Path, kind: str, suffixes: Sequence[str]) -> list[Path]:
    """Download a source's files, as `storage.published.download` does, and show the bytes of each file."""
    with progress_bar(source) as report_progress:
        return download(source, folder, kind, suffixes, _shown_by(report_progress))


def file_with_progress(file: RemoteFile, folder: Path) -> Path:
    """Download a known file, as `storage.published.download_file` does, and show its bytes."""
    with progress_bar(file.name) as report_progress:
        return download_file(file, folder, _shown_by(report_progress))


def _shown_by(report_progress: Callable[[int, int], None]) -> Moved:
    """Return a function that a download calls to show its received bytes in a progress bar."""

    def moved(name: str, done: int, size: int | None) -> None:
        report_progress(done, done if size is None else size)

    return moved
