"""Measures the next undone parts of a list on this GPU, the most valuable first. `make gpu-measure`.

    python -m hybridtron.proving.gpu.measure --minutes 4.5
    python -m hybridtron.proving.gpu.measure --only norms --only "step gla_360m"
    python -m hybridtron.proving.gpu.measure --list        parts, limits, and which are done for the current code
    python -m hybridtron.proving.gpu.measure --page        writes benchmarks/gpu_queue.md from benchmarks/results/gpu
    python -m hybridtron.proving.gpu.measure --rehearse    every line on any machine with tiny sizes

Each part runs in its own process with a time limit; one that hangs or crashes loses only its own rows. Rows are JSON
lines in one file of the output folder, on disk as soon as they are measured. When they are copied to
benchmarks/results/gpu and committed, their parts count as done for the card that measured them and for a digest of the
measured code. An edit of docs, comments or other code leaves them done. For a machine without a network, `python -m
hybridtron.proving.gpu.carry` makes a folder with everything that it needs.

Exit codes: 0 all parts that ran are done, or no CUDA device; 1 a part failed; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

from hybridtron.problems import Unusable
from hybridtron.proving.gpu.queue.child import modelled
from hybridtron.proving.gpu.queue.parts import PARTS, named
from hybridtron.proving.gpu.queue.rows import FAILED, Row, attempts, read
from hybridtron.proving.gpu.queue.run import QueueRun, undone
from hybridtron.shipped import pages

OUTPUT = Path("build/gpu_measure")
MINUTES = 4.5


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridtron.proving.gpu.measure", description="Measure the next undone parts on this GPU."
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all parts (default: %(default)s)")
    parser.add_argument("--only", action="append", choices=names, metavar="PART", help="done or not; may be repeated")
    parser.add_argument("--list", action="store_true", help="the parts, and which of them are done")
    parser.add_argument("--page", action="store_true", help="write benchmarks/gpu_queue.md")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER", help="of rows (default: %(default)s)")
    parser.add_argument("--modelled", type=Path, metavar="FILE", help="a rehearsal's times, to stand beside")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on any machine, to try this tool")
    return parser.parse_args(arguments)


def results() -> Path | None:
    """Return the folder of committed results, or None outside a checkout."""
    folder = pages()
    return folder and folder / "results" / "gpu"


def main(arguments: list[str] | None = None) -> int:
    """List, measure or write the page, as the arguments say. Returns the exit code."""
    chosen = parse(arguments)
    committed = results()
    rows = [row for folder in (committed, chosen.output) if folder is not None for row in read(folder)]
    earlier = attempts(rows)
    from hybridtron.proving.gpu.queue import page  # imports torch, which --help does not need
    from hybridtron.proving.gpu.queue.card import card_here

    if chosen.page:
        if committed is None:
            raise Unusable(
                "--page writes benchmarks/gpu_queue.md, and this is not a checkout: run it in one", code="no-file"
            )
        print(page.write(committed))
        return 0
    card = card_here()
    if chosen.list:
        print("\n".join(page.listed(earlier, card)))
        return 0
    if card is None and not chosen.rehearse:
        print(f"no CUDA device here.\n\n{__doc__}")
        return 0
    if chosen.only:
        parts = [named(name) for name in chosen.only]
    else:
        parts = undone(PARTS, card or "cpu", earlier)
    first = about(card or "cpu", modelled(chosen.modelled).get("commit"), chosen.rehearse)
    file = file_of(chosen.output, card or "cpu")
    run = QueueRun(file, first, 60 * chosen.minutes, chosen.rehearse, chosen.modelled)
    ended = run.take(parts)
    print(f"{run.rows}: {len(ended)} parts; committed in benchmarks/results/gpu they are done")
    return 1 if FAILED in ended.values() else 0


def about(card: str, carried: str | None, rehearsed: bool) -> Row:
    """Return the card, commit and versions of this run's numbers.

    A copy without git uses `carried`, the commit that was carried along.
    """
    from hybridtron.device import describe_device
    from hybridtron.proving.gpu.recipes import commit, package_versions

    versions = ", ".join([f"Python {platform.python_version()}", *package_versions()])
    row = {"card": card, "gpu": describe_device(), "commit": commit() or carried, "versions": versions}
    return {**row, "rehearsed": rehearsed}


def file_of(folder: Path, card: str) -> Path:
    """Return a new file for this run's rows, named by time and card."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{card.replace(' ', '_')}.jsonl"


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Unusable as error:
        print(error)
        raise SystemExit(2) from None
