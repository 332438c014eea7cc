"""Runs one part in its own process: `python -m hybridtron.proving.gpu.queue.child PART FILE`, started by the queue.

Rows are written to the file as they are measured. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hybridtron.proving.gpu.queue.parts import named
from hybridtron.proving.gpu.queue.rows import Recorder


def main(arguments: list[str] | None = None) -> int:
    """Measure the part. Returns the exit code."""
    parser = argparse.ArgumentParser(description="one part of the GPU queue")
    parser.add_argument("part")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--modelled", type=Path)
    chosen = parser.parse_args(arguments)
    from hybridtron.proving.gpu.queue.card import card_here  # imports torch

    model = modelled(chosen.modelled)
    if model.get("gpu") != card_here():
        model = {"compiler": model.get("compiler")}  # another card's times can't be compared
    recorder = Recorder(chosen.rows, chosen.part, chosen.tiny, model)
    named(chosen.part).function()(recorder)
    return 1 if recorder.failures else 0


def modelled(file: Path | None) -> dict[str, Any]:
    """Read a rehearsal's results for the parts; {} without a file."""
    if file is None:
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(main())
