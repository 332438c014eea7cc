"""Runs one part in its own process: `python -m hybridtron.proving.gpu.queue.child PART FILE`, started by the queue.

A part is a group of measurements on a GPU. A case is one measurement. Each result is appended to FILE as soon as it is
measured. The exit code is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hybridtron.proving.gpu.queue.parts import named
from hybridtron.proving.gpu.queue.rows import Recorder


def main(arguments: list[str] | None = None) -> int:
    """Measure the part that the arguments name. Return the exit code."""
    parser = argparse.ArgumentParser(description="Measure one part of the GPU queue.")
    parser.add_argument("part")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--modelled", type=Path)
    chosen = parser.parse_args(arguments)
    from hybridtron.proving.gpu.queue.card import card_here  # imports torch

    model = read_modelled(chosen.modelled)
    if model.get("gpu") != card_here():
        model = {"compiler": model.get("compiler")}  # times modelled for another GPU can't be compared
    recorder = Recorder(chosen.rows, chosen.part, chosen.tiny, model)
    named(chosen.part).function()(recorder)
    return 1 if recorder.failures else 0


def read_modelled(file: Path | None) -> dict[str, Any]:
    """Read the modelled times that `rehearse/queue_model.py` wrote, with their GPU and compiler; {} without a file."""
    if file is None:
        return {}
    return json.loads(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(main())
