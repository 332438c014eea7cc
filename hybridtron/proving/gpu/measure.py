"""Measures the next undone parts of a list on this GPU, the most valuable first: `make gpu-measure`.

    python -m hybridtron.proving.gpu.measure --minutes 4.5
    python -m hybridtron.proving.gpu.measure --only norms --only "step gla_360m"
    python -m hybridtron.proving.gpu.measure --list        parts, limits, and which are done for the current code
    python -m hybridtron.proving.gpu.measure --page        writes benchmarks/gpu_queue.md from benchmarks/results/gpu
    python -m hybridtron.proving.gpu.measure --rehearse    all parts on any machine, with tiny sizes

A part is a small group of measurements: for example, those of one recipe's training step (`queue/parts.py`). Each part
runs in its own process with a time limit. A crash or hang therefore loses only the results of that part. A result is a
JSON line in a file in the output folder, and is on disk as soon as it is measured.

A part counts as done once its results are copied to benchmarks/results/gpu. It is done for one kind of GPU (the card)
and for one digest of the measured code. Docs, comments and other code do not change this digest.

For a machine without a network, `python -m hybridtron.proving.gpu.carry` makes a folder with everything that the
machine needs.

Exit codes: 0 all parts that ran are done, or no CUDA device; 1 a part failed; 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

from hybridtron.problems import Unusable
from hybridtron.proving.gpu.queue.child import read_modelled
from hybridtron.proving.gpu.queue.parts import PARTS, named
from hybridtron.proving.gpu.queue.rows import FAILED, Row, attempts, read
from hybridtron.proving.gpu.queue.run_parts import QueueRun, undone
from hybridtron.resources import pages

OUTPUT = Path("build/gpu_measure")
MINUTES = 4.5


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridtron.proving.gpu.measure", description="Measure the next undone parts on this GPU."
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all parts (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", choices=names, metavar="PART", help="run this part even if done; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the parts and their states")
    parser.add_argument("--page", action="store_true", help="write benchmarks/gpu_queue.md")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FOLDER", help="for results (default: %(default)s)"
    )
    parser.add_argument("--modelled", type=Path, metavar="FILE", help="modelled times, to show with measured times")
    parser.add_argument("--rehearse", action="store_true", help="use tiny sizes on any machine, to try this command")
    return parser.parse_args(arguments)


def results() -> Path | None:
    """Return the folder of committed results, or None outside a checkout."""
    folder = pages()
    return folder and folder / "results" / "gpu"


def main(arguments: list[str] | None = None) -> int:
    """List the parts, measure parts, or write the page, depending on the arguments. Return the exit code."""
    chosen = parse(arguments)
    committed = results()
    rows = [row for folder in (committed, chosen.output) if folder is not None for row in read(folder)]
    earlier = attempts(rows)
    from hybridtron.proving.gpu.queue import page  # imports torch, which --help does not need
    from hybridtron.proving.gpu.queue.card import card_here

    if chosen.page:
        if committed is None:
            raise Unusable(
                "--page writes benchmarks/gpu_queue.md of a checkout, but this package is not in a checkout: "
                "run the command in a checkout",
                code="no-file",
            )
        print(page.write(committed))
        return 0
    card = card_here()
    if chosen.list:
        print("\n".join(page.listed(earlier, card)))
        return 0
    if card is None and not chosen.rehearse:
        print(f"This machine has no CUDA device.\n\n{__doc__}")
        return 0
    if chosen.only:
        parts = [named(name) for name in chosen.only]
    else:
        parts = undone(PARTS, card or "cpu", earlier)
    first = about(card or "cpu", read_modelled(chosen.modelled).get("commit"), chosen.rehearse)
    file = file_of(chosen.output, card or "cpu")
    run = QueueRun(file, first, 60 * chosen.minutes, chosen.rehearse, chosen.modelled)
    ended = run.take(parts)
    print(f"{run.rows} has {len(ended)} parts: copy the file to benchmarks/results/gpu, and the parts count as done")
    return 1 if FAILED in ended.values() else 0


def about(card: str, carried: str | None, rehearsed: bool) -> Row:
    """Return the values that describe all results of this run: GPU, commit, versions, and whether sizes are tiny.

    `carried` is the commit that a folder made by `carry` records. This commit is used if the checkout is a copy without
    a git repository.
    """
    from hybridtron.device import describe_device
    from hybridtron.proving.gpu.recipes import commit, package_versions

    versions = ", ".join([f"Python {platform.python_version()}", *package_versions()])
    row = {"card": card, "gpu": describe_device(), "commit": commit() or carried, "versions": versions}
    return {**row, "rehearsed": rehearsed}


def file_of(folder: Path, card: str) -> Path:
    """Return a path for this run's results, named by time and card. The folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{card.replace(' ', '_')}.jsonl"


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except Unusable as error:
        print(error)
        raise SystemExit(2) from None
