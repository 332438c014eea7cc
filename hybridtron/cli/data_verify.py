"""Verify a folder of prepared tokens: read all of it and list every fault.

    hybridtron data verify DIR
    hybridtron data verify DIR --workers 8

Each fault is printed as a line with the file's name and, if known, the document's number. The last line is a summary.

Exit codes: 0 no fault, 1 at least one fault, 2 there is no such folder.
"""

from __future__ import annotations

from pathlib import Path

from hybridtron.cli.arguments import positive
from hybridtron.config.units import readable
from hybridtron.data.mds.verify import FolderReport, verify
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser, Unusable
from hybridtron.progress import progress_bar


def main(arguments: list[str]) -> int:
    """Verify the folder and print its faults. Returns the exit code."""
    parser = CommandParser(
        prog="hybridtron data verify",
        description="Compare every byte of a folder of prepared tokens with its manifest.",
    )
    parser.add_argument("folder", type=path_of, metavar="DIR", help="a folder that hybridtron data prepare has written")
    parser.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="processes that read shards; default: 1"
    )
    chosen = parser.parse_args(arguments)
    if not chosen.folder.is_dir():
        if chosen.folder.exists():
            why = "is not a folder"
        else:
            why = "does not exist"
        raise Unusable(
            f"{chosen.folder} {why}: name a local folder; data at a URL must be verified where it was prepared",
            code="no-file",
        )
    with progress_bar(f"{chosen.folder}: shards") as report_progress:
        report = verify(chosen.folder, chosen.workers, report_progress)
    for fault in report.faults:
        print(fault)
    print(summary(chosen.folder, report))
    return 1 if report.faults else 0


def summary(folder: Path, report: FolderReport) -> str:
    """Format the summary line of a report."""
    faults = len(report.faults)
    if faults:
        verdict = f"{faults} fault{'s' if faults > 1 else ''}"
    else:
        verdict = "no fault"
    sources = f"{report.sources} source{'' if report.sources == 1 else 's'}"
    shards = f"{report.shards} shard{'' if report.shards == 1 else 's'}"
    return f"{folder}: {sources}, {shards}, {readable(report.tokens)} tokens: {verdict}"
