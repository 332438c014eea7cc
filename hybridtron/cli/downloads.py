"""Downloads of published files for commands, with progress on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridtron.cli.arguments import progress_bar
from hybridtron.storage.published import download


def download_folder(output: Path) -> Path:
    """Return the folder for the files that become `output`; they stay there after the command."""
    return output.with_name(f"{output.name}.downloads")


def with_progress(source: str, folder: Path, kind: str, suffixes: Sequence[str]) -> list[Path]:
    """Download a source's files, as `storage.published.download` does, and show the bytes of each file."""
    with progress_bar(source) as report_progress:

        def moved(name: str, done: int, size: int | None) -> None:
            report_progress(done, done if size is None else size)

        return download(source, folder, kind, suffixes, moved)
